"""What the executors' suite shares: one real gateway, an engine that says what it is asked to say, and every executor over both."""

import asyncio
import contextlib
import itertools
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.chat.renderer import Renderer
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.http.listen import bind
from penstock.http.server import HttpServer
from penstock.records import Rollout, Sampling, Task, make_rollout
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.executors.base import ExecutorContext, read_section
from penstock.rollout.runner import Runner
from penstock.rollout.transcripts import transcripts
from penstock.sdk.discovery import load_agent
from penstock.testing import ScriptedEngine, ScriptedReply, workbench
from penstock_compat.rollout_server.app import create_rollout_server
from penstock_compat.rollout_server.backend import LocalBackend

AGENTS = Path(__file__).with_name("executor_agents")
AGES = ("id", "notes", "metrics", "provider_data", "tracking_id")
"""Keys under which frameworks keep what they make up or measure again in each run, and ours for where the notes of a run lie."""
DEADLINE_S = 60
GRACE_S = 0.2


@dataclass(frozen=True)
class Case:
    """One task: what its workflow does, what its grader does, and how long they may take."""

    do: str = "answers"
    grade: str = "right"
    say: str = "six"
    agent_timeout_s: float = DEADLINE_S
    grader_timeout_s: float = DEADLINE_S


@dataclass
class Outcome:
    """What came of a case."""

    attempt: Rollout
    seen: dict[str, Any] | None
    """What the grader saw; None where it was never asked."""
    reported: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def grades(self) -> list[tuple[str | None, int | None, float]]:
        return [(grade.transcript, grade.step, grade.reward) for grade in self.attempt.grades]

    @property
    def compared(self) -> dict[str, Any]:
        """All that must not depend on the executor."""
        recorded = {name: each._asdict() for name, each in transcripts(self.attempt).items()}
        end, message = self.attempt.end, self.attempt.message
        return {"end": end, "message": message, "grades": self.grades, "recorded": recorded, "seen": _ageless(self.seen)}


def _ageless(seen: Any) -> Any:
    """Without ids that a framework makes up again for each run, and without where the notes of this run lie."""
    if isinstance(seen, dict):
        return {key: _ageless(value) for key, value in seen.items() if key not in AGES}
    return [_ageless(each) for each in seen] if isinstance(seen, list) else seen


def script(tokenizer):
    """An engine's replies: what the last message asks for."""

    def reply(ids):
        text = re.findall(r"say: (.*)\n", tokenizer.decode(list(ids)))[-1]
        return ScriptedReply("broken off", fail_after=2) if text == "FAIL" else text

    return reply


@contextlib.asynccontextmanager
async def opened(name, agent, *, load_transcripts, artifacts, grader_timeout_s, events):
    """The executor `name` for `agent`, entered; the server executor gets a rollout server in this event loop."""
    async with contextlib.AsyncExitStack() as stack:
        table = {"urls": [await stack.enter_async_context(serving(agent, artifacts))]} if name == "server" else {}
        given = ExecutorContext(
            agent=replace(agent, tables=({}, {})) if name == "server" else agent,  # its tables are applied where the agent is
            author_tasks=AuthorTasks(agent.entry.parent, events, grace_s=GRACE_S),
            section=read_section(name, table),
            load_transcripts=load_transcripts,
            artifacts=artifacts,
            grader_timeout_s=grader_timeout_s,
            events=events,
        )
        yield await stack.enter_async_context(EXECUTORS.load(name)(given))


@contextlib.asynccontextmanager
async def serving(agent, artifacts):
    """A rollout server for `agent` on a free port; its URL."""
    backend = LocalBackend(
        workflow=agent.workflow,
        workflow_config=agent.workflow_config,
        grader=agent.grader,
        grader_config=agent.grader_config,
        artifacts=artifacts,
        grace_s=GRACE_S,
    )
    app = create_rollout_server(backend=backend, journal=None, configure_logging=False)
    sock = bind("127.0.0.1", 0)
    async with HttpServer(app, sock, drain_s=1, reader_s=DEADLINE_S):
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        await app.state.rollouts.close()


class Stage:
    """Runs cases of one agent file on one executor, all of them at once."""

    def __init__(self, name, agent, bench, folder):
        self.name, self.agent, self.bench, self.folder = name, agent, bench, folder
        self.reported = []
        self.numbers = itertools.count()
        self.events = Events()
        self.events.listen(lambda kind, fields: self.reported.append((kind, fields)))

    async def outcomes(self, cases: dict[str, Case]) -> dict[str, Outcome]:
        """By the cases' names. Those with the same deadline for their grader share an executor, as in a run they would."""
        done: dict[str, Outcome] = {}
        for limit_s in sorted({case.grader_timeout_s for case in cases.values()}):
            chosen = {name: case for name, case in cases.items() if case.grader_timeout_s == limit_s}
            done |= await self._batch(chosen, limit_s)
        return done

    async def _batch(self, cases, limit_s):
        async def load_transcripts(rollout_id):
            return transcripts(await self.bench.pool.rollout(rollout_id))

        options = {"artifacts": self.folder / "artifacts", "grader_timeout_s": limit_s, "events": self.events}
        async with opened(self.name, self.agent, load_transcripts=load_transcripts, **options) as executor:
            runner = Runner(
                executor=executor,
                grader=self.agent.grader_name,
                gateway=self.bench.gateway,
                pool=self.bench.pool,
                events=self.events,
                limits=RolloutSection(grader_timeout_s=limit_s),
            )
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(self._one(runner, name, case)) for name, case in cases.items()}
        return {name: task.result() for name, task in tasks.items()}

    async def _one(self, runner, name, case):
        notes = self.folder / f"{name}.json"
        metadata = {"do": case.do, "grade": case.grade, "notes": str(notes)}
        prompt = ({"role": "user", "content": f"say: {case.say}"},)
        task = Task(id=name, prompt=prompt, label=case.say, metadata=metadata)
        rollout = make_rollout(f"train-{name}", task.id, 0)
        await self.bench.pool.open_group(task, [rollout], seq=next(self.numbers))
        limits = runner.limits.model_copy(update={"agent_timeout_s": case.agent_timeout_s})
        await replace(runner, limits=limits).run(rollout, task, Sampling(max_tokens=256))
        seen = json.loads(notes.read_text()) if notes.exists() else None
        reported = [(kind, fields) for kind, fields in self.reported if fields.get("rollout_id") == rollout.id]
        return Outcome(await self.bench.pool.rollout(rollout.id), seen, reported)


def outcomes(name, file, cases, folder, renderer: Renderer, *, tables=({}, {})):
    """Run `cases` of the agent in `file` through the executor `name`."""

    async def main():
        engine = ScriptedEngine(script(renderer.tokenizer), renderer.tokenizer)
        agent = load_agent(AGENTS / file, *tables)
        async with asyncio.timeout(2 * DEADLINE_S), workbench(engine, renderer, serves=True) as bench:
            return await Stage(name, agent, bench, folder).outcomes(cases)

    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(main())
