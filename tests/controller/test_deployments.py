"""Deployments: a checkpoint that is served by a real process, kept up, and gone when it should be."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from served_controller import add_training

from penstock.chat.renderer import Renderer
from penstock.engines.checkpoint_files import CheckpointState, encode_state
from penstock.errors import ControllerError
from penstock.gateway.app import Gateway
from penstock.http.server import HttpServer
from penstock.models import resolve
from penstock.pool.base import PoolStats
from penstock.pool.memory import MemoryPool
from penstock.records import PolicyVersion, Sampling
from penstock.testing import ScriptedEngine, write_tokenizer
from penstock_controller.database import ControllerDatabase
from penstock_controller.deployments import Deployments
from penstock_controller.home import Home
from penstock_controller.identity import Identity
from penstock_controller.model_server import DeploymentApp, bind_port
from penstock_controller.runs import RunQueue, RunStatus

DEADLINE_S = 120
ASKED = {"model": "any", "messages": [{"role": "user", "content": "6 times 7?"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def tiny():
    """The model's files, pulled once."""
    return resolve("tiny").path


def save_checkpoint(results: Path, tiny: Path, number: int, *, step: int) -> Path:
    """A checkpoint as training lays it out."""
    folder = results / "checkpoints" / f"{number:06d}"
    shutil.copytree(tiny, folder)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    random = {"python_random": (), "python_gauss": None, "torch_random": "", "cuda_random": None}
    state = CheckpointState(version=PolicyVersion(number=number, step=step), files=sizes, **random)
    (folder / "state.json").write_bytes(encode_state(state))
    return folder


@contextlib.asynccontextmanager
async def opened(folder, **options):
    home = Home(folder / "home").create()
    database = ControllerDatabase(home.database)
    deployments = Deployments(database, home, ready_timeout_s=DEADLINE_S, **options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await deployments.start()
            yield deployments
    finally:
        await deployments.close()
        database.close()


def train(folder, tiny, name="sums", **options):
    """A training run that left two checkpoints."""
    home = Home(folder / "home").create()
    database = ControllerDatabase(home.database)
    run, results = add_training(RunQueue(database), home, name, **options)
    saved = [save_checkpoint(results, tiny, number, step=step) for number, step in ((1, 2), (3, 4))]
    database.close()
    return run, saved


async def chat(deployment, *, token=None, path="/chat/completions", body=ASKED):
    headers = {"authorization": f"Bearer {deployment.token if token is None else token}"}
    async with aiohttp.ClientSession() as session, session.post(deployment.url + path, json=body, headers=headers) as response:
        return response.status, await response.json() if response.content_type == "application/json" else await response.text()


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # nobody is notified when a process ends


def test_checkpoints_of_finished_runs_are_models(tmp_path, tiny):
    async def whole():
        _, saved = train(tmp_path, tiny)
        train(tmp_path, tiny, "stopped", status=RunStatus.STOPPED)
        (saved[1] / "model.safetensors").write_bytes(b"cut short")
        async with opened(tmp_path) as deployments:
            names = [each.name for each in deployments.models.trained()]
            assert names == ["stopped/step-4", "stopped/step-2", "sums/step-2"]
            assert deployments.resolve("sums") == deployments.resolve("sums/step-2") == str(saved[0])
            assert deployments.resolve("tiny") == deployments.models.find("tiny").name == "tiny"
            for unknown in ("none", "sums/step-9", "sums/step-4", "../sums", "sums/", ""):
                assert deployments.resolve(unknown) is None

    asyncio.run(whole())


def test_active_run_has_no_models(tmp_path):
    async def whole():
        async with opened(tmp_path) as deployments:
            home = Home(tmp_path / "home")
            database = ControllerDatabase(home.database)
            run, results = add_training(RunQueue(database), home, "sums")
            database.write("UPDATE runs SET status = 'running' WHERE id = ?", [run.id])
            (results / "checkpoints" / "000001").mkdir(parents=True)
            database.close()
            assert deployments.models.trained() == []

    asyncio.run(whole())


@pytest.mark.slow
def test_a_checkpoint_answers_until_it_is_undeployed(tmp_path, tiny):
    async def whole():
        train(tmp_path, tiny)
        async with opened(tmp_path, max_deployments=1) as deployments:
            made = await deployments.deploy("sums", who=Identity("t1", "ann", person="ann"))
            assert (made.name, made.status, made.deployed_by) == ("sums/step-4", "active", "ann")
            assert await deployments.deploy("sums/step-4") == made
            status, answer = await chat(made)
            assert status == 200 and answer["choices"][0]["finish_reason"] and answer["usage"]["completion_tokens"] <= 4
            status, streamed = await chat(made, body=ASKED | {"stream": True})
            assert status == 200 and streamed.rstrip().endswith("data: [DONE]")
            assert (await chat(made, path="/messages"))[0] == 200
            for wrong in ("", "dk-wrong"):
                assert (await chat(made, token=wrong))[0] == 401
            with pytest.raises(ControllerError, match="sums/step-4") as full:
                await deployments.deploy("sums/step-2")
            assert (full.value.status, full.value.code) == (409, "DEPLOYMENTS_FULL")
            assert await deployments.undeploy("sums") == await deployments.undeploy("sums") == "sums/step-4"
            assert is_gone(made.pid) and deployments.names() == [] and deployments.get("sums/step-4") is None

    asyncio.run(whole())


def test_calls_are_independent_and_not_stored(tmp_path):
    async def whole():
        write_tokenizer(tmp_path / "model")
        renderer = Renderer.load(tmp_path / "model")
        engine, pool = ScriptedEngine(["one", "two", "six"], renderer.tokenizer), MemoryPool(tmp_path)
        gateway = Gateway(engine, renderer, pool, secret=b"s" * 32)
        front = DeploymentApp(gateway, pool, token="right", sampling=Sampling(max_tokens=50))
        async with HttpServer(front, sock := bind_port(0), drain_s=1, reader_s=20):
            made = SimpleNamespace(url=f"http://127.0.0.1:{sock.getsockname()[1]}/v1", token="right")
            said = [(await chat(made))[1]["choices"][0]["message"]["content"] for _ in range(3)]
            assert said == ["one", "two", "six"]  # the same words again are no retry
            assert (await chat(made, path="/../rollouts"))[0] in (403, 404)
        assert (await pool.stats(), await pool.position()) == (PoolStats(), 0)

    asyncio.run(whole())


def test_unservable_checkpoint_reports_why(tmp_path, tiny):
    async def whole():
        _, saved = train(tmp_path, tiny)
        (saved[1] / "tokenizer.json").write_bytes(b"x" * (saved[1] / "tokenizer.json").stat().st_size)
        async with opened(tmp_path) as deployments:
            with pytest.raises(ControllerError, match="sums/step-4") as refused:
                await deployments.deploy("sums")
            assert (refused.value.status, refused.value.code) == (409, "DEPLOYMENT_FAILED")
            assert deployments.names() == []

    asyncio.run(whole())


def test_unknown_and_unpulled_models_are_refused(tmp_path, monkeypatch):
    async def whole():
        async with opened(tmp_path) as deployments:
            for wanted in (deployments.deploy, deployments.undeploy):
                with pytest.raises(ControllerError, match="list") as unknown:
                    await wanted("none")
                assert unknown.value.status == 404
            with pytest.raises(ControllerError, match="tiny") as absent:
                await deployments.deploy("tiny")
            assert absent.value.status == 409

    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    asyncio.run(whole())


VLLM = """#!{python}
import http.server, json, os, sys
folder, port = sys.argv[2], int(sys.argv[sys.argv.index("--port") + 1])

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, {{}})
    def do_POST(self):
        right = self.headers["authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        self.answer(200 if right else 401, {{"arguments": sys.argv[1:], "pid": os.getpid()}})
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *words):
        pass

http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A program called vllm that is quickly up."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(VLLM.format(python=sys.executable))
    (tmp_path / "bin" / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_vllm_serves_where_it_is_asked_for(tmp_path, tiny, vllm):
    async def whole():
        _, saved = train(tmp_path, tiny)
        async with opened(tmp_path) as deployments:
            made = await deployments.deploy("sums", engine="vllm")
            status, answer = await chat(made)
            assert status == 200 and answer["arguments"][:2] == ["serve", str(saved[1])]
            assert answer["arguments"][-2:] == ["--served-model-name", "sums/step-4"] and (await chat(made, token="x"))[0] == 401
            await deployments.undeploy("sums")
            assert is_gone(made.pid) and is_gone(answer["pid"])

    asyncio.run(whole())


def test_an_engine_that_is_unknown_or_not_installed_is_refused(tmp_path, tiny, monkeypatch):
    async def whole():
        train(tmp_path, tiny)
        async with opened(tmp_path) as deployments:
            monkeypatch.setenv("PATH", str(tmp_path))
            with pytest.raises(ControllerError, match="vllm"):
                await deployments.deploy("sums", engine="vllm")
            with pytest.raises(ControllerError, match="embedded"):
                await deployments.deploy("sums", engine="none")
            assert deployments.names() == []

    asyncio.run(whole())


@pytest.mark.parametrize("how", ["killed", "its server stuck"])
def test_lost_process_is_replaced_at_the_same_address(tmp_path, tiny, vllm, how):
    async def whole():
        train(tmp_path, tiny)
        async with opened(tmp_path, health_s=0.3) as deployments:
            made = await deployments.deploy("sums", engine="vllm")
            server = (await chat(made))[1]["pid"]
            number = signal.SIGSTOP if how == "its server stuck" else signal.SIGKILL
            os.kill(made.pid if how == "killed" else server, number)
            await until(lambda: (now := deployments.get(made.name)).url and now.pid != made.pid)
            again = deployments.get(made.name)
            assert (again.url, again.token) == (made.url, made.token) and (await chat(again))[0] == 200
            await until(lambda: is_gone(made.pid) and is_gone(server))

    asyncio.run(whole())


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from penstock_controller.database import ControllerDatabase
from penstock_controller.deployments import Deployments
from penstock_controller.home import Home

async def whole():
    home = Home(Path(sys.argv[1]))
    deployments = Deployments(ControllerDatabase(home.database), home, ready_timeout_s=100)
    made = await deployments.deploy("sums", engine="vllm")
    print(made.pid, made.url, made.token, flush=True)
    await asyncio.sleep(100)

asyncio.run(whole())
"""


@pytest.mark.slow
def test_deployment_ends_with_controller_and_returns_with_the_next(tmp_path, tiny, vllm):
    train(tmp_path, tiny)
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path / "home")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        pid, url, token = controller.stdout.readline().split()
        assert not is_gone(int(pid))
        controller.kill()

    async def following():
        async with asyncio.timeout(DEADLINE_S):
            await until(lambda: is_gone(int(pid)))
        async with opened(tmp_path) as deployments:
            await until(lambda: deployments.get("sums/step-4").url)
            now = deployments.get("sums/step-4")
            assert (now.url, now.token) == (url, token) and (await chat(now))[0] == 200
        assert is_gone(now.pid)

    asyncio.run(following())
