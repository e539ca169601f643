"""`penstock model`: pull a model, list those that are here and those that runs have trained, have one served."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.output import AsJson, Plain, check_format, labelled_lines, local_time, print_result, stage_progress

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
    """List the models that are here, the built-in ones that can be pulled, and those that submitted runs have trained."""
    from penstock.models import find_cached, list_cached
    from penstock.models.pull import BUILT_IN

    check_format(as_json=as_json, plain=plain)
    here = [_row(model.name, model) for model in list_cached()]
    absent = [_row(name, None) for name in BUILT_IN if find_cached(name) is None]
    trained = _trained()
    if as_json:
        print_result({"models": here + absent, **({} if trained is None else {"trained": trained})}, "", as_json=True)
        return
    for row in here + absent:
        typer.echo(f"{row['name']}\t{row['bytes'] or ''}\t{row['path'] or ''}" if plain else _line(row))
    for row in trained or []:
        typer.echo("\t".join(map(str, _trained_cells(row))) if plain else _trained_line(row))
    if absent and not plain:
        typer.echo(f"next: penstock model pull {absent[0]['name']}", err=True)


@app.command("info")
def details(name: Name, as_json: AsJson = False) -> None:
    """Tell of one model: where it is, or which run has trained it and whether it is served."""
    from penstock.cli.connection import connect
    from penstock.models import list_cached

    local = next((model for model in list_cached() if model.name == name), None)
    if local is not None:
        row = _row(name, local)
        print_result(row, labelled_lines(row.items()), as_json=as_json)
        return
    record = connect().model(name)
    served = record.get("inference_model")
    following = f"penstock model undeploy {name}" if served else f"penstock model deploy {name}"
    shown = [(key.replace("_", " "), value) for key, value in record.items() if key != "is_internal_user"]
    print_result(record, f"{labelled_lines(shown)}\n\n  next  {following}", as_json=as_json)


@app.command()
def deploy(
    name: Name,
    engine: Annotated[str | None, typer.Option(help="What serves it: embedded, or vllm where that is installed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Have the controller serve a trained model behind an OpenAI-compatible address."""
    from penstock.cli.connection import connect

    client = connect()
    with stage_progress() as progress:
        progress(f"loading {name}")
        record = client.deploy(name, engine=engine)
    print_result(record, f"Model {name} is {record.get('status')}.\n\n  next  penstock model info {name}", as_json=as_json)


@app.command()
def undeploy(name: Name, as_json: AsJson = False) -> None:
    """Serve a model no longer; it stays."""
    from penstock.cli.connection import connect

    record = connect().undeploy(name)
    print_result(record, f"Model {name} is {record.get('status')}.\n\n  next  penstock model deploy {name}", as_json=as_json)


def _trained() -> list[dict[str, Any]] | None:
    """Models that runs have trained; None if no controller serves: a list starts none."""
    from penstock.controller.client import PAGE_ROWS, ControllerClient, all_rows
    from penstock.controller.home import default_home
    from penstock.controller.local import find_running, named_controller

    home = default_home()
    client = named_controller()
    if client is None:
        address = find_running(home) if home.path.is_dir() else None
        client = ControllerClient(address.url, home.token()) if address else None
    if client is None:
        return None
    known = client
    return list(all_rows(lambda offset: known.models("lora", limit=PAGE_ROWS, offset=offset), "models"))


def _trained_cells(row: dict[str, Any]) -> tuple[object, ...]:
    step = "" if row.get("checkpoint_step") is None else f"step {row['checkpoint_step']}"
    return (
        row.get("model_name"),
        row.get("deployment_status") or "",
        step,
        row.get("base_model") or "",
        local_time(row.get("created_at")),
    )


def _trained_line(row: dict[str, Any]) -> str:
    name, status, step, base, made = _trained_cells(row)
    return f"{name:<24} {step:>12}  {status:<8} of {base}, {made}".rstrip()


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
