"""Scaffolding: writes projects from templates, with code from the examples."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.config import CONFIG_FILE
from penstock.errors import ConfigError
from penstock.registry import Registry
from penstock.system.packages import install_command

EXAMPLES = Path(__file__).parent.parent / "templates"
"""The examples, as packaged with penstock."""
TASK_FILES = {"tasks.jsonl": "multiply/tasks.jsonl", "heldout.jsonl": "multiply/heldout.jsonl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A project in one folder with a `penstock.toml`."""

    about: str
    files: Callable[[], dict[str, str]]
    """Returns texts by path."""
    extra: str = ""
    """Extra whose packages it needs besides those of `local`."""
    workspace = False
    """Whether the project is a workspace, which has several rollouts and experiment files."""

    @property
    def next_commands(self) -> list[str]:
        """Returns the commands to run next, in that folder."""
        return [*([install_command(self.extra)] if self.extra else []), "penstock eval run", "penstock train"]

    def write(self, folder: Path, *, force: bool = False) -> list[Path]:
        """Writes all files or none; ConfigError if a file exists, unless `force`."""
        return write_files(folder, self.files(), force=force)


def read_example(path: str) -> str:
    return (EXAMPLES / path).read_text(encoding="utf-8")


def _folder_files(toml: str, *names: str, **others: str) -> Callable[[], dict[str, str]]:
    """Returns a function for the files of an example: its config, `names` next to it, and `others` from other examples."""

    def files() -> dict[str, str]:
        folder = Path(toml).parent
        config = (
            read_example(toml).replace(f" examples/{toml}", "").replace('"../multiply/', '"')
        )  # the project has all files in one folder
        return {
            CONFIG_FILE: config,
            **{name: read_example(f"{folder}/{name}") for name in names},
            **{name: read_example(example) for name, example in others.items()},
        }

    return files


PLAIN = Template(
    about="a two-turn agent that calls a tool, with a plain `openai` client",
    files=_folder_files("multiply/train.toml", "agent.py", *TASK_FILES),
)
TINY = Template(
    about="the same with a policy of half a million weights that is made here: learns in half a minute",
    files=_folder_files("multiply/tiny.toml", "agent.py", "tiny_tasks.jsonl", "tiny_heldout.jsonl"),
)
STRANDS = Template(
    about="the same agent written with Strands Agents",
    files=_folder_files("multiply/strands.toml", "agent.py", "strands_agent.py", *TASK_FILES),
    extra="strands",
)
OPENAI_AGENTS = Template(
    about="the same agent written with the OpenAI Agents SDK",
    files=_folder_files("multiply/openai_agents.toml", "agent.py", "openai_agent.py", *TASK_FILES),
    extra="openai-agents",
)
FLOW = Template(
    about="the same agent as a flow, in the style of Claw-R1", files=_folder_files("flow/train.toml", "flow.py", **TASK_FILES)
)
COMMAND = Template(
    about="the same agent as a separate program that knows nothing of penstock",
    files=_folder_files("command/train.toml", "program.py", "grader.py", **TASK_FILES),
)
TEAM = Template(
    about="a planner and an executor, each with its own policy on a model that is made here: both learn within a minute",
    files=_folder_files(
        "team/train.toml",
        "team.py",
        **{name: f"multiply/{name}" for name in ("tiny_tasks.jsonl", "tiny_heldout.jsonl")},
    ),
)

TEMPLATES = Registry(
    "template",
    {
        "plain": "penstock.cli.scaffold:PLAIN",
        "tiny": "penstock.cli.scaffold:TINY",
        "strands": "penstock.cli.scaffold:STRANDS",
        "openai-agents": "penstock.cli.scaffold:OPENAI_AGENTS",
        "flow": "penstock.cli.scaffold:FLOW",
        "command": "penstock.cli.scaffold:COMMAND",
        "team": "penstock.cli.scaffold:TEAM",
    },
)


def find_template(name: str) -> Template:
    """Returns the template; ConfigError lists those that exist."""
    if name not in TEMPLATES:
        raise ConfigError(f"there is no template {name!r}; there are {', '.join(TEMPLATES)}")
    return TEMPLATES.load(name)


def write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> list[Path]:
    """Writes all files or none; ConfigError if a file exists, unless `force`."""
    paths = {folder / path: text for path, text in files.items()}
    existing = [path for path in paths if path.exists()]
    if existing and not force:
        raise ConfigError(f"{existing[0]} is there already and stays; give another folder or name, or --force")
    new = {parent for path in paths for parent in path.parents if not parent.exists()}
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as cause:
        _undo_write([path for path in paths if path not in existing], new)
        raise ConfigError(f"{cause.filename or folder}: cannot be written: {cause.strerror}; give another folder") from cause
    return list(paths)


def _undo_write(files: Iterable[Path], folders: Iterable[Path]) -> None:
    """Removes what was written, as far as possible."""
    for path in files:
        with suppress(OSError):
            path.unlink()
    for path in sorted(folders, key=lambda folder: -len(folder.parts)):
        with suppress(OSError):
            path.rmdir()
