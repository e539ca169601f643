"""`penstock branch`: sample again from the middle of a recorded rollout, to see what each call was worth."""

import asyncio
import contextlib
import sys
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from penstock.cli.output import table_lines, warn
from penstock.errors import ConfigError
from penstock.system.async_tools import INTERRUPTED, TERMINATE_S, Interrupts
from penstock.view.formatting import aligned, counts, reward_text

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.evals.branch import BranchReport, RecordedRollout, StepValue
    from penstock.view.eval_view import EvalView


def branch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or an evaluation, for example runs/multiply.")],
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="As `penstock pool show RUN` lists them.")],
    step: Annotated[list[int] | None, typer.Option(min=0, help="The call to sample again; may be repeated.")] = None,
    all_steps: Annotated[bool, typer.Option("--all-steps", help="Every call, one after the other.")] = False,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Continuations from each.")] = 8,
    model: Annotated[
        str | None, typer.Option(help="The policy; by default the run's newest checkpoint, else the model that it began with.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Of the continuations; by default sampling.temperature.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the folder below runs/branches.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; branches of the same name are kept aside.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run an agent again from any call of a recorded rollout, and measure what the call was worth.

    The program is started again and gets the stored replies until it makes that call; later replies are sampled. Where a
    request differs from the record, the branch is void and the first differing byte is reported. Exit code 1 where all are void.
    """
    from penstock.evals.branch import branch_config, branch_steps, read_rollout
    from penstock.view.eval_view import EvalView

    if bool(step) == all_steps:
        raise ConfigError("name a call with --step K, or all of them with --all-steps")
    recorded = read_rollout(folder, rollout)
    steps = branch_steps(recorded.rollout, step or [])
    config = branch_config(recorded, count=number, name=name, model=model, temperature=temperature, overrides=overrides or [])
    view = EvalView(plain=as_json)
    try:
        with contextlib.redirect_stdout(sys.stderr), view:
            found = _branch(recorded, steps, config, view, fresh=fresh)
    except asyncio.CancelledError:
        warn("quit; run the same command to resume")
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(orjson.dumps(found.as_json()).decode() if as_json else as_text(found))
    if found.status == "stopped":
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(1 if found.all_void else 0)


def _branch(recorded: "RecordedRollout", steps: list[int], config: "RunConfig", view: "EvalView", *, fresh: bool) -> "BranchReport":
    from penstock.evals.branch import branch as make_branches
    from penstock.run.inputs import read_inputs

    inputs = read_inputs(config, view)

    async def work() -> "BranchReport":
        stop = asyncio.Event()
        with Interrupts(
            stop, lambda: view.notice("Stopping; what runs is made again by the same command."), terminate_s=TERMINATE_S
        ):
            return await make_branches(recorded, steps, config, inputs, listener=view, stop=stop, fresh=fresh)

    return asyncio.run(work())


def as_text(found: "BranchReport") -> str:
    rows = [("rollout", f"{found.rollout} of {found.run}, reward {reward_text(found.reward)}"), ("policy", found.model)]
    head = ("STEP", "VALUE", "95 %", "THE CALL ADDED", "CONTINUATIONS", "IT SAID")
    table = table_lines([head, *map(_row, found.steps)])
    problems = [f"  step {step.step}: {step.problem}" for step in found.steps if step.problem]
    following = [("kept in", found.folder), ("next", f"penstock pool show {found.folder} {found.steps[-1].group}")]
    return "\n".join(["", aligned(rows), "", *(f"  {line}" for line in table), *problems, "", aligned(following), ""])


def _row(step: "StepValue") -> tuple[str, ...]:
    value = "-" if step.value is None else f"{step.value.value:.3f}"
    interval = "-" if step.value is None else f"{step.value.low:.3f} to {step.value.high:.3f}"
    gain = "-" if step.gain is None else f"{step.gain:+.3f}"
    return str(step.step), value, interval, gain, counts(step.ends), shorten(step.said, 40, placeholder="…")
