"""A client in its own environment and process, before a real gateway on a real port with a scripted model."""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import connect_page
import pytest
import results
from blocking_proxy import BlockingProxy
from environments import PROJECT, ROOT, bin_of, missing, npm_prefix, python_of
from scripts import Script
from trial_tokenizer import tokenizer_folder

from penstock.chat.renderer import Renderer
from penstock.pool import POOLS
from penstock.records import Rollout, Sampling
from penstock.testing import CHATML, GatewayFixture, ScriptedEngine, workbench

PROGRAMS = Path(__file__).parent / "programs"
THINKS = (ROOT / "tests/templates/qwen3.jinja").read_text()
"""A template of a model that reasons: in the history it keeps what was thought since the last question only."""
DEADLINE_S = 600


@dataclass(frozen=True)
class Seen:
    """What came of a trial."""

    output: str
    attempt: Rollout
    left: list[str]
    """What the client asked of anyone but the gateway."""
    ignored: set[str]
    """What it asked for and did not get, by name."""
    counts: Mapping[str, int]
    """The gateway's."""
    apis: set[str]
    """The APIs that it called: `chat`, `responses`, `messages`."""


@dataclass(frozen=True)
class Trial:
    """A client and what it is given. `{root}` and `{token}` in its command and its files are the gateway's."""

    environment: str
    """One of `environments`; its programs come first on the client's path."""
    command: Sequence[str]
    script: Script
    folder: Path
    """Where it works, an empty one; its home is made next to it."""
    home: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files in its home, by path."""
    template: str = CHATML
    name: str = ""
    """Of its line in the table of clients; empty leaves it out."""
    mode: str = "whole"

    def run(self) -> Seen:
        """Run until the client ends, which must be well."""
        needs(self.environment)
        self.folder.mkdir(exist_ok=True)
        seen = asyncio.run(self._run())
        if self.name:
            results.note(self.name, self.mode, self.environment, seen.attempt)
        return seen

    async def run_sessions(self) -> list[Rollout]:
        """Run under the session key, then grade and end each rollout that it opened; returns these."""
        needs(self.environment)
        self.folder.mkdir(exist_ok=True)
        async with AsyncExitStack() as stack:
            bench, proxy = await self._gateway(stack, sessions=True)
            root = (await bench.rollout()).base_url.removesuffix("/v1")
            await self._ended(Place(root, bench.gateway.tokens.session_key), proxy.variables)
            opened = [attempt for group in await bench.pool.groups("adhoc") for attempt in group.rollouts]
            control = bench.http(bench.gateway.tokens.control)
            for name in [attempt.ref.id for attempt in opened]:
                assert (await control.post(f"/rollouts/{name}/grade", json={"reward": 1.0})).status_code == 200
                assert (await control.post(f"/rollouts/{name}/end", json={})).status_code == 200
            return [await bench.pool.rollout(attempt.ref.id) for attempt in opened]

    async def _gateway(self, stack: AsyncExitStack, *, sessions: bool = False) -> tuple[GatewayFixture, BlockingProxy]:
        renderer = _renderer(self.template)
        core = renderer.tokenizer.core
        engine = ScriptedEngine(lambda ids: self.script(core.decode(ids, skip_special_tokens=False)), renderer.tokenizer, chunk=3)
        pool = POOLS.load("sqlite")(self.folder.parent / "pool")
        stack.push_async_callback(pool.close)
        proxy = await stack.enter_async_context(BlockingProxy())
        return await stack.enter_async_context(workbench(engine, renderer, pool=pool, serves=True, sessions=sessions)), proxy

    async def _run(self) -> Seen:
        async with AsyncExitStack() as stack:
            bench, proxy = await self._gateway(stack)
            session = await bench.rollout(sampling=Sampling(max_tokens=4096))
            output = await self._ended(Place(session.base_url.removesuffix("/v1"), session.token), proxy.variables)
            ignored = {name.removeprefix("ignored:") for name in bench.gateway.counts if name.startswith("ignored:")}
            apis = set(re.findall(r'dialect="(\w+)"', str(bench.gateway.samples()["penstock_calls_total"])))
            return Seen(output, await bench.attempt(session), proxy.asked, ignored, dict(bench.gateway.counts), apis)

    async def _ended(self, place: "Place", proxies: Mapping[str, str]) -> str:
        home = self.folder.parent / "home"
        for name, text in {".keep": "", **self.home}.items():
            _write(home / name, place.fill(text))
        temporary = self.folder.parent / "tmp"  # own: Codex refuses a home that lies in the folder for temporary files
        temporary.mkdir(exist_ok=True)
        found = f"{bin_of(self.environment)}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": found, "HOME": str(home), "TMPDIR": str(temporary)}
        reported = {name: place.fill(value) for name, value in standard().items()}
        reported["TOKENIZER"] = str(tokenizer_folder(self.template))
        pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(
            *map(place.fill, self.command), cwd=self.folder, env=own | reported | dict(proxies), **pipes
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, f"it ended with {process.returncode}:\n{output.decode()}\n{errors.decode()}"
        return output.decode()


@dataclass(frozen=True)
class Place:
    """Where the gateway is, and the key to it."""

    root: str
    token: str

    def fill(self, text: str) -> str:
        return text.replace("{root}", self.root).replace("{token}", self.token)


def needs(environment: str) -> None:
    """Other people's programs run in `make test-clients`, which installs them first; there none may be missing."""
    if environment == PROJECT:
        return
    if "PENSTOCK_TEST_CLIENTS" not in os.environ:
        pytest.skip("run `make test-clients`: it installs the clients and runs them")
    assert not missing(environment), f"the environment {environment!r} is not installed; run tests/clients/environments.py"


def program(source: Path, folder: Path, *arguments: str, environment: str) -> list[str]:
    """The command that runs a program with a client's packages; node looks for them next to the file."""
    if source.suffix == ".py":
        return [str(python_of(environment)), str(source), *arguments]
    folder.mkdir(exist_ok=True)
    for each in source.parent.glob("*.mjs"):
        (folder / each.name).write_bytes(each.read_bytes())
    (folder / "node_modules").symlink_to(npm_prefix() / "node_modules")
    return ["node", str(folder / source.name), *arguments]


def api_of(name: str) -> str:
    """The API that the name of a trial's way says."""
    return next((api for api in ("responses", "messages") if api in name.lower()), "chat")


def standard() -> dict[str, str]:
    """What every client received: the page's first block, and to keep its traces and prices at home."""
    return connect_page.variables() | {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@cache
def _renderer(template: str) -> Renderer:
    return Renderer.load(tokenizer_folder(template))
