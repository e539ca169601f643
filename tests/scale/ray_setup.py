"""A scheduler over a real gateway, with agents on Ray's workers and an engine whose second replies wait until they are released."""

import asyncio
import contextlib
import json
from pathlib import Path

from penstock.chat.renderer import Renderer
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import Sampling, Task
from penstock.rollout.executors.base import read_section
from penstock.rollout.runner import open_runner
from penstock.rollout.scheduler import Scheduler
from penstock.sdk.discovery import load_agent
from penstock.testing import ScriptedEngine, ScriptedReply, workbench, write_tokenizer

AGENT = Path(__file__).parent / "ray_agents" / "agent.py"
DEADLINE_S = 90


class RaySetup:
    """A scripted engine, tasks, the runner and scheduler, and the events they emit."""

    def __init__(self, folder, *, stall=False):
        self.folder, self.notes = folder, folder / "notes"
        self.notes.mkdir(parents=True)
        self.renderer = Renderer.load(write_tokenizer(folder / "model"))
        reply = ScriptedReply("a second answer", stall_after=2) if stall else "a second answer"
        decode = self.renderer.tokenizer.decode
        self.engine = ScriptedEngine(lambda ids: reply if "more" in decode(list(ids)) else "first", self.renderer.tokenizer)
        self.events, self.reported = Events(), []
        self.events.listen(lambda kind, fields: self.reported.append((kind, fields)))

    def tasks(self, *kinds):
        prompt = ({"role": "user", "content": "say something"},)
        return [
            Task(id=f"t{number}", prompt=prompt, metadata={"do": kind, "notes": str(self.notes)})
            for number, kind in enumerate(kinds)
        ]

    @contextlib.asynccontextmanager
    async def opened(self, limits=None, agent=AGENT, **section):
        """The runner, and the pool that it writes to."""
        limits = (limits or RolloutSection()).model_copy(update={"executor": "ray"})
        async with asyncio.timeout(DEADLINE_S), workbench(self.engine, self.renderer, serves=True) as bench:
            options = {"gateway": bench.gateway, "pool": bench.pool, "events": self.events, "limits": limits}
            agent = load_agent(agent, {}, {}) if isinstance(agent, Path) else agent
            async with open_runner(agent, section=read_section("ray", section), **options) as runner:
                yield runner, bench.pool

    def scheduler(self, tasks, runner, pool):
        """Makes one group for each task."""
        limits = runner.limits.model_copy(update={"groups_per_step": len(tasks)})
        options = {"pool": pool, "events": self.events, "limits": limits, "sampling": Sampling(max_tokens=64)}
        return Scheduler(tasks, runner, **options, seed=0, shuffle=False, steps=1)

    async def groups(self, scheduler, pool):
        """Run it until every group is complete; the groups."""
        async with asyncio.TaskGroup() as both:
            both.create_task(scheduler.run())
            while (await pool.stats("train")).groups_complete < scheduler._limits.groups_per_step:
                await pool.wait(await pool.position(), timeout_s=1)
            scheduler.stop()
        return await pool.groups("train")

    def answered(self):
        """By rollout: where it ran last, and how many answers it had."""
        return {path.stem: json.loads(path.read_text()) for path in self.notes.glob("*.json")}

    def pids(self):
        return [fields["pid"] for kind, fields in self.reported if kind == "worker.start"]
