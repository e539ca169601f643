"""`penstock quickstart` and `penstock template`: a project that evaluates and trains as it is written."""

from pathlib import Path
from typing import Annotated

import orjson
import typer

from penstock.cli.scaffold import TEMPLATES, find_template

app = typer.Typer(help="Projects to begin with.", no_args_is_help=True)

Force = Annotated[bool, typer.Option("--force", "-f", help="Write over files that are there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where the project is written.")] = Path(),
    template: Annotated[str, typer.Option(help="One that `penstock template list` names.")] = "plain",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a project that can be evaluated and trained as it is. What is there stays, unless --force is given."""
    _apply(template, folder, force=force, as_json=as_json)


@app.command("list")
def list_templates(as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False) -> None:
    """Name the templates."""
    templates = {name: find_template(name) for name in TEMPLATES}
    if as_json:
        listed = [{"name": name, "about": each.about, "workspace": each.workspace} for name, each in templates.items()]
        typer.echo(orjson.dumps({"templates": listed}).decode())
        return
    width = max(map(len, templates)) + 2
    for name, template in templates.items():
        typer.echo(f"  {name:<{width}}{template.about}")
    typer.echo(f"\n  {'next':<{width}}penstock template apply NAME FOLDER")


@app.command("apply")
def apply(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    folder: Annotated[Path, typer.Argument(help="Where the project is written.")] = Path(),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a template's project. What is there stays, unless --force is given."""
    _apply(name, folder, force=force, as_json=as_json)


def _apply(name: str, folder: Path, *, force: bool, as_json: bool) -> None:
    template = find_template(name)
    written = template.write(folder, force=force)
    following = [*([] if folder == Path() else [f"cd {folder}"]), *template.next_commands]
    if as_json:
        typer.echo(orjson.dumps({"folder": str(folder), "files": [str(path) for path in written], "next": following}).decode())
        return
    typer.echo(f"Wrote {template.about}:\n\n  " + "\n  ".join(map(str, written)) + "\n\nNext:\n\n  " + "\n  ".join(following))
