"""Coding agents as they are shipped, replayed from the record of their work: every prefix is the same, or the byte is named.

`PENSTOCK_REPLAYS=1000` says how often each is; three times unless it is given.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
from blocking_proxy import BlockingProxy
from client_trial import CORPUS, DEADLINE_S, Place, needs, standard
from connect_page import blocks
from environments import bin_of
from test_coding_agents import AGENTS, sandboxes, written

from penstock.chat.renderer import Renderer
from penstock.gateway import Session
from penstock.records import Attempt, BranchPoint, Sampling, Step, make_rollout
from penstock.testing import GatewayFixture, ScriptedEngine, workbench, write_tokenizer

REPLAYS = int(os.environ.get("PENSTOCK_REPLAYS", "3"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["mini", "codex", "claude", "qwen"])
def test_replays_of_a_coding_agent_repeat_its_record_or_name_the_byte(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    needs(agent.environment)
    [command] = blocks(agent.heading, "bash")
    if "--sandbox" in command and not sandboxes():
        command = command.replace("workspace-write", "danger-full-access")
    settings = {file: blocks(agent.heading, language)[0] for language, file in agent.settings.items()}
    renderer = Renderer.load(write_tokenizer(tmp_path / "model", corpus=CORPUS, vocab_size=420))
    script = written(agent)
    core = renderer.tokenizer.core
    engine = ScriptedEngine(lambda ids: script(core.decode(ids, skip_special_tokens=False)), renderer.tokenizer, chunk=16)

    async def run(session: Session, proxies: Mapping[str, str]) -> None:
        """Run the agent in an empty folder and an empty home, both at the paths of the time before."""
        place = Place(session.base_url.removesuffix("/v1"), session.token)
        home, work, temporary = (tmp_path / each for each in ("home", "work", "tmp"))
        for folder in (home, work, temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        for file, text in settings.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(place.fill(text))
        variables = {key: place.fill(value) for key, value in standard().items()}
        path = f"{bin_of(agent.environment)}{os.pathsep}{os.environ['PATH']}"
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-euc",
            command,
            cwd=work,
            env={"PATH": path, "HOME": str(home), "TMPDIR": str(temporary)} | variables | dict(proxies),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def main() -> tuple[Attempt, list[tuple[Attempt, str]]]:
        async with BlockingProxy() as proxy, workbench(engine, renderer, serves=True) as bench:
            session = await bench.rollout(sampling=Sampling(max_tokens=4096))
            await run(session, proxy.variables)
            recorded, made = await bench.attempt(session), list[tuple[Attempt, str]]()
            for number in range(REPLAYS):
                branch = await branch_of(bench, recorded, number)
                await run(branch, proxy.variables)
                made.append((await bench.attempt(branch), branch.branch_problem(ended=True)))
                bench.gateway.close(branch.rollout_id)
            return recorded, made

    recorded, made = asyncio.run(main())
    assert len(recorded.steps) == 3
    equal = [problem for attempt, problem in made if not problem and written_steps(attempt) == written_steps(recorded)]
    named = [problem for _, problem in made if re.search(r"differs.* at byte \d+: recorded '", problem)]
    print(f"{name}: {len(equal)} of {len(made)} replays repeat the record, {len(named)} differ: {named[:1]}")
    assert len(equal) + len(named) == len(made), [problem for _, problem in made if problem]


async def branch_of(bench: GatewayFixture, recorded: Attempt, number: int) -> Session:
    """A branch from the last call of the recorded rollout."""
    point = BranchPoint(rollout_id=recorded.rollout.id, step=recorded.steps[-1].index)
    rollout = make_rollout(f"branch-{number}", recorded.rollout.task_id, 0, channel="branch", branch=point)
    await bench.pool.open_group(await bench.pool.task(recorded.rollout.id), [rollout], seq=None)
    return bench.reopen(rollout, sampling=Sampling(max_tokens=4096))


def written_steps(attempt: Attempt) -> list[bytes]:
    """What the agent was told before the last call."""
    return [_written(step) for step in attempt.steps[:2]]


def _written(step: Step) -> bytes:
    return orjson.dumps([step.message, step.completion_ids, step.answer, step.created, step.context])
