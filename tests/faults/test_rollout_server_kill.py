"""A rollout server is killed with SIGKILL and started again: what it had accepted ends once, with one result."""

import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

AGENT = Path(__file__).parent / "killed_server" / "agent.py"
DEADLINE_S = 60


class Listener:
    """Keeps what rollout servers call back with; paths in `refused` are answered 503."""

    def __init__(self):
        self.refused = set()
        self.heard = []
        """(path, body, whether it was taken), in order."""
        self.changed = threading.Condition()
        outer = self

        class Take(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                with outer.changed:
                    taken = self.path not in outer.refused
                    outer.heard.append((self.path, body.decode(), taken))
                    outer.changed.notify_all()
                self.send_response(200 if taken else 503)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Take)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def listening(self):
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def wait(self, is_so):
        """Until `is_so(heard)`."""
        with self.changed:
            assert self.changed.wait_for(lambda: is_so(self.heard), DEADLINE_S), self.heard

    def results(self):
        """By path and rollout: the set of contents that were taken."""
        found = {}
        for path, body, taken in self.heard:
            if taken:
                found.setdefault((path, json.loads(body)["rollout_id"]), set()).add(body)
        return found


class Server:
    """`penstock rollout serve` in its own process."""

    def __init__(self, folder, *, drain_s=0):
        command = [sys.executable, "-c", "from penstock.cli.app import main; main()", "rollout", "serve", str(AGENT)]
        command += ["--port", "0", "--journal", str(folder / "journal.db"), "--drain-s", str(drain_s), "--json"]
        kept = {name: value for name, value in os.environ.items() if "PROXY" not in name.upper()}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept | {"KILLED_SERVER": str(folder)})
        self.ready = json.loads(self.process.stdout.readline())

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection(urlsplit(self.ready["url"]).netloc, timeout=DEADLINE_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def kill(self):
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def stage(tmp_path):
    """A listener, a function that starts a server on the same journal, and one that makes a rollout's body."""
    servers = []

    def start(**options):
        servers.append(Server(tmp_path, **options))
        return servers[-1]

    def body(name, run="end", grade="end"):
        return {
            "rollout_id": name,
            "initial_messages": [{"role": "user", "content": "2 times 3?"}],
            "chat_completions_url": "http://127.0.0.1:9/v1",
            "completion_callback_url": f"{listener.url}/completed",
            "grader_callback_url": f"{listener.url}/graded",
            "metadata": {"name": name, "run": run, "grade": grade},
        }

    listener = Listener()
    with listener.listening():
        yield listener, start, body
        for server in servers:
            if server.process.poll() is None:
                server.kill()


def until(server, name, *states):
    """Ask until the rollout is so far."""
    while (found := server.ask("GET", f"/rollout/{name}/status")[1]["status"]) not in states:
        assert server.process.poll() is None
    return found


def reported(listener, path, name):
    """The one content that was taken."""
    [content] = listener.results()[path, name]
    return json.loads(content)


def over(*names):
    return lambda heard: all(
        (path, name, True) in [(each, json.loads(body)["rollout_id"], taken) for each, body, taken in heard]
        for path in ("/completed", "/graded")
        for name in names
    )


@pytest.mark.slow
def test_waiting_rollouts_run_and_interrupted_ones_fail(stage, tmp_path):
    listener, start, body = stage
    server = start()
    for name in ("runs-0", "runs-1"):
        assert server.ask("POST", "/rollout", body(name, run="hang"))[0] == 200
        until(server, name, "running")
    assert server.ask("POST", "/rollout", body("waits"))[0] == 200
    server.kill()
    server = start()
    listener.wait(over("runs-0", "runs-1", "waits"))
    for name in ("runs-0", "runs-1"):
        for path in ("/completed", "/graded"):
            found = reported(listener, path, name)
            assert (found["status"], found["err_category"]) == ("failure", "agent_error")
            assert found["err_message"] == "the server was stopped while it ran"
    assert reported(listener, "/graded", "waits")["samples"]["main"]["reward"] == 1.0
    assert Counter((tmp_path / "notes").read_text().split("\n"))["ran runs-0"] == 1
    assert server.ask("POST", "/rollout", body("waits"))[0] == 200
    assert server.ask("POST", "/rollout", body("waits", run="other"))[0] == 409


@pytest.mark.slow
def test_undelivered_completion_is_delivered_after_the_kill(stage):
    listener, start, body = stage
    listener.refused.add("/completed")
    server = start()
    server.ask("POST", "/rollout", body("r"))
    listener.wait(lambda heard: heard)
    first = listener.heard[0][1]
    server.kill()
    listener.refused.clear()
    start()
    listener.wait(over("r"))
    assert listener.results()["/completed", "r"] == {first}
    assert reported(listener, "/graded", "r")["err_message"] == "the server was stopped before it was graded"


@pytest.mark.slow
def test_rollout_killed_during_grading_keeps_its_completion(stage, tmp_path):
    listener, start, body = stage
    server = start()
    server.ask("POST", "/rollout", body("r", grade="hang"))
    until(server, "r", "grading")
    listener.wait(lambda heard: heard)
    server.kill()
    server = start()
    listener.wait(over("r"))
    assert (reported(listener, "/completed", "r")["status"], reported(listener, "/graded", "r")["status"]) == ("success", "failure")
    assert until(server, "r", "failure") == "failure"


@pytest.mark.slow
def test_grade_that_nobody_took_is_delivered_after_the_kill(stage):
    listener, start, body = stage
    listener.refused.add("/graded")
    server = start()
    server.ask("POST", "/rollout", body("r"))
    listener.wait(lambda heard: any(path == "/graded" for path, _, _ in heard))
    server.kill()
    listener.refused.clear()
    start()
    listener.wait(over("r"))
    assert reported(listener, "/graded", "r")["samples"]["main"]["reward"] == 1.0


@pytest.mark.slow
def test_stopped_server_leaves_waiting_rollouts_to_the_next(stage):
    listener, start, body = stage
    server = start()
    for name in ("runs-0", "runs-1"):
        server.ask("POST", "/rollout", body(name, run="hang"))
        until(server, name, "running")
    server.ask("POST", "/rollout", body("waits"))
    server.process.terminate()
    server.process.communicate(timeout=DEADLINE_S)
    assert server.process.returncode == 0
    assert reported(listener, "/completed", "runs-0")["err_message"] == "the server was stopped while it ran"
    start()
    listener.wait(over("waits"))
    assert reported(listener, "/completed", "waits")["status"] == "success"


@pytest.mark.slow
def test_every_accepted_rollout_ends_once_often_the_server_is_killed(stage, tmp_path):
    listener, start, body = stage
    chance, accepted = random.Random(7), []
    for turn in range(6):
        server = start()
        heard = len(listener.heard) + chance.randint(0, 12)
        for n in range(8):
            name = f"r-{turn}-{n}"
            assert server.ask("POST", "/rollout", body(name))[0] == 200
            accepted.append(name)
        listener.wait(lambda found, heard=heard: len(found) >= heard)
        server.kill()
    start()
    listener.wait(over(*accepted))
    results = listener.results()
    assert {len(contents) for contents in results.values()} == {1}
    runs = Counter(line for line in (tmp_path / "notes").read_text().split("\n") if line)
    assert (len(results), max(runs.values())) == (2 * len(accepted), 1)
