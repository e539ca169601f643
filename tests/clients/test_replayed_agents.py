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
from client_trial import DEADLINE_S, PROGRAMS, Place, needs, standard
from connect_page import blocks
from environments import bin_of, python_of
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
    renderer = Renderer.load(write_tokenizer(tmp_path / "model"))
    script = written(agent)
    core = renderer.tokenizer.core
    engine = ScriptedEngine(lambda ids: script(core.decode(ids, skip_special_tokens=False)), renderer.tokenizer, chunk=16)

    async def run(session: Session, proxies: Mapping[str, str]) -> None:
        """Run the agent in an empty folder and an empty home, both at the paths of the time before."""
        place = Place(session.base_url.removesuffix("/v1"), session.token)
        home, work, temporary = (tmp_path / each for each in ("home", "work", "tmp"))
        for folder in (home, work, temporary):
            empty(folder)
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


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_replays_of_mini_swe_agent_repeat_its_record(tmp_path: Path) -> None:
    needs("mini-swe-agent")
    renderer = Renderer.load(write_tokenizer(tmp_path / "model"))
    core, script = renderer.tokenizer.core, written(AGENTS["mini"])
    engine = ScriptedEngine(lambda ids: script(core.decode(ids, skip_special_tokens=False)), renderer.tokenizer, chunk=16)
    arguments = ["-m", "openai/any", "-t", "Write hello to made.txt", "-y", "--exit-immediately", "-o", "trajectory.json"]
    own = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    left = list(range(REPLAYS))

    async def run(process: asyncio.subprocess.Process, session: Session, work: Path) -> None:
        empty(work)
        place = Place(session.base_url.removesuffix("/v1"), session.token)
        variables = {key: place.fill(value) for key, value in standard().items()}
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(orjson.dumps({"folder": str(work), "variables": variables, "arguments": arguments}) + b"\n")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.stdout.readline() == b"ended\n"

    async def start() -> asyncio.subprocess.Process:
        command = [str(python_of("mini-swe-agent")), str(PROGRAMS / "forked_mini.py")]
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)} | own
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(*command, env=variables, **pipes)
        assert process.stdout is not None
        while await process.stdout.readline() != b"ready\n":  # it greets its user first
            assert process.returncode is None
        return process

    async def main() -> tuple[int, list[str]]:
        equal, problems = 0, list[str]()
        async with workbench(engine, renderer, serves=True) as bench:
            processes = [await start() for _ in range(2)]
            session = await bench.rollout(sampling=Sampling(max_tokens=4096))
            await run(processes[0], session, tmp_path / "work-0")
            recorded = await bench.attempt(session)
            assert len(recorded.steps) == 3

            async def worker(number: int, process: asyncio.subprocess.Process) -> None:
                nonlocal equal
                while left:
                    branch = await branch_of(bench, recorded, left.pop())
                    await run(process, branch, tmp_path / f"work-{number}")
                    problem, attempt = branch.branch_problem(ended=True), await bench.attempt(branch)
                    equal += not problem and written_steps(attempt) == written_steps(recorded)
                    problems.extend([problem] if problem else [])
                    if (made := REPLAYS - len(left)) % 20 == 0:
                        print(f"{made} of {REPLAYS} replays begun, {equal} equal, {len(problems)} differ", flush=True)
                    bench.gateway.close(branch.rollout_id)

            try:
                async with asyncio.TaskGroup() as group:
                    for number, process in enumerate(processes):
                        group.create_task(worker(number, process))
            finally:
                for process in processes:
                    process.kill()
                    await process.wait()
        return equal, problems

    equal, problems = asyncio.run(main())
    print(f"mini-swe-agent: {equal} of {REPLAYS} replays repeat the record, {len(problems)} differ: {problems[:1]}")
    assert equal + len(problems) == REPLAYS
    assert all(re.search(r"differs.* at byte \d+: recorded '", problem) for problem in problems)


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


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
