"""`penstock gateway` in its own process: from its one line of JSON to its exit code."""

import asyncio
import json
import signal
import socket
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cli_cases import ENGINE, USER, environment, ran, served
from prometheus_text import read

from penstock.gateway.standalone import ModelFiles, make_folder, read_settings
from penstock.pool.sqlite import SqlitePool
from penstock.records import End, Rollout
from penstock.run.folder import find_run_folder

CLIENT = """
import json, sys
from openai import OpenAI
opened = json.loads(sys.argv[1])
client = OpenAI(base_url=opened["base_url"], api_key=opened["token"])
talk = [{"role": "user", "content": "What is 6 times 7?"}]
for turn in range(3):
    stream = client.chat.completions.create(model="any", messages=talk, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
print(client.responses.create(model="any", input="Hello").output_text)
"""


def recorded(folder: Path, rollout_id: str) -> Rollout:
    async def look() -> Rollout:
        pool = SqlitePool(folder / "run")
        try:
            return await pool.rollout(rollout_id)
        finally:
            await pool.close()

    return asyncio.run(look())


def test_a_runner_elsewhere_goes_the_whole_way_over_plain_http(tmp_path):
    with served(tmp_path) as gateway:
        ready, tokens = gateway.ready, gateway.tokens
        assert ready["event"] == "ready" and ready["pid"] == gateway.process.pid and ready["pool"] == "sqlite"
        assert ready["model"] == "model" and ready["base_url"] == ready["anthropic_base_url"] + "/v1"
        opened = gateway.rollout(task_id="six times seven", sampling={"temperature": 0.7})
        status, answer = gateway.chat(opened["token"], USER)
        assert status == 200 and "tokens" in answer["choices"][0]["message"]["content"]
        body = {"model": "any", "max_tokens": 50, "messages": [USER]}
        assert gateway.post("/v1/messages", opened["token"], body)[0] == 200
        name = opened["rollout_id"]
        assert gateway.post(f"/rollouts/{name}/grade", tokens["control"], {"reward": 1.0})[0] == 200
        assert gateway.post(f"/rollouts/{name}/end", tokens["control"])[0] == 200
        assert gateway.chat(opened["token"], USER)[0] == 409
        counted = read(gateway.get("/metrics", tokens["admin"])[1])
        assert counted["penstock_steps_total"].values == {(("finish", "stop"),): 2}
        assert gateway.stop()[0] == 0
    attempt = recorded(tmp_path, name)
    assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.COMPLETED, 1.0, 2)
    assert attempt.steps[0].sampling.temperature == 0.7


def test_openai_client_of_another_process_is_recorded_on_one_path(tmp_path):
    with served(tmp_path) as gateway:
        opened = gateway.rollout()
        command = [sys.executable, "-c", CLIENT, json.dumps(opened)]
        client = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
        assert client.returncode == 0 and client.stdout.strip().endswith("tokens"), client.stderr
        gateway.stop()
    attempt = recorded(tmp_path, opened["rollout_id"])
    assert [node.parent for node in attempt.nodes] == [None, 0, 1, None]
    assert [node.reason for node in attempt.nodes] == [None] * 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_stops_it_in_good_order(tmp_path, number, code):
    with served(tmp_path) as gateway:
        assert gateway.stop(number)[0] == code


def test_call_that_outlasts_the_drain_is_cancelled_and_kept(tmp_path):
    with served(tmp_path, "--set", "gateway.drain_s=0.2") as gateway:
        opened = gateway.rollout()
        with gateway.connection() as connection:
            _begin_stalled(connection, opened["token"])
            code, err = gateway.stop()
            assert (code, "stopping" in err) == (0, True)
    [step] = recorded(tmp_path, opened["rollout_id"]).steps
    assert (step.finish, len(step.completion_ids)) == ("cancelled", 2)


def test_a_second_ctrl_c_waits_for_nobody(tmp_path):
    with served(tmp_path, "--set", "gateway.drain_s=600") as gateway:
        opened = gateway.rollout()
        with gateway.connection() as connection:
            _begin_stalled(connection, opened["token"])
            gateway.process.send_signal(signal.SIGINT)
            assert gateway.process.stderr is not None
            while "stopping" not in gateway.process.stderr.readline():
                pass
            assert gateway.stop(signal.SIGINT)[0] == 130


def _begin_stalled(connection, token):
    """A stream that has begun and continues no further."""
    body = {"model": "any", "messages": [{"role": "user", "content": "stall"}], "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {token}"})
    response = connection.getresponse()
    assert response.status == 200
    for _ in range(3):  # the opening and two tokens
        while response.readline().strip():
            pass


def test_tokens_are_for_owner_only_and_hold_after_restart(tmp_path):
    with served(tmp_path) as gateway:
        file = Path(gateway.ready["tokens"])
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "run" / "secret").stat().st_mode) == 0o600
        before, opened = gateway.tokens, gateway.rollout()
        answer = gateway.chat(opened["token"], USER)[1]["choices"][0]["message"]
        gateway.process.kill()
    with served(tmp_path) as gateway:
        assert gateway.tokens == before
        assert gateway.chat(opened["token"], USER, answer, USER)[0] == 200
        gateway.stop()
    assert [node.parent for node in recorded(tmp_path, opened["rollout_id"]).nodes] == [None, 0]


def test_reachable_addresses_are_printed(tmp_path):
    with served(tmp_path, "--host", "0.0.0.0", "--set", 'gateway.hosts=["gate.example"]') as gateway:
        assert gateway.ready["base_url"].startswith("http://gate.example:")
        assert "other machines" in gateway.stop()[1]


def test_taken_port_is_one_line_and_exit_code_2(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = ran("gateway", "--engine", ENGINE, "--port", port, "--folder", tmp_path / "run")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"127.0.0.1:{port}" in result.stderr
    assert not (tmp_path / "run").exists()


REFUSALS = {
    "did you mean 'vllm'?": ["--engine", "vlm"],
    "--url": ["--engine", "vllm"],
    "--engine vllm": ["--url", "http://127.0.0.1:1"],
    "did you mean 'tiny'?": ["--model", "tinny"],
    "unknown pool 'mongo'": ["--pool", "mongo"],
    "did you mean 'stall_s'?": ["--set", "gateway.stal_s=1"],
    "unknown key 'engine.url'": ["--set", "engine.url=x"],
    "gateway.drain_s": ["--set", "gateway.drain_s=-1"],
    "PostgreSQL": ["--workers", "2"],
    "--workers": ["--workers", "0"],
}


def test_invalid_input_exits_with_2_before_torch_loads(tmp_path):
    code = (
        f"import sys\nfrom penstock.cli.app import run\nfor arguments in {[*REFUSALS.values()]!r}:\n"
        f"    assert run(['gateway', '--folder', {str(tmp_path / 'run')!r}, *arguments]) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    lines = result.stderr.splitlines()
    assert [words for words, line in zip(REFUSALS, lines, strict=True) if words not in line] == [], lines


def test_silent_servers_are_named_with_exit_code_2(tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(AssertionError, match=f"{url}"), served(tmp_path, "--url", url, engine="vllm"):
            pass


def test_a_second_gateway_on_the_same_folder_is_refused(tmp_path):
    with served(tmp_path):
        result = ran("gateway", "--engine", ENGINE, "--model", tmp_path / "model", "--folder", tmp_path / "run", "--json")
    assert result.returncode == 2
    assert "another gateway serves it" in json.loads(result.stderr.splitlines()[-1])["error"]["message"]


def test_a_folder_that_was_recorded_with_another_model_is_refused(tmp_path):
    with served(tmp_path) as gateway:
        gateway.stop()
    (tmp_path / "model").rename(tmp_path / "other")
    result = ran("gateway", "--engine", ENGINE, "--model", tmp_path / "other", "--folder", tmp_path / "run")
    assert (result.returncode, "was recorded with model" in result.stderr) == (2, True)


def test_spans_go_to_the_collector_that_the_environment_names(tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        with served(tmp_path, "--otel") as gateway:
            opened = gateway.rollout()
            assert gateway.chat(opened["token"], USER)[0] == 200
            assert gateway.stop()[0] == 0
        collector.shutdown()
    [(path, spans)] = got
    assert path == "/v1/traces"
    assert b"gen_ai.usage.output_tokens" in spans and opened["rollout_id"].encode() in spans
    assert b"6 times 7" not in spans


def test_gateway_record_is_readable_by_other_commands(tmp_path):
    settings = read_settings({"engine": {"name": "vllm", "url": ["http://127.0.0.1:9"]}})
    make_folder(tmp_path / "record", settings, ModelFiles("any", tmp_path))
    assert find_run_folder(tmp_path / "record").config().engine.url == ("http://127.0.0.1:9",)
