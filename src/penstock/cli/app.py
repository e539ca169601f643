"""The `penstock` command: all its subcommands, exit codes, and errors as text or JSON.

A new command is a module of this folder and a line below. Other wheels add commands with an entry point of the group
`penstock.command`: a function `add_commands(root, groups)` that is called with the root and the groups of `GROUPS`. It may

- add a command to a group or to the root; one of the same name replaces the core's command, at its place in the help;
- fill a group that the core leaves empty (`rollout`, `dataset`), or add a group to `groups`.

Commands and groups with a `rich_help_panel` are shown under that title.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any, cast

import orjson
import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import (
    branch,
    compare,
    doctor,
    evaluate,
    gateway,
    grader,
    local_runs,
    models,
    pool,
    quickstart,
    sft,
    verify,
    view,
)
from penstock.cli import run as recording
from penstock.cli import train as training
from penstock.errors import ConfigError, ControllerError, Issue, PenstockError
from penstock.registry import Registry
from penstock.system.async_tools import INTERRUPTED, leave
from penstock.system.processes import relax_gc

HELP = ("-h", "--help")
PLUGINS = Registry("command", {})


class Interrupted(Exception):
    """Ctrl-C in a command that does not handle it. Typer would end silently for a KeyboardInterrupt."""


class SectionedGroup(TyperGroup):
    """A group whose help shows commands with a panel under its title, after the others."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as cause:
            raise Interrupted from cause

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[str]] = {"Commands": []}
        for name in self.list_commands(ctx):
            if not self.commands[name].hidden:
                sections.setdefault(getattr(self.commands[name], "rich_help_panel", None) or "Commands", []).append(name)
        limit = formatter.width - 6 - max(len(name) for names in sections.values() for name in names)
        for title, names in sections.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


class DefaultRunGroup(SectionedGroup):
    """A group whose `run` may be left out: `penstock train FILE.toml` is `penstock train run FILE.toml`.

    A file that is named like a command is written `./list`. Its help shows the options of `run` too.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in HELP and args[0] not in self.commands):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        run = self.commands["run"]
        records = [record for option in run.get_params(ctx) if (record := option.get_help_record(ctx)) is not None]
        with formatter.section("Options of a run here"):
            formatter.write_dl([record for record in records if not record[0].endswith("--help")])
        super().format_options(ctx, formatter)


app = typer.Typer(
    cls=SectionedGroup,
    context_settings={"help_option_names": list(HELP)},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("quickstart")(quickstart.quickstart)
train = typer.Typer(cls=DefaultRunGroup, help="Train the policy of an agent, here (penstock train [FILE.toml]) or by a controller.")
train.command("run")(training.train)
local_runs.add_run_commands(train, "train")
local_runs.add_run_commands(evaluate.app, "eval")
app.command("gateway")(gateway.gateway)
app.command("run", context_settings={"allow_interspersed_args": False})(recording.run)
app.command("compare")(compare.compare)
app.command("branch")(branch.branch)
app.command("report")(view.report)
app.command("view")(view.view)
app.command("verify")(verify.verify)
app.command("sft")(sft.sft)
app.command("doctor")(doctor.doctor)

GROUPS = {
    "template": quickstart.app,
    "train": train,
    "eval": evaluate.app,
    "rollout": typer.Typer(help="Agents of a workspace, and an agent behind HTTP.", no_args_is_help=True),
    "grader": grader.app,
    "pool": pool.app,
    "dataset": typer.Typer(help="Task files: check them, keep them with a controller, fetch them.", no_args_is_help=True),
    "model": models.app,
}
"""In the order of the help. A group without commands is left out."""
for plugin in sorted(PLUGINS):
    PLUGINS.load(plugin)(app, GROUPS)
for name, group in GROUPS.items():
    if group.registered_commands:
        kind = DefaultRunGroup if name == "train" else SectionedGroup
        app.add_typer(group, name=name, cls=kind, rich_help_panel=group.rich_help_panel)
app.add_typer(models.app, name="models", hidden=True)

MAP = """Penstock makes any agent trainable. What to do first:

  penstock doctor                 can this machine train?
  penstock quickstart FOLDER      write a project that runs as it is; then, in that folder:
  penstock eval run               measure its agent
  penstock train                  improve the policy
  penstock view                   look at it in a browser (--demo: at a recorded run)

  penstock run -- COMMAND         record the model calls of any program
  penstock template list          other projects to begin with
  penstock --install-completion   complete commands with the tab key (bash, zsh, fish)

penstock -h lists all commands, penstock COMMAND -h the options of one."""
"""What `penstock` alone prints."""
BUSY = 429
"""The HTTP status of a controller that will accept the request later."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read; it exports this child of it only."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Make any agent trainable: run it over tasks, record every token, grade, improve the policy.

    Results go to stdout, progress and errors to stderr; --json on any command prints one JSON object instead of text.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 trained without learning anything, 4 stopped by an alarm, 130 stopped by Ctrl-C.
    """
    if context.invoked_subcommand is None:
        typer.echo(MAP)


def main() -> None:
    relax_gc()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]  # model text may not fit the terminal
    leave(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    as_json = "--json" in takewhile(lambda argument: argument != "--", arguments)
    return exit_code(lambda: app(arguments, prog_name="penstock", standalone_mode=False), as_json=as_json)


def exit_code(command: Callable[[], Any], *, as_json: bool = False) -> int:
    """Run a command and return its exit code. A bug in penstock is not caught: it shows its traceback."""
    try:
        code = command()
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:  # Ctrl-C at a question
        return _report_interrupt("nothing was done", as_json=as_json)
    except Interrupted:
        return _report_interrupt("stopped by Ctrl-C", as_json=as_json)
    except PenstockError as error:
        return _report_error(error, as_json=as_json)
    except ExceptionGroup as group:
        ours, others = group.split(PenstockError)
        if others or not ours:
            raise
        return _report_error(_first(ours), as_json=as_json)
    except UsageError as error:
        return _report_usage(f"{error.format_message()}", as_json=as_json)  # pyright: ignore[reportAttributeAccessIssue]
    return code if isinstance(code, int) else 0


def _report_error(error: PenstockError, *, as_json: bool) -> int:
    if isinstance(error, ControllerError):
        bad_input = error.status is not None and 400 <= error.status < 500 and error.status != BUSY
        return _print_error(
            str(error), code=error.code, as_json=as_json, exit_code=2 if bad_input else 1, issues=_controller_issues(error)
        )
    issues = error.issues if isinstance(error, ConfigError) else ()
    return _print_error(
        str(error), code=_code(error), as_json=as_json, exit_code=2 if isinstance(error, ConfigError) else 1, issues=issues
    )


def _controller_issues(error: ControllerError) -> list[Issue]:
    """The issues that a controller found, one by one."""
    issues = cast("list[Any]", error.details.get("issues") or [])
    return [_issue(cast("dict[str, Any]", each)) if isinstance(each, dict) else Issue("", str(each)) for each in issues]


def _issue(fields: dict[str, Any]) -> Issue:
    return Issue(str(fields.get("key", "")), str(fields.get("message", "")), fields.get("key_correction"))


def _report_usage(message: str, *, as_json: bool) -> int:
    if message.startswith("Usage:"):  # a group of commands without one: its help
        if as_json:
            return _print_error("a command is missing; see penstock --help", code="usage", as_json=True, exit_code=2)
        typer.echo(message, err=True)
        return 2
    see = "See" if message.endswith("?") else "see"
    text = f"{message.rstrip('.')}{' ' if see == 'See' else '; '}{see} penstock --help"
    return _print_error(text, code="usage", as_json=as_json, exit_code=2)


def _report_interrupt(message: str, *, as_json: bool) -> int:
    if not as_json:
        typer.echo("", err=True)  # after the terminal's ^C
    return _print_error(message, code="interrupted", as_json=as_json, exit_code=INTERRUPTED)


def _first(group: ExceptionGroup[PenstockError]) -> PenstockError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


def _print_error(message: str, *, code: str, as_json: bool, exit_code: int, issues: Sequence[Issue] = ()) -> int:
    several = len(issues) > 1
    text = message.split("\n", 1)[0] if several else message  # the other lines are the issues
    line = " ".join(part.strip() for part in text.splitlines())
    if as_json:
        details = {"issues": [issue._asdict() for issue in issues]} if issues else {}
        typer.echo(orjson.dumps({"error": {"code": code, "message": line, **details}}).decode(), err=True)
        return exit_code
    typer.echo(f"penstock: {line}", err=True)
    for issue in issues if several else ():
        where = "" if issue.key in issue.line else f"{issue.key}: "
        typer.echo(f"  {where}{issue.line}", err=True)
    return exit_code


def _code(error: PenstockError) -> str:
    name = type(error).__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
