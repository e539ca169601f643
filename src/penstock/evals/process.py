"""One process that makes attempts of an evaluation, as its parent sees it: asked by lines to its stdin, heard by its stdout."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from penstock.codec import to_json
from penstock.errors import ConfigError, EngineError, GraderError, PenstockError, PoolError, PoolFailed, WorkerLost
from penstock.evals.child import Ask, Order, Orders
from penstock.evals.presence import LEAVE_S
from penstock.events import Events
from penstock.records import End, Rollout, Sampling, Task
from penstock.sdk.elsewhere import command
from penstock.system.process_group import how_ended

ERRORS = {kind.__name__: kind for kind in (ConfigError, EngineError, GraderError, PoolError, PoolFailed, WorkerLost)}
"""What a rollout may raise, by name; anything else is a PenstockError here."""
LAST_WORDS_S = 1.0
"""How long what a dead process has said may be on its way, where something that it started holds its stdout open."""
KILLED_S = 5.0
"""For the system to end a process that was killed."""


class ChildLost(WorkerLost):
    """The process died with the rollout; `half_told` says whether its start was heard of, and its end was not."""

    def __init__(self, message: str, *, half_told: bool) -> None:
        super().__init__(message)
        self.half_told = half_told


@dataclass(slots=True)
class _Running:
    done: asyncio.Future[End | None]
    answered: bool = False
    half_told: bool = False
    """Whether its `rollout.start` was heard, and its `rollout.end` was not."""


class Child(asyncio.SubprocessProtocol):
    """`start` makes one. Its events are told here as they come."""

    def __init__(self, number: int, log: Path, events: Events) -> None:
        loop = asyncio.get_running_loop()
        self.log = log
        """What it says on stderr."""
        self.running: dict[str, _Running] = {}
        self.ended = 0
        """Rollouts that it brought to an end."""
        self.fate = ""
        """How it ended."""
        self.ready: asyncio.Future[None] = loop.create_future()
        self._number, self._events, self._loop = number, events, loop
        self._over: asyncio.Future[None] = loop.create_future()
        self._said_before = log.stat().st_size
        self._rest = b""
        self._orders: list[bytes] = []
        self._mute = self._exited = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.done()

    async def run(self, rollout: Rollout, task: Task, sampling: Sampling) -> End | None:
        """See `Runner.run`; ChildLost where the process dies."""
        running = self.running[rollout.id] = _Running(self._loop.create_future())
        try:
            self.order(to_json(Order(ask=Ask(rollout=rollout, task=task, sampling=sampling))))
            return await running.done
        except asyncio.CancelledError:
            if not running.answered and not self.is_over:
                await self._undo(rollout.id, running)
            raise
        finally:
            del self.running[rollout.id]

    async def _undo(self, rollout_id: str, running: _Running) -> None:
        """Have it ended as CANCELLED; a process that is stuck leaves that to whoever goes on with the evaluation."""
        running.done = self._loop.create_future()
        self.order(to_json(Order(cancel=rollout_id)))
        await asyncio.wait({running.done}, timeout=LEAVE_S)
        if running.done.done():
            running.done.exception()  # it is the cancellation that goes on

    def order(self, line: bytes) -> None:
        """Send a line; those of one turn of the loop go together."""
        if not self._orders:
            self._loop.call_soon(self._flush)
        self._orders.append(line)

    def _flush(self) -> None:
        orders, self._orders = self._orders, []
        if not self._exited and not self._stdin.is_closing():
            self._stdin.write(b"\n".join([*orders, b""]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.SubprocessProtocol`."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._stdin = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """See `asyncio.SubprocessProtocol`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._hear(orjson.loads(line))
            except Exception as error:  # a full disk, a listener's mistake: whoever waits here must learn of it
                self._fail(error)

    def _hear(self, told: dict[str, Any]) -> None:
        if kind := told.get("event"):
            fields: dict[str, Any] = told["fields"]
            if kind in ("rollout.start", "rollout.end") and (running := self.running.get(fields["rollout_id"])):
                running.half_told = kind == "rollout.start"
            self._events.emit(kind, **fields)
        elif rollout_id := told.get("over"):
            self._answer(rollout_id, told)
        elif told.get("ready"):
            self.ready.set_result(None)
        else:
            self.ready.set_exception((ConfigError if told["bad_input"] else EngineError)(told["refused"]))

    def _answer(self, rollout_id: str, told: dict[str, Any]) -> None:
        running = self.running.get(rollout_id)
        if running is None:
            return
        running.answered = True
        self.ended += "end" in told
        if running.done.done():
            return
        if "end" in told:
            running.done.set_result(End(told["end"]) if told["end"] else None)
        else:
            kind = ERRORS.get(told["error"], PenstockError)
            running.done.set_exception(kind(told["message"]))

    def _fail(self, error: Exception) -> None:
        for waits in (self.ready, *(running.done for running in self.running.values())):
            if not waits.done():
                waits.set_exception(error)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """See `asyncio.SubprocessProtocol`."""
        self._mute = self._mute or fd == 1
        if self._mute and self._exited:
            self._end()

    def process_exited(self) -> None:
        """See `asyncio.SubprocessProtocol`."""
        self._exited = True
        if self._mute:
            self._end()
        else:
            self._loop.call_later(LAST_WORDS_S, self._end)

    def _end(self) -> None:
        """Tell whoever waits that it is no more."""
        if self.is_over:
            return
        self.fate = how_ended(self._transport.get_returncode() or 0)
        self._transport.close()
        self._over.set_result(None)
        if not self.ready.done():
            self.ready.set_exception(EngineError(f"process {self._number} {self.fate} as it started{self._last_line()}"))
        for running in self.running.values():
            if not running.done.done():
                text = f"process {self._number} of the evaluation {self.fate}"
                running.done.set_exception(ChildLost(text, half_told=running.half_told))

    def _last_line(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._said_before)
            lines = file.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {said} (more in {self.log})" if said else ""

    async def close(self, *, grace_s: float = LEAVE_S) -> None:
        """Have it undo what it runs and end; past `grace_s`, or cancelled, it is killed with all that it started."""
        self._stdin.close()
        try:
            await asyncio.wait({self._over}, timeout=grace_s)
        finally:
            if not self._exited:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._transport.get_pid(), signal.SIGKILL)
            await asyncio.wait({self._over}, timeout=KILLED_S)
            with suppress(FileNotFoundError):
                if self.is_over and not self.log.stat().st_size:
                    self.log.unlink()


async def start(orders: Orders, events: Events) -> Child:
    """A new process, ready for rollouts; ConfigError or EngineError says why it is not. Its death ends the wait for it."""
    log = Path(orders.run_folder) / f"process-{orders.number}.log"
    with log.open("ab") as said:
        child = Child(orders.number, log, events)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: child, *command("penstock.evals.child"), stdin=PIPE, stdout=PIPE, stderr=said, start_new_session=True
        )
    child.order(to_json(orders))
    try:
        await child.ready
    except BaseException:
        await child.close(grace_s=0.0)  # it runs nothing
        raise
    return child
