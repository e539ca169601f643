"""`penstock quickstart` and `penstock template`: a project that evaluates and trains as it is written."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import orjson
import typer

from penstock.errors import ConfigError

FILE = "penstock.toml"
"""What `penstock train` and `penstock eval run` take where no file is named."""
HOME = Path(__file__).parent.parent / "templates"

app = typer.Typer(help="Projects to begin with.", no_args_is_help=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A project that is one of the examples."""

    about: str
    toml: str
    """Its config, under the examples; what it names lies beside it."""
    files: tuple[str, ...]
    extra: str = ""
    """What must be installed beside `penstock[local]`."""


TASKS = ("tasks.jsonl", "heldout.jsonl")
TEMPLATES = {
    "plain": Template(
        about="a two-turn agent that calls a tool, with a plain `openai` client",
        toml="multiply/train.toml",
        files=("agent.py", *TASKS),
    ),
    "tiny": Template(
        about="the same with a policy of half a million weights that is made here: learns in half a minute",
        toml="multiply/tiny.toml",
        files=("agent.py", "tiny_tasks.jsonl", "tiny_heldout.jsonl"),
    ),
    "strands": Template(
        about="the same agent written with Strands Agents",
        toml="multiply/strands.toml",
        files=("agent.py", "strands_agent.py", *TASKS),
        extra="strands",
    ),
    "openai-agents": Template(
        about="the same agent written with the OpenAI Agents SDK",
        toml="multiply/openai_agents.toml",
        files=("agent.py", "openai_agent.py", *TASKS),
        extra="openai-agents",
    ),
}


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where the project is written.")] = Path(),
    template: Annotated[str, typer.Option(help="One that `penstock template list` names.")] = "plain",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a project that can be evaluated and trained as it is. Nothing that is there is overwritten."""
    _tell(write_project(folder, template), folder, template, as_json=as_json)


@app.command("list")
def list_templates(as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False) -> None:
    """Name the templates."""
    if as_json:
        typer.echo(orjson.dumps({"templates": [{"name": name, "about": one.about} for name, one in TEMPLATES.items()]}).decode())
        return
    for name, one in TEMPLATES.items():
        typer.echo(f"  {name:<15}{one.about}")
    typer.echo("\n  next           penstock template apply NAME FOLDER")


@app.command("apply")
def apply(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    folder: Annotated[Path, typer.Argument(help="Where the project is written.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a template's project. Nothing that is there is overwritten."""
    _tell(write_project(folder, name), folder, name, as_json=as_json)


def write_project(folder: Path, name: str) -> list[Path]:
    """Copy the files of a template, all or none; ConfigError names what is in the way."""
    template = TEMPLATES.get(name)
    if template is None:
        raise ConfigError(f"there is no template {name!r}; there are {', '.join(TEMPLATES)}")
    source = HOME / Path(template.toml).parent
    copies = {folder / FILE: HOME / template.toml, **{folder / file: source / file for file in template.files}}
    if there := [path for path in copies if path.exists()]:
        raise ConfigError(f"{there[0]} is there already and stays; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, original in copies.items():
            text = original.read_text(encoding="utf-8")
            path.write_text(text.replace(f" examples/{template.toml}", ""), encoding="utf-8")  # it is named for what it is there
    except OSError as cause:
        for path in copies:
            with suppress(OSError):
                path.unlink()
        raise ConfigError(f"{folder}: the project cannot be written there: {cause.strerror}; give another folder") from cause
    return list(copies)


def _tell(written: list[Path], folder: Path, name: str, *, as_json: bool) -> None:
    into = [] if folder == Path() else [f"cd {folder}"]
    extra = TEMPLATES[name].extra
    install = [f'pip install "penstock[local,{extra}]"'] if extra else []
    following = [*into, *install, "penstock eval run", "penstock train"]
    if as_json:
        typer.echo(orjson.dumps({"folder": str(folder), "files": [str(path) for path in written], "next": following}).decode())
        return
    typer.echo(
        f"Wrote {TEMPLATES[name].about}:\n\n  " + "\n  ".join(map(str, written)) + "\n\nNext:\n\n  " + "\n  ".join(following)
    )
