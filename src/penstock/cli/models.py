"""`penstock models`: pull a model, list those that are here."""

from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.progress import stage_progress

if TYPE_CHECKING:
    from penstock.models import ModelFolder

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

    with stage_progress() as progress:
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
