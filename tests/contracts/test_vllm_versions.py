"""vLLM 0.22 to 0.32: what differs between them, asked politely, and servers that were left paused."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from engine_cases import read, run, write_policy

from faults.upstream_cases import VERSIONS, FakeVllm, engine_over, opened
from penstock.engines.servers import base, pauses, vllm
from penstock.errors import ConfigError, EngineError, RequestError
from penstock.records import Sampling
from penstock.system.files import FileLock

PROMPT = [1, 2, 3]
SHORT = Sampling(max_tokens=4)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "0")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_takes_weights_and_serves_them(version: str, start: Path, tmp_path: Path):
    async def case():
        server = FakeVllm(version=version)
        async with server, opened([server.url], start) as engine:
            server.confesses = True
            for number in (1, 2):
                await engine.load(number, write_policy(tmp_path / str(number)))
                reply = await read(engine, PROMPT, SHORT)
                assert (set(reply.versions), reply.logprobs[0], server.held) == ({number}, -float(number + 1), number)
            assert not server.paused and not server.crashed
            named = ["update_weight_version"] * server.names_weights
            assert server.calls[:4] == ["pause", "collective_rpc", "reset_prefix_cache", *named, "resume"][:4]

    run(case())


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0"])
@pytest.mark.parametrize("timed", [True, False])
def test_restart_is_noticed_by_whatever_server_reports(version: str, timed: bool, start: Path, tmp_path: Path):
    async def case():
        server = FakeVllm(version=version)
        server.timed = timed
        async with server, engine_over(server, folder=start) as engine:
            await engine.load(1, write_policy(tmp_path / "1"))
            await server.kill()
            with pytest.raises(EngineError, match="server"):
                await read(engine, PROMPT, SHORT)
            server.forget()
            server.confesses = True
            await server.start()
            await engine.client.fleet.servers[0].up.wait()
            assert (await read(engine, PROMPT, SHORT)).logprobs == (-2.0,) * 4

    run(case())


def test_restart_between_two_probes_is_noticed_by_start_time(start: Path, tmp_path: Path):
    async def case():
        server = FakeVllm(version="0.22.0")
        async with server, engine_over(server, folder=start) as engine:
            await engine.load(1, write_policy(tmp_path / "1"))
            label = await engine.weights_label(server.url)
            server.forget()
            assert await engine.weights_label(server.url) != label

    run(case())


def test_server_that_hides_its_routes_is_known_by_its_version(start: Path, tmp_path: Path):
    async def case():
        for version in ("0.22.0", "0.32.0"):
            server = FakeVllm(version=version)
            server.documented = False
            async with server, opened([server.url], start) as engine:
                await engine.load(1, write_policy(tmp_path / "1"))
                assert server.held == 1

    run(case())


def test_version_that_was_never_tried_is_reported(caplog: pytest.LogCaptureFixture):
    async def case():
        async with FakeVllm(version="0.40.0") as server, opened([server.url]) as engine:
            assert len((await read(engine, PROMPT, SHORT)).ids) == 4
        assert "vLLM 0.40.0; versions from 0.22 to 0.32 were tried" in caplog.text

    run(case())


@pytest.mark.parametrize("token", [60, 10**9, -1])
def test_no_token_outside_of_the_vocabulary_is_ever_sent(token: int):
    async def case():
        async with FakeVllm() as server, opened([server.url]) as engine:
            for prompt, stop_ids in (([1, token], ()), ([1], (token,))):
                with pytest.raises(RequestError, match=f"{token}"):
                    await read(engine, prompt, Sampling(max_tokens=2, stop_ids=stop_ids))
            assert server.requests == [] and not server.crashed
            assert len((await read(engine, [59], SHORT)).ids) == 4

    run(case())


def test_a_model_folder_without_a_vocabulary_is_refused(tmp_path: Path):
    async def case():
        async with FakeVllm() as server:
            with pytest.raises(ConfigError, match="vocab_size"):
                async with opened([server.url], tmp_path):
                    pass
            assert server.requests == []

    run(case())


def test_smaller_vocabulary_of_server_and_model_bounds_what_is_sent(tmp_path: Path):
    async def case():
        async with FakeVllm() as server:
            (tmp_path / "config.json").write_text('{"vocab_size": 50}')
            server.root = str(tmp_path)
            async with opened([server.url]) as engine:
                assert engine.vocabulary == 50

    run(case())


def test_interrupted_weights_leave_the_old_ones(start: Path, tmp_path: Path):
    """A server whose loading broke off dies of the next token, and fails at the next load too."""

    async def case():
        server = FakeVllm()
        async with server, opened([server.url], start, down_s=0) as engine:
            server.confesses = True
            await engine.load(1, write_policy(tmp_path / "1"))
            server.fails_once = True
            with pytest.raises(EngineError, match="version"):
                await engine.load(2, write_policy(tmp_path / "2"))
            assert (server.held, server.paused, server.broken) == (1, False, False)
            assert set((await read(engine, PROMPT, SHORT)).logprobs) == {-2.0}

    run(case())


def test_unreadable_first_weights_leave_the_starting_ones(tmp_path: Path):
    async def case():
        server = FakeVllm()
        server.root = str(write_policy(tmp_path / "9"))
        async with server, opened([server.url], write_policy(tmp_path / "here"), down_s=0) as engine:
            server.unseen = str(tmp_path / "here")
            with pytest.raises(EngineError, match="version"):
                await engine.load(0, tmp_path / "here")
            assert (server.held, server.paused, server.broken) == (9, False, False)

    run(case())


# Paused servers

KILLED = """
import asyncio, sys
from pathlib import Path
from penstock.engines.servers.base import RemoteModel, paused_folder
from penstock.engines.servers.vllm import VllmEngine
from penstock.http.client import UpstreamError

async def main(url, folder):
    engine = VllmEngine([url], name="made-up", served=RemoteModel("made-up", 4096, True), folder=Path(folder))
    DOING
        print("paused", flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""
PAUSED = "async with engine.paused(url):"
IN_MEMORY = f"engine.remove_if_killed(Path(folder))\n    {PAUSED}"
ASLEEP = "async with engine.asleep():"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_leaves_no_server_paused(number: signal.Signals, start: Path):
    async def case():
        async with FakeVllm() as server:
            process = await kill_while_paused(server, start, number)
            await server.until_resumed()
            assert process.returncode and not server.broken and server.calls[-1] == "resume"

    run(case())


@pytest.mark.slow
def test_killed_run_leaves_no_weights_in_memory(start: Path):
    async def case():
        async with FakeVllm() as server:
            await kill_while_paused(server, start, signal.SIGKILL, doing=IN_MEMORY)
            await server.until_resumed()
            assert server.held == 0 and not server.broken  # it got the folder's weights back before that was removed

    run(case())
    while start.exists():
        time.sleep(0.01)


@pytest.mark.slow
def test_run_that_is_killed_while_its_server_sleeps_wakes_it(start: Path):
    async def case():
        async with FakeVllm() as server:
            server.sleeps = True
            await kill_while_paused(server, start, signal.SIGKILL, doing=ASLEEP)
            await server.until_resumed()
            assert not server.asleep and not server.broken

    run(case())


def test_server_left_paused_is_resumed_by_the_next_run(start: Path, home: Path, caplog: pytest.LogCaptureFixture):
    async def case():
        async with FakeVllm(version="0.22.0") as server:
            await kill_while_paused(server, start, signal.SIGKILL, with_child=True)
            assert server.paused
            async with opened([server.url], start) as engine:
                assert len((await read(engine, PROMPT, SHORT)).ids) == 4
            assert not server.paused
        assert "was left paused by an earlier run that died; it was resumed" in caplog.text

    run(case())


def test_pause_note_waits_for_processes_of_the_dead_run(start: Path, home: Path):
    async def case():
        async with FakeVllm(version="0.22.0") as server:
            await kill_while_paused(server, start, signal.SIGKILL, with_child=True)
            (note,) = (home / "paused").iterdir()
            held = FileLock(note)
            assert await held.wait_async(10)
            asyncio.get_running_loop().call_later(1.5, held.close)
            async with opened([server.url], start) as engine:
                assert len((await read(engine, PROMPT, SHORT)).ids) == 4


IN_TRANSFER = """from faults.upstream_cases import NumberedSender
    sender = NumberedSender()
    sender.number = 2
    await engine.load(1, Path(folder).with_name("1"))
    if await engine.transfer(2, sender, Path(folder), asyncio.Event()):"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.22.0", "0.26.0", "0.32.0"])
@pytest.mark.parametrize("copies", [True, False])
def test_run_killed_during_a_transfer_leaves_whole_weights(
    version: str, copies: bool, start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The server may be able to copy the rest of the dead trainer's memory; it gets the version before, which is reported."""
    write_policy(tmp_path / "1")

    async def case():
        server, reached = FakeVllm(version=version), asyncio.Event()
        server.backend, server.insecure, server.confesses = "ipc", True, True

        async def copy_slowly(request: web.Request) -> None:
            if request.path == "/update_weights":
                body = await request.json()
                reached.set()
                try:
                    await asyncio.Event().wait()
                finally:  # a server continues when its caller hangs up
                    server.fails_once = not copies
                    server.transfer("update_weights", body)

        server.cut = copy_slowly
        async with server:
            process = await start_process(server, start, IN_TRANSFER)
            await reached.wait()
            process.kill()
            await process.wait()
            await server.until_resumed()
            assert (server.held, server.broken, server.half_loaded, server.updating) == (1, False, False, False)
            async with opened([server.url], start) as engine:
                assert set((await read(engine, PROMPT, SHORT)).logprobs) == {-2.0}
                assert "holds weights that a training run has left there" in caplog.text
                await engine.load(0, start)  # as every training run begins
                assert set((await read(engine, PROMPT, SHORT)).logprobs) == {-1.0}

    run(case())


def test_next_run_waits_for_the_child_of_a_dead_run(start: Path):
    async def case():
        async with FakeVllm() as server:
            reading, go_on = asyncio.Event(), asyncio.Event()

            async def read_slowly(request: web.Request) -> None:
                if request.path == "/collective_rpc":
                    reading.set()
                    await go_on.wait()

            server.cut = read_slowly
            await kill_while_paused(server, start, signal.SIGKILL)
            await reading.wait()
            opening = asyncio.create_task(load_first(server, start))
            await asyncio.sleep(0.2)  # it must not have begun then
            go_on.set()
            await opening
            loaded = ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]
            assert server.calls.count("resume") == 2 and server.calls[-6:] == ["resume", *loaded]
            assert not server.broken

    async def load_first(server: FakeVllm, folder: Path) -> None:
        async with opened([server.url], folder) as engine:
            await engine.load(0, folder)

    run(case())


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0"])
def test_leftover_weights_are_reported_until_the_server_restarts(
    version: str, start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def case():
        async with FakeVllm(version=version) as server:
            for reported in (False, True, False):
                caplog.clear()
                async with opened([server.url], start) as engine:
                    await read(engine, PROMPT, SHORT)
                    assert ("holds weights that a training run has left there" in caplog.text) is reported
                    if reported:
                        server.forget()
                    else:
                        await engine.load(1, write_policy(tmp_path / "1"))

    run(case())


def test_server_paused_by_another_program_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch):
    async def case():
        monkeypatch.setattr(vllm, "OTHERS_PAUSE_S", 0.1)
        async with FakeVllm() as server:
            await post(server, "/pause?mode=keep")
            with pytest.raises(ConfigError, match="POST"):
                async with opened([server.url]):
                    pass
            assert server.paused

    run(case())


@pytest.mark.parametrize("transferring", [False, True])
def test_a_server_paused_with_weights_of_ours_is_resumed(
    transferring: bool, start: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The run was on another machine."""

    async def case():
        monkeypatch.setattr(vllm, "OTHERS_PAUSE_S", 0.1)
        async with FakeVllm() as server:
            server.label, server.root, server.backend, server.insecure = "penstock-0abc-3", str(start), "ipc", True
            await post(server, "/pause?mode=keep")
            if transferring:
                await post(server, "/start_weight_update")
            async with opened([server.url]) as engine:
                assert len((await read(engine, PROMPT, SHORT)).ids) == 4
            assert not (server.broken or server.crashed or server.updating)
        assert "left paused with the weights of an earlier run; it was resumed" in caplog.text

    run(case())


def test_two_runs_do_not_change_one_server_at_once(start: Path, monkeypatch: pytest.MonkeyPatch):
    async def case():
        monkeypatch.setattr(pauses, "LOCK_S", 0.0)
        async with FakeVllm() as server, opened([server.url], start, down_s=0) as one, opened([server.url], start, down_s=0) as two:
            wrong = pytest.raises(EngineError, match="changed")
            async with one.paused(server.url):
                with wrong:
                    await two.load(1, start)
                assert server.paused

    run(case())


async def kill_while_paused(
    server: FakeVllm, folder: Path, number: signal.Signals, *, with_child: bool = False, doing: str = PAUSED
) -> asyncio.subprocess.Process:
    """Kill a process that has paused the server; with `with_child` its child process too."""
    process = await start_process(server, folder, doing)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"paused\n"
    if with_child:
        for child in children(process.pid):
            os.kill(child, signal.SIGKILL)
    process.send_signal(number)
    await process.wait()
    return process


async def start_process(server: FakeVllm, folder: Path, doing: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-c", KILLED.replace("DOING", doing), server.url, str(folder)]
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    return await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=places)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def post(server: FakeVllm, path: str) -> None:
    http = base.HttpClient(base.RequestTimeouts())
    await http.request_json(server.url + path, {})
    await http.close()


RECORDED = Path(__file__).parents[1] / "vllm" / "recorded"


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0"])
def test_the_double_answers_as_real_servers_did(version: str, start: Path):
    """`tests/vllm/record.py` asked them in this order: 0.22.0 on an H200, 0.32.0 on a CPU, where no weights are transferred."""
    recorded = json.loads((RECORDED / f"{version}.json").read_text())

    async def case():
        server = FakeVllm(version=version)
        server.backend = "ipc"
        async with server, aiohttp.ClientSession(server.url) as session:
            for label, entry in recorded.items():
                method, path = entry["request"].split(" ", 1)
                if label in ("ipc start twice", "ipc finish after failure"):
                    server.updating = True
                async with session.request(method, path, json=body_of(label, start) if method == "POST" else None) as answer:
                    text = await answer.text()
                assert answer.status == entry["status"], label
                if answer.status == 200:
                    assert (json.loads(text) if text else "") == entry["answer"], label

    run(case())


def body_of(label: str, folder: Path) -> dict[str, object]:
    """The body of a recorded request, with names of this machine."""
    bodies: dict[str, dict[str, object]] = {
        "reload 0": {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
        "name weights": {"new_version": "penstock-x-1"},
        "ipc init": {"init_info": {}},
        "ipc update": {"update_info": {"names": ["1"]}},
    }
    return bodies.get(label, {})
