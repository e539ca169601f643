"""Commands in this process or in ones of their own, over an engine that needs no weights, and plain HTTP to them."""

import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.cli.app import run
from penstock.testing import write_tokenizer

ENGINE, ENDLESS = "cli_engine:open_engine", "cli_engine:open_endless"
USER = {"role": "user", "content": "What is 6 times 7?"}


def environment() -> dict[str, str]:
    here = str(Path(__file__).parent / "cli_engine")
    return {name: value for name, value in os.environ.items() if "PROXY" not in name.upper()} | {"PYTHONPATH": here}


def penstock(*arguments: Any) -> list[str]:
    return [sys.executable, "-c", "from penstock.cli.app import main; main()", *map(str, arguments)]


def called(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """A command in this process, which has imported what it needs: all of it but the start and the exit of a process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*map(str, arguments)])
    return subprocess.CompletedProcess([*arguments], code, out.getvalue(), err.getvalue())


def ran(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    return subprocess.run(penstock(*arguments), capture_output=True, text=True, timeout=120, env=environment(), **options)


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway in its own process."""

    process: "subprocess.Popen[str]"
    ready: dict[str, Any]

    @property
    def tokens(self) -> dict[str, str]:
        return json.loads(Path(self.ready["tokens"]).read_text())

    def post(self, path: str, token: str, body: Any = None, *, method: str = "POST") -> tuple[int, Any]:
        """Send JSON on its own connection; the status and the JSON, or text, that came back."""
        with self.connection() as connection:
            sent = json.dumps({} if body is None else body) if method == "POST" else None
            connection.request(method, path, sent, {"authorization": f"Bearer {token}", "content-type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers["content-type"].startswith("application/json")
            return response.status, json.loads(content) if is_json else content.decode()

    def get(self, path: str, token: str) -> tuple[int, Any]:
        return self.post(path, token, method="GET")

    @contextmanager
    def connection(self) -> Generator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(urlsplit(self.ready["base_url"]).netloc, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def rollout(self, **body: Any) -> dict[str, str]:
        status, opened = self.post("/rollouts", self.tokens["control"], body)
        assert status == 200, opened
        return opened

    def chat(self, token: str, *messages: dict[str, Any], **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/chat/completions", token, {"model": "any", "messages": list(messages)} | fields)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; the exit code and what was said on stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@contextmanager
def served(folder: Path, *arguments: Any, engine: str = ENGINE) -> Generator[Served]:
    """`penstock gateway` over a tokenizer in `folder/model`, recording into `folder/run`; killed on leaving if it still runs."""
    model = folder / "model"
    if not model.exists():
        write_tokenizer(model)
    command = penstock("gateway", "--engine", engine, "--model", model, "--folder", folder / "run", *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _, err = process.communicate(timeout=60)
            raise AssertionError(f"exit code {process.returncode}: {err}")
        yield Served(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)
