"""A command of the user's in a process group of its own, which is ended as a whole; the terminal is lent to it meanwhile."""

import asyncio
import os
import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import orjson
import typer

from penstock.cli.gateway import Engine, Model, Overrides, Urls, get_model, make_settings
from penstock.cli.interrupts import INTERRUPTED, Interrupts
from penstock.cli.output import clock, counts, percent
from penstock.errors import ConfigError
from penstock.records import Attempt, End
from penstock.sdk.environment import rollout_environment
from penstock.system.process_group import end_group, signal_group

if TYPE_CHECKING:
    pass
    from penstock.gateway.standalone import ModelFiles, Settings


STDIN = 0
GRACE_S = 5.0
"""For a group that was asked to end; then it is killed."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    """Its exit code; 128 and the signal's number where one ended it."""
    late: bool = False
    """Whether it was ended because its time was up."""


async def run_command(
    command: Sequence[str], environment: Mapping[str, str], stop: asyncio.Event, timeout_s: float | None = None
) -> Ended:
    """Run it to its end; `stop`, or the time that it has, ends the whole group. Where `stop` came first, it is not begun."""
    if stop.is_set():
        return Ended(128 + signal.SIGINT)
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment), process_group=0)
    late = False
    try:
        with _terminal(process.pid):
            over, stopped = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.wait())
            try:
                ended, _ = await asyncio.wait({over, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                late = not ended
                if not over.done():
                    await end_group(process, GRACE_S)
            finally:
                stopped.cancel()
    finally:
        if process.returncode is None or stop.is_set():
            signal_group(process, signal.SIGKILL)
    code = await process.wait()
    return Ended(code if code >= 0 else 128 - code, late)


@contextmanager
def _terminal(group: int) -> Generator[None]:
    """Let the group read from the terminal and get its Ctrl-C, where we could; it is ours again afterwards."""
    ours = os.getpgrp()
    if not _is_foreground(ours):
        yield
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # who asks for it back is in the background
    try:
        with suppress(OSError):
            os.tcsetpgrp(STDIN, group)
            os.killpg(group, signal.SIGCONT)  # it may have tried to read before
        yield
    finally:
        with suppress(OSError):
            os.tcsetpgrp(STDIN, ours)
        signal.signal(signal.SIGTTOU, before)


def _is_foreground(group: int) -> bool:
    try:
        return os.tcgetpgrp(STDIN) == group
    except OSError:  # no terminal
        return False


TIMED_OUT = 124
"""Our exit code for a command that was ended for its time, as that of `timeout`."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND [ARGS]...", help="After --, as you would type it.")],
    engine: Engine = "embedded",
    model: Model = "smollm2-135m",
    url: Urls = None,
    folder: Annotated[Path | None, typer.Option(help="Where it is recorded; a new one under runs/ by default.")] = None,
    overrides: Overrides = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=0.001, metavar="SECONDS", help="End it, with all that it started, after this long."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Sum up as JSON, on stderr: stdout is the command's.")] = False,
) -> None:
    """Run a command with its model calls sent here, and record them as one rollout.

    It finds the model by OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. Its exit code is ours;
    124 where --timeout ended it.
    """
    from penstock.gateway.standalone import make_folder

    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: no such command; write it as you would without `penstock run --`")
    settings = make_settings(engine, model, url or [], overrides or [], {})
    place = folder or Path("runs") / time.strftime("recorded-%Y%m%d-%H%M%S")
    found = get_model(settings)
    make_folder(place, settings, found)
    try:
        outcome = asyncio.run(_record(command, settings, found, place, timeout_s))
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(orjson.dumps(as_object(outcome)).decode() if as_json else as_text(outcome), err=True)
    raise typer.Exit(outcome.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a recorded command came to."""

    attempt: Attempt
    code: int
    folder: Path
    seconds: float
    in_process: bool

    @property
    def verify(self) -> str | None:
        """The command that checks the record; None where there is nothing that it could check."""
        if not self.attempt.steps or not self.in_process:
            return None
        return shlex.join(["penstock", "verify", str(self.folder), "--channel", self.attempt.rollout.channel])


async def _record(command: list[str], settings: "Settings", model: "ModelFiles", folder: Path, timeout_s: float | None) -> Outcome:
    pass
    from penstock.gateway.session import open_adhoc
    from penstock.gateway.standalone import open_gateway
    from penstock.http.listen import bind

    stop, started = asyncio.Event(), time.monotonic()
    secret, sock = secrets.token_bytes(32), bind(settings.gateway.host, settings.gateway.port)
    with Interrupts(stop, lambda: None) as interrupts:
        async with open_gateway(settings, model, folder=folder, secret=secret, sock=sock) as opened:
            rollout = await open_adhoc(opened.pool, task_id=shlex.join(command)[:200], sampling={})
            session = opened.gateway.open(rollout, settings.defaults())
            environment = os.environ | rollout_environment(session.base_url, session.token, session.rollout_id)
            try:
                ended = await run_command(command, environment, stop, timeout_s)
            except BaseException:
                await opened.pool.end(rollout.id, End.CANCELLED, "penstock was stopped")
                raise
            opened.gateway.close(rollout.id)
            end, message = ending(ended, interrupts.first)
            await opened.pool.end(rollout.id, end, message)
            attempt = await opened.pool.attempt(rollout.id)
    seconds = time.monotonic() - started
    code = TIMED_OUT if ended.late else ended.code
    return Outcome(attempt=attempt, code=code, folder=folder, seconds=seconds, in_process=settings.engine.in_process)


def ending(ended: "Ended", interrupt: int | None) -> tuple[End, str]:
    """How a rollout ends whose command ended like this."""
    code = ended.code
    if ended.late:
        return End.TIMEOUT, f"the command ran longer than --timeout allows, and was ended with exit code {code}"
    if interrupt is not None or code == 128 + signal.SIGINT:
        return End.CANCELLED, f"stopped by {signal.Signals(interrupt or signal.SIGINT).name}"
    return (End.COMPLETED, "") if code == 0 else (End.AGENT_ERROR, f"the command ended with exit code {code}")


def as_object(outcome: Outcome) -> dict[str, Any]:
    from penstock.train.sequences import breaks, exactness

    attempt, exact = outcome.attempt, exactness(outcome.attempt)
    return {
        "rollout_id": attempt.rollout.id,
        "end": attempt.end,
        "message": attempt.message,
        "exit_code": outcome.code,
        "calls": len({step.answer for step in attempt.steps}),
        "steps": len(attempt.steps),
        "sampled_tokens": exact.sampled_tokens,
        "exact_tokens": exact.exact_tokens,
        "exact_token_rate": exact.rate,
        "breaks": dict(breaks(attempt)),
        "seconds": round(outcome.seconds, 3),
        "folder": str(outcome.folder),
        "channel": attempt.rollout.channel,
        "next": outcome.verify,
    }


def as_text(outcome: Outcome) -> str:
    told = as_object(outcome)
    rows = [("calls", f"{told['calls']:,} in {clock(outcome.seconds)}, ended as {told['end']}")]
    rows.append(("exact", f"{percent(told['exact_token_rate'])} of {told['sampled_tokens']:,} sampled tokens"))
    rows += [("breaks", counts(told["breaks"]))] if told["breaks"] else []
    rows.append(("record", f"{told['folder']} (rollout {told['rollout_id']})"))
    rows += [("next", told["next"])] if told["next"] else []
    return "\n".join(["", *(f"  {label:<12}{text}" for label, text in rows), ""])
