"""`penstock train`: train a policy here, with a live view, a safe stop and a summary."""

import contextlib
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import dry_run
from penstock.cli.output import PLAIN, check_format, warn
from penstock.config import CONFIG_FILE
from penstock.errors import PenstockError
from penstock.system.async_tools import INTERRUPTED
from penstock.train.monitoring import NOTHING_LEARNED
from penstock.view.summary import ResumeCommand, TrainingResult, as_lines, as_object, as_text, learned_nothing

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.train.trainer import Summary
    from penstock.view.live import LiveView


CONTROL = "-control"
"""At the end of a control's name."""
ALARMED = 4
"""The exit code of a run that an alarm stopped."""


def train(
    file: Annotated[Path, typer.Argument(metavar="[FILE.toml]", help="The run's config file.")] = Path(CONFIG_FILE),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; keeps an existing run under another name.")] = False,
    allow_code_change: Annotated[
        bool, typer.Option("--allow-code-change", help="Resume although the agent or grader was edited; marks the change.")
    ] = False,
    control: Annotated[
        bool, typer.Option("--control", help="Run the control instead: the same with a learning rate of 0, as NAME-control.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help=PLAIN)] = False,
    dry: dry_run.Option = False,
) -> None:
    """Train the policy of an agent, or resume a run that stopped.

    Ctrl-C once stops after the running step, or sooner if its rollouts take long (exit code 130); run the same command to resume.
    """
    from penstock.run.inputs import load_run_config

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
    from penstock import api
    from penstock.view.live import LiveView, RunState

    view = LiveView(RunState(rollouts_per_step=config.rollout.group_size * config.rollout.groups_per_step), plain=plain)
    try:
        # what the author's code prints is not a result: it goes to stderr, like progress
        with contextlib.redirect_stdout(sys.stderr):
            summary = api.train(config=config, progress=view, fresh=fresh, allow_code_change=allow_code_change)
    except KeyboardInterrupt:
        warn(f"quit; to resume: {resume.command}")
        raise typer.Exit(INTERRUPTED) from None
    _print_summary(summary, view, resume, as_json=as_json, plain=plain)
    if summary.status == "stopped":
        raise typer.Exit(ALARMED if summary.stopped_by else INTERRUPTED)
    if learned_nothing(summary):
        raise typer.Exit(NOTHING_LEARNED)


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
        return write_report(folder)
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
