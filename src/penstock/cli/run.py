"""`penstock run`: a command whose model calls are recorded as one rollout.

The command has its own process group, which is ended as a whole, and the terminal while it runs.
"""

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
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_args

import orjson
import typer

from penstock.cli.gateway import Engine, Model, Overrides, Urls, get_model, make_settings
from penstock.cli.output import warn
from penstock.config import home_folder
from penstock.errors import ConfigError
from penstock.records import End, Rollout
from penstock.sdk.environment import rollout_environment
from penstock.system.async_tools import INTERRUPTED, Interrupts
from penstock.system.processes import end_group, signal_group
from penstock.system.sandbox import Confinement, Sandbox, SandboxWish, choose_sandbox
from penstock.view.formatting import aligned, clock, counts, percent

if TYPE_CHECKING:
    from penstock.gateway.standalone import ModelFiles, Settings


STDIN = 0
GRACE_S = 5.0
"""For the group to end after SIGTERM; then it is killed."""
NO_CALL = (
    "no call reached the gateway: the command must take its base URL and key from OPENAI_BASE_URL and OPENAI_API_KEY, or "
    "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which are set for it; the packages of both do so unless base_url is passed, and "
    "another client needs base_url=os.environ['OPENAI_BASE_URL']"
)
TIMED_OUT = 124
"""The exit code for a command that --timeout ended, as with `timeout`."""


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
    sandbox: Annotated[
        str, typer.Option(metavar="NAME", help="Keeps its own record and penstock's keys from it: bubblewrap, user, off; or auto.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Sum up as JSON, on stderr: stdout is the command's.")] = False,
) -> None:
    """Run a command with its model calls sent here, and record them as one rollout.

    It finds the model by OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. Its exit code is ours;
    124 where --timeout ended it.
    """
    from penstock.gateway.standalone import make_folder

    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: no such command; write it as you would without `penstock run --`")
    chosen = _choose_sandbox(sandbox)
    settings = make_settings(engine, model, url or [], overrides or [], {})
    place = folder or Path("runs") / time.strftime("recorded-%Y%m%d-%H%M%S")
    found = get_model(settings)
    make_folder(place, settings, found)
    if not chosen.isolates and sandbox != "off" and not as_json:
        warn(f"the command runs without a sandbox and can change its own record ({chosen.reason})")
    try:
        recorded = asyncio.run(_record(command, settings, found, place, timeout_s, _confine(chosen, place)))
    except asyncio.CancelledError:
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(orjson.dumps(as_object(recorded)).decode() if as_json else as_text(recorded), err=True)
    raise typer.Exit(recorded.code)


def _choose_sandbox(wish: str) -> Sandbox:
    known = get_args(SandboxWish)
    if wish not in known:
        raise ConfigError(f"--sandbox {wish}: there is no such one; choose {', '.join(known)}")
    return choose_sandbox(cast("SandboxWish", wish), needs=[Path.cwd()], auto=("bubblewrap",))


def _confine(sandbox: Sandbox, folder: Path) -> Confinement:
    here, place = Path.cwd(), folder.resolve()
    return Confinement(sandbox=sandbox, hidden=(place, home_folder()), visible=(here,) if here.is_relative_to(place) else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCommand:
    attempt: Rollout
    code: int
    folder: Path
    seconds: float
    in_process: bool
    notices: Mapping[str, int]
    """What was not done as the command asked, by name."""

    @property
    def verify(self) -> str | None:
        """The command that checks the record; None if there is nothing to check."""
        if not self.attempt.steps or not self.in_process:
            return None
        return shlex.join(["penstock", "verify", str(self.folder), "--channel", self.attempt.ref.channel])


async def _record(
    command: list[str],
    settings: "Settings",
    model: "ModelFiles",
    folder: Path,
    timeout_s: float | None,
    confinement: Confinement,
) -> RecordedCommand:
    from penstock.gateway.auth import Access
    from penstock.gateway.session import open_adhoc
    from penstock.gateway.standalone import open_gateway
    from penstock.http.listen import bind

    stop, started = asyncio.Event(), time.monotonic()
    secret, sock = secrets.token_bytes(32), bind(settings.gateway.host, settings.gateway.port)
    with Interrupts(stop, lambda: None) as interrupts:
        closed = (Access.CONTROL, Access.FLOW)  # nobody has such a token, and a command must not grade itself
        async with open_gateway(settings, model, folder=folder, secret=secret, sock=sock, closed=closed) as opened:
            rollout = await open_adhoc(opened.pool, task_id=shlex.join(command)[:200], sampling={})
            session = opened.gateway.open(rollout, settings.defaults())
            environment = os.environ | rollout_environment(session.base_url, session.token, session.rollout_id)
            try:
                confined = confinement.command(command)
                ended = await run_command(confined.argv, environment, stop, timeout_s, **confined.options)
            except BaseException:
                await opened.pool.end(rollout.id, End.CANCELLED, "penstock was stopped")
                raise
            opened.gateway.close(rollout.id)
            end, message = rollout_end(ended, interrupts.first)
            await opened.pool.end(rollout.id, end, message)
            attempt = await opened.pool.rollout(rollout.id)
    seconds = time.monotonic() - started
    code = TIMED_OUT if ended.timed_out else ended.code
    return RecordedCommand(
        attempt=attempt,
        code=code,
        folder=folder,
        seconds=seconds,
        in_process=settings.engine.in_process,
        notices=opened.gateway.counts,
    )


# The command and its terminal


class CommandExit(NamedTuple):
    code: int
    """Its exit code; 128 plus the signal's number if a signal ended it."""
    timed_out: bool = False


async def run_command(
    command: Sequence[str], environment: Mapping[str, str], stop: asyncio.Event, timeout_s: float | None = None, **options: Any
) -> CommandExit:
    """Run the command to its end; `stop` or `timeout_s` ends the whole group. If `stop` is set already, nothing is started."""
    if stop.is_set():
        return CommandExit(128 + signal.SIGINT)
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment), process_group=0, **options)
    timed_out = False
    try:
        with _in_foreground(process.pid):
            over, stopped = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.wait())
            try:
                ended, _ = await asyncio.wait({over, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                timed_out = not ended
                if not over.done():
                    await end_group(process, GRACE_S)
            finally:
                stopped.cancel()
    finally:
        if process.returncode is None or stop.is_set():
            signal_group(process.pid, signal.SIGKILL)
    code = await process.wait()
    return CommandExit(code if code >= 0 else 128 - code, timed_out)


@contextmanager
def _in_foreground(group: int) -> Generator[None]:
    """Make `group` the foreground group of the terminal, if we are that: it can read, and Ctrl-C goes to it."""
    ours = os.getpgrp()
    if not _is_foreground(ours):
        yield
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # sent to background groups that call tcsetpgrp, as we do below
    try:
        with suppress(OSError):
            os.tcsetpgrp(STDIN, group)
            os.killpg(group, signal.SIGCONT)  # it was stopped if it tried to read before
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


def rollout_end(ended: CommandExit, interrupt: int | None) -> tuple[End, str]:
    """The end of the rollout, with a message."""
    code = ended.code
    if ended.timed_out:
        return End.TIMEOUT, f"the command ran longer than --timeout allows, and was ended with exit code {code}"
    if interrupt is not None or code == 128 + signal.SIGINT:
        return End.CANCELLED, f"stopped by {signal.Signals(interrupt or signal.SIGINT).name}"
    return (End.COMPLETED, "") if code == 0 else (End.AGENT_ERROR, f"the command ended with exit code {code}")


# The result


def as_object(recorded: RecordedCommand) -> dict[str, Any]:
    from penstock.train.sequences import breaks, exactness

    attempt, exact = recorded.attempt, exactness(recorded.attempt)
    return {
        "rollout_id": attempt.ref.id,
        "end": attempt.end,
        "message": attempt.message,
        "exit_code": recorded.code,
        "calls": len({step.answer for step in attempt.steps}),
        "steps": len(attempt.steps),
        "sampled_tokens": exact.sampled_tokens,
        "exact_tokens": exact.exact_tokens,
        "exact_token_rate": exact.rate,
        **_reported_usage(attempt),
        "breaks": dict(breaks(attempt)),
        "notices": dict(sorted(recorded.notices.items())),
        "seconds": round(recorded.seconds, 3),
        "folder": str(recorded.folder),
        "channel": attempt.ref.channel,
        "next": recorded.verify,
        **({} if attempt.steps else {"hint": NO_CALL}),
    }


def _reported_usage(attempt: Rollout) -> dict[str, Any]:
    """The token counts that an endpoint reported; nothing of an engine, whose tokens are counted here."""
    reported = [step.usage for step in attempt.steps if step.usage is not None]
    if not reported:
        return {}
    prompt, completion = (sum(getattr(usage, name) for usage in reported) for name in ("prompt_tokens", "completion_tokens"))
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def as_text(recorded: RecordedCommand) -> str:
    fields = as_object(recorded)
    rows = [("calls", f"{fields['calls']:,} in {clock(recorded.seconds)}, ended as {fields['end']}")]
    if usage := fields.get("usage"):
        sampled, prompts = usage["completion_tokens"], usage["prompt_tokens"]
        rows.append(("usage", f"{sampled:,} sampled tokens after prompts of {prompts:,}, as the endpoint reported"))
    else:
        rows.append(("exact", f"{percent(fields['exact_token_rate'])} of {fields['sampled_tokens']:,} sampled tokens"))
    rows += [("", line) for line in wrap(fields.get("hint", ""), 66)]
    rows += [("breaks", counts(fields["breaks"]))] if fields["breaks"] else []
    rows += [("not done", line) for line in wrap(counts(fields["notices"]), 66)]
    rows.append(("record", f"{fields['folder']} (rollout {fields['rollout_id']})"))
    rows += [("next", fields["next"])] if fields["next"] else []
    return f"\n{aligned(rows)}\n"
