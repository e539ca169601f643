"""Command lines of `osmosis`, run in this process or in one of their own, and what they printed."""

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from osmosis_ai.cli.app import run

FOLDERS = ("rollouts", "configs/training", "configs/eval", "data")
DEADLINE_S = 120


class Ran(NamedTuple):
    """How a command line ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def reported(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        (line,) = self.out.splitlines()
        assert self.code in (0, 1), self
        return json.loads(line)

    @property
    def error(self) -> dict[str, Any]:
        """The error of the one envelope on stderr; nothing is on stdout."""
        assert self.out == "" and self.code != 0, self
        (line,) = self.err.splitlines()
        envelope = json.loads(line)
        assert list(envelope) == ["schema_version", "command", "cli_version", "error"] and envelope["schema_version"] == 1
        assert list(envelope["error"]) == ["code", "message", "details", "request_id"] and envelope["error"]["request_id"] is None
        return envelope["error"] | {"command": envelope["command"]}


class Shell:
    """Runs command lines in this process, from the working directory of the test."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *words: object) -> Ran:
        self._capsys.readouterr()
        code = run([str(word) for word in words])
        said = self._capsys.readouterr()
        return Ran(code, said.out, said.err)

    def json(self, *words: object) -> Ran:
        return self(*words, "--json")


def run_process(folder: Path, *words: str, **environment: str) -> Ran:
    """`python -m osmosis_ai` in a folder, with nothing of the test's own environment that could name a controller."""
    done = subprocess.run(
        [sys.executable, "-m", "osmosis_ai", *words],
        cwd=folder,
        env=_clean() | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def make_workspace(folder: Path) -> Path:
    """The four folders that make one."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    return folder


@contextmanager
def serving(home: Path) -> Generator[dict[str, str]]:
    """Starts a controller in another process; yields the environment that leads commands to it."""
    command = [
        sys.executable,
        "-c",
        "from penstock.cli.app import main; main()",
        "controller",
        "up",
        "--home",
        str(home),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("{"), line + process.stdout.read()
            yield {"OSMOSIS_PLATFORM_URL": json.loads(line)["url"], "OSMOSIS_TOKEN": (home / "token").read_text()}
        finally:
            process.terminate()
            process.stdout.read()
            assert process.wait(DEADLINE_S) == 0


@contextmanager
def at_a_terminal(folder: Path, *words: str, **environment: str) -> Generator[tuple[subprocess.Popen[str], int]]:
    """A command that a person could answer: the process, and where to type."""
    person, terminal = pty.openpty()
    command = [sys.executable, "-m", "osmosis_ai", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        with subprocess.Popen(command, cwd=folder, env=_clean() | environment, stdin=terminal, text=True, **pipes) as process:
            try:
                yield process, person
            finally:
                process.kill()
    finally:
        os.close(person)
        os.close(terminal)


@contextmanager
def answering(answers: dict[str, Any]) -> Generator[dict[str, str]]:
    """A server with fixed answers by `METHOD path`: a status and what is sent, JSON or bytes. All else is 404."""

    class Answers(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            status, body = answers.get(f"{self.command} {self.path.partition('?')[0]}", (404, {"error": "nothing there"}))
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield {"OSMOSIS_PLATFORM_URL": f"http://127.0.0.1:{server.server_port}", "OSMOSIS_TOKEN": "t"}
        finally:
            server.shutdown()
            thread.join()


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("OSMOSIS_", "PENSTOCK_"))}
