"""`penstock train`: train a policy here, with a live view, a safe stop and a summary."""

import asyncio
import contextlib
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import dry_run
from penstock.cli.interrupts import INTERRUPTED, TERMINATE_S, Interrupts
from penstock.cli.output import PLAIN, check_format, warn
from penstock.cli.summary import ResumeCommand, TrainingResult, as_lines, as_object, as_text, learned_nothing
from penstock.errors import PenstockError
from penstock.train.stalled import NOTHING_LEARNED
from penstock.workspace.scaffold import CONFIG_FILE

if TYPE_CHECKING:
    from penstock.cli.live import LiveView
    from penstock.config import RunConfig
    from penstock.run.inputs import Inputs
    from penstock.train.summary import Summary


CONTROL = "-control"
"""At the end of a control's name."""
ALARMED = 4
"""The exit code of a run that an alarm stopped."""


def train(
    file: Annotated[Path, typer.Argument(metavar="[FILE.toml]", help="The run's config file.")] = Path(CONFIG_FILE),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; a run of the same name is kept aside.")] = False,
    allow_code_change: Annotated[
        bool, typer.Option("--allow-code-change", help="Go on though the agent or grader was edited; the change is marked.")
    ] = False,
    control: Annotated[
        bool, typer.Option("--control", help="Run the control instead: the same with a learning rate of 0, as NAME-control.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help=PLAIN)] = False,
    dry: dry_run.Option = False,
) -> None:
    """Train the policy of an agent, or take up a run where it stopped.

    Ctrl-C once stops after the running step, or sooner if its rollouts take long (exit code 130); the same command then goes on.
    """
    from penstock.workspace.opening import load_run_config

    check_format(as_json=as_json, plain=plain)
    config = load_run_config(file, overrides or (), "train", warn=warn)
    if control:
        config = as_control(config)
        control_of = _folder(config).removesuffix(CONTROL)
        warn(f"this is the control of {control_of}: the same tasks, seed and steps, nothing learned")
        warn(f"when both are done: penstock compare {_folder(config)} {control_of}")
    resume = ResumeCommand(
        _command("train", file, overrides or [], control=control),
        evaluate=_command("eval run", file, overrides or []),
        attack=_command("grader attack", file, overrides or []),
    )
    if dry:
        dry_run.try_once(config, "train", as_json=as_json, following=resume.command)
    run_training(config, resume, fresh=fresh, as_json=as_json, plain=plain, allow_code_change=allow_code_change)


def as_control(config: "RunConfig") -> "RunConfig":
    """The same run with a learning rate of 0: what its curve does by chance, on the tasks that the run draws."""
    run = config.run.model_copy(update={"name": f"{config.run.name}{CONTROL}"})
    policies = {name: section.model_copy(update={"lr": 0.0}) for name, section in config.policies.items()}
    return config.model_copy(update={"run": run, "train": config.train.model_copy(update={"lr": 0.0}), "policies": policies})


def _folder(config: "RunConfig") -> str:
    return str(config.run.folder / config.run.name)


def run_training(
    config: "RunConfig",
    resume: ResumeCommand,
    *,
    fresh: bool = False,
    as_json: bool = False,
    plain: bool = False,
    allow_code_change: bool = False,
) -> None:
    """Train, show the progress, and print the summary."""
    from penstock.cli.live import LiveView, RunState
    from penstock.run.grader_attack import warn_of_holes
    from penstock.run.inputs import read_inputs
    from penstock.train.algorithm import check_algorithm

    view = LiveView(RunState(rollouts_per_step=config.rollout.group_size * config.rollout.groups_per_step), plain=plain)
    try:
        # what the author's code prints is not a result: it goes to stderr, like progress
        with contextlib.redirect_stdout(sys.stderr), view:
            inputs = read_inputs(config, view, check=check_algorithm)
            warn_of_holes(config, inputs, view, see=resume.attack or "penstock grader attack")
            summary = asyncio.run(_train(config, inputs, view, fresh=fresh, allow_code_change=allow_code_change))
    except asyncio.CancelledError:
        warn(f"quit; to go on: {resume.command}")
        raise typer.Exit(INTERRUPTED) from None
    _print_summary(summary, view, resume, as_json=as_json, plain=plain)
    if summary.status == "stopped":
        raise typer.Exit(ALARMED if summary.stopped_by else INTERRUPTED)
    if learned_nothing(summary):
        raise typer.Exit(NOTHING_LEARNED)


async def _train(config: "RunConfig", inputs: "Inputs", view: "LiveView", **how: bool) -> "Summary":
    # torch is loaded here, after everything that can be refused without it
    if config.scale.name == "ray":
        from penstock.scale.run import train_on_ray as run
    else:
        from penstock.train.run import train as run

    stop = asyncio.Event()

    def announce_stop() -> None:
        when = "now" if view.state.evaluating else "after this step"
        view.notice(f"Stopping {when}. Ctrl-C again quits at once; both are safe, the same command goes on.")

    with Interrupts(stop, announce_stop, terminate_s=TERMINATE_S):
        return await run(config, inputs, listener=view, stop=stop, **how)


def _print_summary(summary: "Summary", view: "LiveView", resume: ResumeCommand, *, as_json: bool, plain: bool) -> None:
    result = TrainingResult(
        summary=summary,
        rewards=view.state.rewards,
        reasons=view.state.reasons,
        report=_write_report(Path(summary.folder)),
        resume=resume,
    )
    typer.echo(as_object(result) if as_json else as_lines(result) if plain else as_text(result))


def _write_report(folder: Path) -> Path | None:
    """Write the report and return its path; a report that cannot be written must not fail a run that was trained."""
    from penstock.view.export import write_report

    try:
        return asyncio.run(write_report(folder))
    except PenstockError as error:
        warn(f"no report: {error}; try: penstock report {folder}")
        return None


def _command(name: str, file: Path, overrides: list[str], *, control: bool = False) -> str:
    """A command with these settings, as it can be typed where this one was."""
    known = shutil.which("penstock")
    here = known is not None and Path(known).resolve() == Path(sys.argv[0]).resolve()
    program = "penstock" if here or not Path(sys.argv[0]).name.startswith("penstock") else sys.argv[0]
    settings = [word for override in overrides for word in ("--set", override)]
    return shlex.join([program, *name.split(), str(file), *settings, *(["--control"] if control else [])])
