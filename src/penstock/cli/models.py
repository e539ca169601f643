"""`penstock models`: pull a model, list those that are here."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from penstock.models import ModelFolder, Progress

app = typer.Typer(no_args_is_help=True, help="Pull models, and list those that are here.")


@app.command()
def pull(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="smollm2-135m, tiny, hf:ORG/NAME[@REV], or the path of a folder or .gguf file.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the model as JSON.")] = False,
) -> None:
    """Fetch a model, convert it if need be, and keep it; one that is here already needs no network."""
    from penstock.models import resolve

    with pull_progress() as progress:
        model = resolve(reference, progress)
    if as_json:
        typer.echo(orjson.dumps(_row(model.name, model)))
        return
    typer.echo(_line(_row(model.name, model)))
    typer.echo(f'next: set name = "{reference}" under [model] in a config file, then penstock train FILE.toml', err=True)


@app.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print the models as JSON.")] = False) -> None:
    """List the models that are here, and the built-in ones that can be pulled."""
    from penstock.models import cached, kept
    from penstock.models.references import BUILT_IN

    here = [_row(model.name, model) for model in kept()]
    absent = [_row(name, None) for name in BUILT_IN if cached(name) is None]
    if as_json:
        typer.echo(orjson.dumps({"models": here + absent}))
        return
    for row in here + absent:
        typer.echo(_line(row))
    if absent:
        typer.echo(f"next: penstock models pull {absent[0]['name']}", err=True)


@contextmanager
def pull_progress() -> "Generator[Progress]":
    """Shows a pull on stderr: a bar on a terminal, elsewhere one line for each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True, highlight=False)
    if not console.is_interactive or console.is_dumb_terminal:
        yield _StageLines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        yield _StageBars(bars)


class _StageLines:
    def __init__(self, console: Any) -> None:
        self._console, self._stage = console, ""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        if stage != self._stage:
            self._stage = stage
            self._console.print(stage, markup=False, soft_wrap=True)


class _StageBars:
    """One bar, begun again at each stage; without a total it only shows that something moves."""

    def __init__(self, bars: Any) -> None:
        self._bars, self._stage, self._bar = bars, "", None

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        if stage != self._stage:
            if self._bar is not None:
                self._bars.remove_task(self._bar)
            self._stage, self._bar = stage, self._bars.add_task(stage, total=total)
        self._bars.update(self._bar, completed=done, total=total)


def _row(name: str, model: "ModelFolder | None") -> dict[str, Any]:
    from penstock.config import ModelSection

    return {
        "name": name,
        "bytes": model.size_bytes if model else None,
        "path": str(model.path) if model else None,
        "default": name == ModelSection().name,
    }


def _line(row: dict[str, Any]) -> str:
    size = f"{row['bytes'] / 1e6:,.1f} MB" if row["path"] else "not pulled"
    default = "default" if row["default"] else ""
    return f"{row['name']:<24} {size:>12}  {default:<8} {row['path'] or ''}".rstrip()
