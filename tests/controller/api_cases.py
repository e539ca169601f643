"""A controller that serves on a socket in a separate thread, and a project for it whose model needs no weights."""

import asyncio
import io
import json
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from api_client import ApiClient

from penstock.cli.app import run
from penstock_controller.api.app import serve_controller
from penstock_controller.context import Controller, ControllerLimits, open_controller
from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.runs import RunFiles, RunJob, RunQueue, RunStatus, Submission, new_id, now

ENGINE_FOLDER = Path(__file__).parents[1] / "helpers" / "cli_engine"
AGENT = """
from pathlib import Path
from penstock import AgentWorkflow, Grader

class Asker(AgentWorkflow):
    async def run(self, ctx):
        if ctx.metadata["n"] == 3:
            raise ValueError("a tool is broken")
        if ctx.artifacts_dir is not None and ctx.metadata["n"] == 1:
            (ctx.artifacts_dir / "deep").mkdir()
            (ctx.artifacts_dir / "deep" / "note.txt").write_text("kept")
            (ctx.artifacts_dir / "manifest.json").write_text("{}")
            (ctx.artifacts_dir / "passwords").symlink_to("/etc/passwd")
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)

class Even(Grader):
    async def grade(self, ctx):
        return float(ctx.metadata["n"] % 2 == 0)
"""
TABLES: dict[str, Any] = {
    "run": {"name": "Asked.Twice"},
    "model": {"name": "tiny"},
    "engine": {"name": "cli_engine:open_engine"},
    "dataset": {"train": "tasks.jsonl"},
    "eval": {"samples": 2, "k": [1, 2]},
}


def carry_out(folder: Path, name: str) -> None:
    """The evaluation `name` in a controller's folder, as a monitor leaves it but made by this process: faster than by a queue."""
    home, run_id = Home(folder).create(), new_id()
    files = RunFiles(home.runs / run_id)
    for path, text in project().items():
        (files.code / path).parent.mkdir(parents=True, exist_ok=True)
        (files.code / path).write_text(text)
    tables = TABLES | {
        "run": {"name": name, "folder": str(files.out)},
        "dataset": {"train": str(files.code / "tasks.jsonl")},
        "agent": {"entry": str(files.code / "agent.py")},
    }
    files.config.write_bytes(orjson.dumps(tables))
    RunJob(argv=[], cwd=str(files.code)).write(files)
    assert run(["eval", "run", str(files.config)]) == 0
    entries = [{"timestamp": now(), "level": "info", "step": None, "message": f"line {number}"} for number in range(11)]
    entries[3] |= {"level": "error", "step": 7, "message": "two\nlines", "details": {"why": "é"}}
    files.log.write_bytes(b"".join(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE) for entry in entries) + b'{"cut')
    facts: dict[str, Any] = {"rollout": "asker", "entrypoint": "agent.py", "model": "tiny", "dataset": "tasks.jsonl"}
    database = ControllerDatabase(home.database)
    try:
        runs = RunQueue(database)
        answer: dict[str, Any] = {"tables": TABLES, "secrets": {"WORD": "user", "REMOVED": "user"}, "creator": "owner"}
        runs.add("eval", run_id, name, Submission(**facts, **answer, dataset_digest="d", snapshot="s"))
        runs.launch(run_id)
        runs.finish(run_id, RunStatus.FINISHED)
    finally:
        database.close()


@dataclass(frozen=True)
class Served:
    """A controller and how to reach it."""

    controller: Controller
    url: str

    def client(self, token: str | None = None, git: str | None = "acme/agents") -> ApiClient:
        return ApiClient(self.url, token or self.controller.home.token(), git)


@contextmanager
def served(folder: Path, **limits: int) -> Generator[Served]:
    """Serves until it is left."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[Served]()
    over = asyncio.Event()

    async def main() -> None:
        try:
            async with open_controller(Home(folder), ControllerLimits(**limits)) as controller, serve_controller(controller) as url:
                found.append(Served(controller, url))
                ready.set()
                await over.wait()
        finally:
            ready.set()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(30) and found, "the controller did not start"
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)


def let_in(world: Served, name: str = "laptop", person: str | None = None) -> dict[str, Any]:
    """A token for a device, of a person or on its own."""
    stranger = ApiClient(world.url, None, None)
    begun = stranger.ask("POST", "device/authorize", {"deviceName": name})
    world.client().ask("POST", "device/approve", {"user_code": begun["user_code"]} | ({"person": person} if person else {}))
    return stranger.ask("POST", "device/token", {"device_code": begun["device_code"]})


def project() -> dict[str, str]:
    """Files of a project with four tasks: rewards 1, 0, 1, and an agent that raises."""
    rows = [{"prompt": f"{n} times 3?", "metadata": {"n": n}} for n in range(4)]
    return {"agent.py": AGENT, "tasks.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


def archive(files: dict[str, str]) -> bytes:
    """A tar.gz of them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


def upload(client: ApiClient, content: bytes) -> str:
    """A snapshot, by its digest."""
    digest = sha256(content).hexdigest()
    client.send("PUT", f"/api/cli/snapshots/{digest}", content)
    return digest


def own_run(snapshot: str, **changes: Any) -> dict[str, Any]:
    """A submission of a run's own config."""
    return {"snapshot": snapshot, "run_config": {"tables": TABLES | changes, "file": "penstock.toml"}}


def until(check: Callable[[], Any], *, seconds: float = 90) -> Any:
    """Poll until it holds; what it gave."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := check():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to be")


def ended(client: ApiClient, kind: str, ref: str) -> dict[str, Any]:
    """The detail of a run that is over."""
    key = "eval_run" if kind == "eval" else "training_run"

    def over() -> dict[str, Any] | None:
        found = client.info(kind, ref)
        return found if found[key]["status"] in ("finished", "failed", "stopped") else None

    return until(over)


def repository(folder: Path, files: dict[str, str]) -> Path:
    """A git repository with one commit."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *command], cwd=folder, check=True, capture_output=True
        )
    return folder
