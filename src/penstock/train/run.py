"""A training run from end to end: checked, opened or taken up again, trained, summed up."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Generator
from dataclasses import asdict, replace

from penstock.codec import to_json
from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.events import Events, Listener
from penstock.models import resolve
from penstock.rollout.guests import leaves
from penstock.rollout.scheduler import run_once
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import load_agent
from penstock.train import policy
from penstock.train.folder import locked, open_run_folder
from penstock.train.loop import Progress, refuse_all_failed, train_steps
from penstock.train.stations import Inputs, Stations, open_stations, sampling
from penstock.train.summary import Summary, finished, mean, sum_up


async def train(config: RunConfig, *, listener: Listener, stop: asyncio.Event, fresh: bool = False) -> Summary:
    """Train as `config` says, or take up the run of that name where it was left; `stop` ends it after the running step."""
    check_port(config.gateway.host, config.gateway.port)
    inputs = read_inputs(config, listener)
    folder = open_run_folder(config, fresh=fresh)
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
        if done := finished(folder, config):
            return done
        async with open_stations(config, inputs, folder, events) as stations:
            summary = await run(stations, stop)
        folder.write_summary(to_json(summary))
        events.emit("run.end", summary=asdict(summary))
        return summary


def read_inputs(config: RunConfig, listener: Listener) -> Inputs:
    """Read what the user gave; whatever is wrong with it is said before anything heavy is loaded."""
    tasks = load_tasks(config.dataset.train)
    heldout = load_tasks(config.dataset.eval, limit=config.dataset.eval_limit) if config.dataset.eval else []
    agent = load_agent(config.agent.entry, config.workflow, config.grader)
    listener("stage", {"text": f"looking for {config.model.name}"})
    model = resolve(config.model.name)
    return Inputs(tasks=tasks, heldout=heldout, agent=agent, model=model.name, folder=model.path)


def check_port(host: str, port: int) -> None:
    """ConfigError where the gateway could not listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as cause:
            text = f"gateway.port = {port} on {host} cannot be used: {cause.strerror}; set another, or 0 for any free one"
            raise ConfigError(text) from cause


async def run(s: Stations, stop: asyncio.Event) -> Summary:
    """Held-out evaluation, training, held-out evaluation again; a part that an earlier process finished is not repeated."""
    progress = await take_up(s)
    s.events.emit(
        "run.start",
        name=s.config.run.name,
        folder=str(s.folder.path),
        model=s.inputs.model,
        steps=s.config.train.steps,
        first_step=progress.step + 1,
        resumed=s.folder.resumed,
    )
    before = await evaluate(s, "before", progress)
    with _first_alone():
        async with asyncio.TaskGroup() as group:
            group.create_task(s.scheduler.run())
            progress = await train_steps(s, progress, stop)
            s.scheduler.stop()
    if progress.step < s.config.train.steps:
        s.events.emit("run.stop", reason="asked to")
        return await sum_up(s, progress, before, None)
    return await sum_up(s, progress, before, await evaluate(s, "after", progress))


async def take_up(s: Stations) -> Progress:
    """Begin, or go on from the last checkpoint: what it holds is acknowledged, what was trained after it is given back."""
    saved = policy.latest(s.folder.checkpoints)
    progress = Progress()
    if saved is not None:
        for lease in saved.leases:
            await s.pool.ack(lease, saved.number)
        await s.engine.swap(saved.number, lambda: policy.restore(s.folder.checkpoints, saved, s.learner))
        progress = Progress(saved.step, saved.number)
    await s.pool.release()
    s.folder.keep_metrics(progress.step)
    s.scheduler.advance(progress.step)
    return replace(progress, last_version=max(progress.version, (await s.pool.stats()).last_version))


async def evaluate(s: Stations, when: str, progress: Progress) -> float | None:
    """Mean reward over the held-out tasks at the evaluation temperature; a failed rollout counts as 0."""
    known = s.folder.evaluations().get(f"{when}-{progress.step if when == 'after' else 0}")
    if known is not None or not s.inputs.heldout:
        return known
    s.events.emit("eval.start", when=when, tasks=len(s.inputs.heldout))
    started = time.monotonic()
    attempts = await run_once(
        s.inputs.heldout,
        s.runner,
        pool=s.pool,
        sampling=sampling(s.config, temperature=s.config.sampling.eval_temperature),
        concurrency=s.config.rollout.concurrency,
    )
    refuse_all_failed(attempts, "of the held-out evaluation")
    reward = mean([attempt.reward or 0.0 for attempt in attempts])
    seconds = round(time.monotonic() - started, 3)
    s.events.emit("eval.end", when=when, reward=reward, rollouts=len(attempts), seconds=seconds)
    s.folder.add_evaluation(f"{when}-{progress.step if when == 'after' else 0}", reward)
    return reward


@contextlib.contextmanager
def _first_alone() -> Generator[None]:
    """Of several errors that ended the run, raise the first by itself: the others followed from it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None
