"""`penstock model`: pull models, list those that are here, merge adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.output import AsJson, Plain, check_format, labelled_lines, print_result, stage_progress
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.models import ModelFolder

app = typer.Typer(no_args_is_help=True, help="Pull models, list them, and have trained ones served.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of a model that `penstock model list` names.")]


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


@app.command()
def merge(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder, whose newest checkpoint is taken, or a checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make; it must not exist yet.")],
    base: Annotated[Path | None, typer.Option(help="The base model, if it is not where the adapter says.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a plain model folder of a LoRA adapter and its base. A policy is served more exactly by the two: see what is said."""
    from penstock.engines.checkpoint_files import find_adapter
    from penstock.engines.embedded.lora import merge_adapter

    adapter = find_adapter(source)
    with stage_progress() as progress:
        progress(f"merging {adapter}")
        merged = merge_adapter(adapter, out, base=base)
    kept = f"rounding has left {merged.kept:.2%} of what the adapter adds, and moves a weight by at most {merged.largest:.1e}"
    text = f"{out}: weights of {merged.dtype}; {kept}"
    text += f'\n\n  next  set name = "{out}" under [model] in a config file'
    print_result({"adapter": str(adapter), "model": str(out), **merged._asdict()}, text, as_json=as_json)


@app.command("list")
def list_models(plain: Plain = False, as_json: AsJson = False) -> None:
    """List the models that are here, and the built-in ones that can be pulled."""
    check_format(as_json=as_json, plain=plain)
    if as_json:
        print_result({"models": known_models()}, "", as_json=True)
    else:
        print_models([], plain=plain)


@app.command("info")
def details(name: Name, as_json: AsJson = False) -> None:
    """Print where a model is."""
    row = find_model(name)
    if row is None:
        raise ConfigError(f"no model {name!r} is here; see: penstock model list")
    print_result(row, labelled_lines(row.items()), as_json=as_json)


def find_model(name: str) -> dict[str, Any] | None:
    """Returns the model that was pulled under this name, or None."""
    from penstock.models import list_cached

    return next((_row(name, model) for model in list_cached() if model.name == name), None)


def known_models() -> list[dict[str, Any]]:
    """Returns the models that are here, then the built-in ones that are not."""
    from penstock.models import find_cached, list_cached
    from penstock.models.pull import BUILT_IN

    here = [_row(model.name, model) for model in list_cached()]
    return here + [_row(name, None) for name in BUILT_IN if find_cached(name) is None]


def print_models(more: Sequence[str], *, plain: bool) -> None:
    """Prints the known models, `more` lines, and what to pull next."""
    rows = known_models()
    for row in rows:
        typer.echo(f"{row['name']}\t{row['bytes'] or ''}\t{row['path'] or ''}" if plain else _line(row))
    for line in more:
        typer.echo(line)
    absent = [row["name"] for row in rows if row["path"] is None]
    if absent and not plain:
        typer.echo(f"next: penstock model pull {absent[0]}", err=True)


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
