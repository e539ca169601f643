"""Grades the rollouts of an evaluation with another grader. Nothing is sampled again, and the source keeps its grades."""

import asyncio
import sys
from collections.abc import AsyncIterable, Container, Iterable
from pathlib import Path
from typing import Any

import orjson

from penstock.config import RunConfig, make_config, override
from penstock.errors import ConfigError, EngineError, GraderError
from penstock.evals.outcome import EvalOutcome, open_evaluation, outcome, read_groups, score_tasks
from penstock.evals.run import grading_digests
from penstock.evals.spending import prices_of
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.records import End, Grade, Group, Rollout
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.in_process import InProcessAgent
from penstock.rollout.transcripts import make_samples, transcripts
from penstock.run.folder import RunFolder, locked, open_run_folder
from penstock.run.inputs import preflight
from penstock.run.opening import open_pool
from penstock.sdk.discovery import Agent, open_agent
from penstock.sdk.workflow import AgentWorkflow

NO_WORKFLOW = f"no concrete {AgentWorkflow.__name__} subclass"
GRADED = (End.COMPLETED, End.GRADER_ERROR)
"""Ends of rollouts whose agent completed."""


def regrade_config(folder: Path, *, agent: Path | None, name: str, overrides: Iterable[str]) -> RunConfig:
    """The settings of the evaluation in `folder`, with another grader and another name."""
    try:
        tree: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())["config"]
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise ConfigError(f"{folder}: not an evaluation; give a folder that `penstock eval run` made") from cause
    if agent is not None:
        tree["agent"] = {"entry": str(agent)}
    if tree["run"]["name"] == name:
        raise ConfigError(f"{folder}: it cannot be graded into itself; give another --name")
    tree["run"] |= {"name": name, "folder": str(folder.parent)}
    override(tree, overrides)
    return make_config(tree, str(folder / "config.json"))


async def regrade(source: Path, config: RunConfig, *, fresh: bool = False) -> tuple[RunFolder, EvalOutcome]:
    """Grade the rollouts of `source` into a new evaluation, or resume that; returns its folder and outcome."""
    try:
        preflight(config.agent, config.workflow, config.grader)
    except ConfigError as error:
        if NO_WORKFLOW not in str(error):
            raise
        config = _grader_alone(config)
        preflight(config.agent, config.workflow, config.grader)
    agent = open_agent(config.agent, config.workflow, config.grader)
    async with open_evaluation(source) as recorded:
        folder = open_run_folder(config, fresh=fresh, digests=grading_digests(agent))
        with locked(folder.path):
            pool = open_pool(config, folder)
            try:
                await _Regrader(pool, agent, config, folder.path / "artifacts").copy(recorded.groups())
                prices = prices_of(config.model_dump(include={"engine"}))
                found = outcome(await score_tasks(read_groups(pool)), config.eval, prices=prices)
                summary = {"name": config.run.name, "folder": str(folder.path), "status": "finished", "outcome": found.as_json()}
                folder.write_summary(orjson.dumps(summary))
                return folder, found
            finally:
                await pool.close()


def _grader_alone(config: RunConfig) -> RunConfig:
    """Returns the settings for a file with a grader and no workflow. The command is never run."""
    source = config.agent.model_copy(update={"command": (sys.executable,), "folder": Path()})
    return config.model_copy(update={"agent": source, "workflow": {}})


class _Regrader:
    """Copies groups, with another grader's grades."""

    def __init__(self, pool: Pool, agent: Agent, config: RunConfig, artifacts: Path) -> None:
        self._pool, self._agent, self._artifacts = pool, agent, artifacts
        self._work = InProcessAgent(agent, AuthorTasks(agent.entry.parent, Events()))
        self._slots, self._timeout_s = asyncio.Semaphore(config.rollout.concurrency), config.rollout.grader_timeout_s

    async def copy(self, groups: AsyncIterable[Group]) -> None:
        """Copy all ended rollouts that the pool does not have; those of one group in sequence."""
        ended = {a.ref.id async for group in read_groups(self._pool) for a in group.rollouts if a.end is not None}
        async with asyncio.TaskGroup() as tasks:
            async for group in groups:
                await self._slots.acquire()
                tasks.create_task(self._copy_group(group, ended))

    async def _copy_group(self, group: Group, ended: Container[str]) -> None:
        try:
            rollouts = [rollout for rollout in group.rollouts if rollout.end is not None]
            await self._pool.open_group(group.task, [rollout.ref for rollout in rollouts], seq=group.seq)
            for rollout in rollouts:
                if rollout.ref.id not in ended:
                    await self._copy_rollout(group, rollout)
        finally:
            self._slots.release()

    async def _copy_rollout(self, group: Group, rollout: Rollout) -> None:
        nodes, rollout_id = {node.id: node for node in rollout.nodes}, rollout.ref.id
        end, message, grades = rollout.end or End.LOST, rollout.message, list[Grade]()
        for step in sorted(rollout.steps, key=lambda step: step.index):
            await self._pool.append(step, nodes.pop(step.node, None))
        if end in GRADED:
            end, message = End.COMPLETED, ""
            try:
                grades = await self._grade(group, rollout)
            except (GraderError, EngineError, TimeoutError) as error:
                end, message = End.GRADER_ERROR, str(error) or f"the grader ran longer than {self._timeout_s:g} s"
        await self._pool.end(rollout_id, end, message, grades)

    async def _grade(self, group: Group, rollout: Rollout) -> list[Grade]:
        samples, rollout_id, source = make_samples(transcripts(rollout), {}), rollout.ref.id, self._agent.grader_name
        folder = self._artifacts / rollout_id
        rewards = await self._work.grade(group.task, samples, timeout_s=self._timeout_s, artifacts_dir=folder)
        return [each.as_grade(rollout_id, source) for each in rewards]
