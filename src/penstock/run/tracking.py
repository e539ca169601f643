"""Sends a run to trackers: each in its own thread, so that one that is slow, hangs or fails costs the run nothing."""

import asyncio
import math
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from penstock.config import RunConfig
from penstock.errors import Problems, one_line
from penstock.events import Events
from penstock.pool import reads
from penstock.pool.base import AFTER_ALL, PoolDatabase
from penstock.pool.location import PoolLocation
from penstock.records import Message, Rollout
from penstock.rollout.transcripts import transcripts
from penstock.run.folder import RunFolder
from penstock.run.trackers import TRACKERS
from penstock.run.trackers.base import ArtifactKind, RolloutTrace, TracedCall, TrackedRun, Tracker

MAX_QUEUED = 1000
"""Calls that wait for a tracker; more are left out and counted."""
FINISH_S = 60.0
"""How long a run that has ended waits for a tracker to send what is left."""
MAX_TEXT = 20_000
"""Characters of one text in a trace; more is cut."""
MAX_CALLS = 200
"""Messages of a transcript, and model calls, in a trace."""
NOT_NUMBERS = frozenset({"step", "steps", "rewards", "group_ids", "replies"})
EVALUATED = ("reward", "passes", "ends", "tasks", "rollouts", "steps", "prompt_tokens", "completion_tokens", "cost")


def check_trackers(config: RunConfig, problems: Problems) -> None:
    """Notes trackers that are unknown, not installed, or not set up."""
    for name in config.track.to:
        with problems.noting("track.to"):
            TRACKERS.load(name).check(config.track)


@asynccontextmanager
async def tracking(config: RunConfig, folder: RunFolder, events: Events) -> AsyncGenerator[None]:
    """Sends the run inside to the trackers of `[track]`; on leaving, waits until they have sent everything, for `FINISH_S`."""
    if not config.track.to:
        yield
        return
    listener = TrackingListener(config, folder, events)
    events.listen(listener)
    try:
        yield
    except BaseException:
        await listener.finish("failed")
        raise
    await listener.finish(listener.status)


class TrackingListener:
    """A listener of the run's events. The trackers start when the run does."""

    def __init__(self, config: RunConfig, folder: RunFolder, events: Events) -> None:
        self._config, self._folder, self._events = config, folder, events
        self._pool = PoolLocation(config.pool.name, folder.path, config.pool.url)
        self._loop = asyncio.get_running_loop()
        self._threads: list[TrackerThread] = []
        self._checkpoint: Path | None = None
        self._step = 0
        self.status: Literal["finished", "stopped"] = "stopped"

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "run.start" if not self._threads:
                self._start(fields["first_step"])
            case "eval.begin" if not self._threads:
                self._start(0)
            case "train.step":
                self._step = fields["step"]
                self._log(flat_numbers(fields, "train"))
                self._send_traces("train", fields["group_ids"])
            case "eval.end" if fields["reward"] is not None:
                self._send(lambda tracker: tracker.log({"heldout/reward": fields["reward"]}, fields["step"]))
            case "checkpoint":
                self._checkpoint = Path(fields["folder"])
            case "run.end":
                self.status = fields["summary"]["status"]
            case "eval.over":
                self._end_evaluation(fields["status"])
            case _:
                pass

    async def finish(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Sends the run's files and closes the trackers; reports what could not be sent."""
        kept: dict[ArtifactKind, Path | None] = {
            "config": self._folder.path / "config.json",
            "summary": self._folder.path / "summary.json",
            "model": self._checkpoint if self._config.track.checkpoint else None,
        }
        for kind, path in kept.items():
            if path is not None and path.exists():
                self._send(lambda tracker, kind=kind, path=path: tracker.artifact(path, kind))
        self._send(lambda tracker: tracker.finish(status))
        async with asyncio.TaskGroup() as group:
            for thread in self._threads:
                group.create_task(asyncio.to_thread(thread.close, FINISH_S))
        for thread in self._threads:
            self._events.emit("tracker.end", tracker=thread.name, **thread.counts())
            if text := thread.lost_text():
                self._events.emit("notice", text=text)

    def _start(self, first_step: int) -> None:
        track, known = self._config.track, self._folder.tracker_ids()
        if track.rollouts and not self._pool.kind.durable:
            self._tell(f"track.rollouts: trackers get no rollouts, as pool.name = {self._pool.name!r} keeps them in memory")
        for name in dict.fromkeys(track.to):
            run = TrackedRun(
                project=track.project,
                name=track.name or self._config.run.name,
                folder=self._folder.path,
                config=self._config.model_dump(mode="json"),
                first_step=first_step,
                id=known.get(name, ""),
                offline=track.mode == "offline",
            )
            thread = TrackerThread(name, TRACKERS.load(name)(), partial(self._in_loop, self._tell))
            thread.send(partial(self._start_one, name, run))
            self._threads.append(thread)

    def _start_one(self, name: str, run: TrackedRun, tracker: Tracker) -> None:
        started = tracker.start(run)
        self._in_loop(self._folder.add_tracker_id, name, started.id)
        self._in_loop(self._tell, f"{name}: {started.place}")

    def _in_loop(self, call: Callable[..., object], *arguments: str) -> None:
        with suppress(RuntimeError):  # a tracker that hung may come back after the run
            self._loop.call_soon_threadsafe(call, *arguments)

    def _tell(self, text: str) -> None:
        self._events.emit("notice", text=text)

    def _send(self, call: "Callable[[Tracker], object]") -> None:
        for thread in self._threads:
            thread.send(call)

    def _log(self, metrics: Mapping[str, float]) -> None:
        step = self._step
        self._send(lambda tracker: tracker.log(metrics, step))

    def _send_traces(self, channel: str, group_ids: Sequence[str]) -> None:
        most, step = self._config.track.rollouts, self._step
        if most and self._pool.kind.durable:
            read = SharedTraces(partial(read_traces, self._pool, channel, group_ids, most))
            self._send(lambda tracker: tracker.traces(read(), step))

    def _end_evaluation(self, status: str) -> None:
        self.status = "finished" if status == "finished" else "stopped"
        outcome: Mapping[str, Any] = (self._folder.summary() or {}).get("outcome") or {}
        self._log(flat_numbers({key: outcome.get(key) for key in EVALUATED}, "eval"))
        self._send_traces("eval", ())


class TrackerThread:
    """Calls one tracker. The first call starts it: if that fails, the others are not made."""

    def __init__(self, name: str, tracker: Tracker, tell: Callable[[str], object]) -> None:
        self.name = name
        self._tracker, self._tell = tracker, tell
        self._calls: queue.Queue[Callable[[Tracker], object] | None] = queue.Queue(MAX_QUEUED)
        self._made = self._failed = self._left_out = 0
        self._usable = True
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[Tracker], object]) -> None:
        """Have `call` made later. Never waits."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1

    def close(self, timeout_s: float) -> None:
        """Wait until all calls are made, for `timeout_s` at most."""
        try:
            self._calls.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def counts(self) -> dict[str, int]:
        return {"made": self._made, "failed": self._failed, "left_out": self._left_out + self._waiting}

    def lost_text(self) -> str:
        """Says what the tracker does not have; empty if it has everything."""
        lost = self._failed + self._left_out + self._waiting
        if not lost:
            return ""
        late = f", {self._waiting} of them because it took too long" if self._waiting else ""
        return f"{self.name} lacks {lost} of {lost + self._made} messages of this run{late}; the run folder has all"

    @property
    def _waiting(self) -> int:
        return self._calls.qsize() if self._thread.is_alive() else 0

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if self._usable:
                    call(self._tracker)
                    self._made += 1
                else:
                    self._failed += 1
            except Exception as error:  # another's code, which must not fail the run
                self._failed += 1
                self._usable = self._made > 0
                if self._failed == 1:
                    self._tell(f"{self.name} failed, and the run continues: {one_line(error)}")


class SharedTraces:
    """Traces that several trackers ask for, read once, in the thread of the first."""

    def __init__(self, read: Callable[[], list[RolloutTrace]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._found: list[RolloutTrace] | None = None

    def __call__(self) -> list[RolloutTrace]:
        with self._lock:
            if self._found is None:
                self._found = self._read()
            return self._found


def read_traces(place: PoolLocation, channel: str, group_ids: Sequence[str], most: int) -> list[RolloutTrace]:
    """Reads the best and the worst rollout of each group; without `group_ids`, of the first groups of the channel."""
    with place.kind.reading(place.folder, place.url) as database:
        wanted = group_ids or _first_groups(database, channel, most)
        found = [_trace(reads.read_rollout(database, name)) for group in wanted[:most] for name in _extremes(database, group)]
    return found[:most]


def _first_groups(database: PoolDatabase, channel: str, most: int) -> list[str]:
    query = "SELECT id FROM groups WHERE channel = ? ORDER BY seq, id LIMIT ?"
    return [row[0] for row in database.execute(query, (channel, most)).fetchall()]


def _extremes(database: PoolDatabase, group_id: str) -> list[str]:
    query = "SELECT id FROM rollouts WHERE group_id = ? AND current = 1 ORDER BY place"
    names = [row[0] for row in database.execute(query, (group_id,)).fetchall()]
    light = [reads.read_rollout(database, name, first_step=AFTER_ALL, first_node=AFTER_ALL) for name in names]
    ended = [attempt for attempt in light if attempt.end is not None]
    ordered = sorted(ended, key=lambda attempt: -math.inf if attempt.reward is None else attempt.reward, reverse=True)
    return list(dict.fromkeys(attempt.ref.id for attempt in (*ordered[:1], *ordered[-1:])))


def _trace(attempt: Rollout) -> RolloutTrace:
    rollout = attempt.ref
    return RolloutTrace(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        task_id=rollout.task_id,
        end=str(attempt.end),
        why=_cut(attempt.message),
        reward=attempt.reward,
        grades={grade.source: grade.reward for grade in attempt.grades if grade.transcript is None and grade.step is None},
        version=min((version for step in attempt.steps for version in step.versions), default=None),
        transcripts={name: _cut_messages(each.messages) for name, each in transcripts(attempt).items()},
        calls=[
            TracedCall(step.transcript, step.created, step.seconds, step.sampled, step.finish, *_cut_messages([step.message]))
            for step in attempt.steps[:MAX_CALLS]
        ],
    )


def _cut_messages(messages: Iterable[Message]) -> list[Message]:
    return [cast("Message", _cut(message)) for message in list(messages)[-MAX_CALLS:]]


def _cut(value: Any) -> Any:
    """Texts as valid UTF-8 of a bounded length, in whatever they are."""
    if isinstance(value, str):
        whole = value.encode("utf-8", "replace").decode()
        return whole if len(whole) <= MAX_TEXT else f"{whole[:MAX_TEXT]}… ({len(whole) - MAX_TEXT} characters left out)"
    if isinstance(value, Mapping):
        return {str(key): _cut(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_cut(each) for each in cast("Sequence[Any]", value)]
    return value


def flat_numbers(fields: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Returns the finite numbers, those of inner tables under names with slashes."""
    found: dict[str, float] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(cast("Mapping[str, Any]", value), f"{prefix}/{key}") if key not in NOT_NUMBERS else {}
        elif isinstance(value, int | float) and key not in NOT_NUMBERS and math.isfinite(value):
            found[f"{prefix}/{key}"] = float(value)
    return found
