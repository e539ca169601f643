"""Scaffolding: writes workspaces, rollouts and projects from templates, with code from the examples."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import ConfigError
from penstock.system.packages import install_command
from penstock.workspace.layout import DATASETS, EVALS, ROLLOUT_NAME, ROLLOUTS, TRAININGS, Workspace

EXAMPLES = Path(__file__).parent.parent / "templates"
"""The examples, as packaged with penstock."""
CONFIG_FILE = "penstock.toml"
"""Default config file of `penstock train` and `penstock eval run`."""
EXPERIMENT = """\
[experiment]
rollout = "{name}"            # folder under rollouts/
entrypoint = "main.py"
model_path = "smollm2-135m"   # or hf:ORG/NAME, a folder, a checkpoint{endpoints}
dataset = "{name}"            # data/{name}.jsonl, or one that was uploaded
"""
EVALUATION = """\
# Measures the rollout: penstock eval run configs/eval/{name}.toml

{experiment}
[evaluation]
limit = 32                    # rows, from the first on
n = 1                         # attempts at each
batch_size = 32               # rollouts at once
pass_threshold = 1.0

[secrets]
required = []                 # names of secrets that the agent needs in its environment

[advanced.sampling]           # any key of penstock's own config may stand under [advanced]
max_tokens = 40
"""
TRAINING = """\
# Trains the policy: penstock train configs/training/{name}.toml

{experiment}
[training]
lr = 2e-5
total_epochs = 1
n_samples_per_prompt = 8      # attempts at each row: they are compared with each other
rollout_batch_size = 4        # rows in each step
max_response_length = 40      # tokens of one reply

[sampling]
rollout_temperature = 1.0

[checkpoints]
checkpoint_save_freq = 4      # steps; each is 1.6 GB

[advanced.train]
steps = 8                     # in place of whole epochs: this is where it has learnt the tool
"""
PROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
{note}dependencies = [{packages}]
"""
PENSTOCK_NOTE = "# Penstock is not named: it is installed from a checkout; on the public index that name is another project's.\n"
PORTABLE_README = """\
# {name}

{about}. It runs as it is, with a small model that this machine runs by itself, and on the Osmosis platform:

```
osmosis eval submit {evals}/{name}.toml
osmosis train submit {trainings}/{name}.toml
python main.py                            # a rollout server on port $_OSMOSIS_ROLLOUT_PORT, else 8000
```

`main.py` holds the agent (one AgentWorkflow), how it is graded (one Grader) and the server's entry;
`../../{datasets}/{name}.jsonl` are the tasks. Change them into yours.
"""
README = """\
# {name}

{about}. It runs as it is, with a small model that this machine runs by itself:

```
penstock eval run {evals}/{name}.toml
penstock train {trainings}/{name}.toml
```

| file | what it holds |
|---|---|
| `main.py` | the agent (one AgentWorkflow) and how it is graded (one Grader) |
| `../../{evals}/{name}.toml` | how it is measured |
| `../../{trainings}/{name}.toml` | how it is trained |
| `../../{datasets}/{name}.jsonl` | the tasks: `user_prompt`, `ground_truth`; also `system_prompt` and `metadata` |

Change `main.py` and the tasks into yours. `--dry-run` checks everything and tries one rollout; `penstock eval submit` and
`penstock train submit` hand the same files to a controller.
"""
GITIGNORE = "runs/\n.penstock/\n__pycache__/\n.venv/\n"
PLAIN_CODE = {"main.py": "multiply/agent.py"}
PLAIN_ABOUT = "An agent that multiplies with a tool, written with a plain `openai` client"
TASK_FILES = {"tasks.jsonl": "multiply/tasks.jsonl", "heldout.jsonl": "multiply/heldout.jsonl"}


# Workspaces and rollouts.


def make_workspace(folder: Path) -> Workspace:
    """Makes `folder` a workspace; existing files stay."""
    create_missing_folders(folder)
    return Workspace(folder.resolve())


def missing_folders(folder: Path) -> list[str]:
    """Returns the folders that `folder` lacks to be a workspace."""
    return Workspace(folder).missing()


def create_missing_folders(folder: Path) -> list[str]:
    """Creates the missing folders and returns their names; ConfigError if one cannot be created."""
    created = missing_folders(folder)
    for name in created:
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
            if not any((folder / name).iterdir()):
                (folder / name / ".gitkeep").touch()  # git keeps no empty folders
        except OSError as cause:
            raise ConfigError(f"{folder / name}: cannot be made: {cause.strerror}; see what is there, and who may write") from cause
    return created


def init_rollout(workspace: Workspace, name: str, force: bool = False, *, portable: bool = False) -> list[Path]:
    """Writes rollouts/NAME, its experiment files and its dataset; returns the paths. `force` overwrites all but the dataset.

    A `portable` one imports `osmosis_ai` and has a rollout server as its entry.
    """
    check_name(name)
    files = rollout_files(name, about=PLAIN_ABOUT, code=PLAIN_CODE)
    if portable:
        files |= portable_files(name, about=PLAIN_ABOUT, code="osmosis/plain_main.py", packages=("openai",))
    if force:
        files = {path: text for path, text in files.items() if not (path.startswith(DATASETS) and (workspace.path / path).exists())}
    return write_files(workspace.path, files, force=force)


def check_name(name: str) -> None:
    if not ROLLOUT_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a rollout; use letters, digits, '.', '_' and '-', a letter or digit first")


def rollout_files(name: str, *, about: str, code: dict[str, str], packages: tuple[str, ...] = ("openai",)) -> dict[str, str]:
    """Returns the texts of a rollout's files by path in the workspace; `code` maps its Python files to examples."""
    folder = f"{ROLLOUTS}/{name}"
    paths = {"evals": EVALS, "trainings": TRAININGS, "datasets": DATASETS, "name": name}
    evaluated = EXPERIMENT.format(name=name, endpoints=", openai/NAME")
    trained = EXPERIMENT.format(name=name, endpoints="")
    return {
        **{f"{folder}/{file}": read_example(original) for file, original in code.items()},
        f"{folder}/pyproject.toml": _project(name, packages, note=PENSTOCK_NOTE),
        f"{folder}/README.md": README.format(about=about, **paths),
        f"{EVALS}/{name}.toml": EVALUATION.format(name=name, experiment=evaluated),
        f"{TRAININGS}/{name}.toml": TRAINING.format(name=name, experiment=trained),
        f"{DATASETS}/{name}.jsonl": read_example("multiply/tasks.jsonl"),
    }


def portable_files(name: str, *, about: str, code: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the files of a rollout that also runs on the Osmosis platform; `code` is the example that is its main.py."""
    folder, needed = f"{ROLLOUTS}/{name}", ("osmosis-ai[server]>=0.2.31", *packages, "uvicorn")
    paths = {"evals": EVALS, "trainings": TRAININGS, "datasets": DATASETS, "name": name}
    return {
        f"{folder}/main.py": read_example(code),
        f"{folder}/pyproject.toml": _project(name, needed),  # here `osmosis-ai` is penstock-facades
        f"{folder}/README.md": PORTABLE_README.format(about=about, **paths),
    }


def _project(name: str, packages: tuple[str, ...], note: str = "") -> str:
    return PROJECT.format(name=name, packages=", ".join(f'"{each}"' for each in packages), note=note)


def read_example(path: str) -> str:
    return (EXAMPLES / path).read_text(encoding="utf-8")


# Project templates.


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A project template."""

    about: str
    files: Callable[[], dict[str, str]]
    """Returns texts by path."""
    extra: str = ""
    """Extra whose packages it needs besides those of `local`."""
    rollout: str = ""
    """Name of the rollout if the template is a workspace; empty for a folder with a `penstock.toml`."""
    portable: Callable[[], dict[str, str]] | None = None
    """Returns texts by path for a project that also runs on the Osmosis platform; None if there is no such form."""

    @property
    def next_commands(self) -> list[str]:
        """Returns the commands to run next, in that folder."""
        install = [install_command(self.extra)] if self.extra else []
        evals, trainings = (f" {folder}/{self.rollout}.toml" if self.rollout else "" for folder in (EVALS, TRAININGS))
        return [*install, f"penstock eval run{evals}", f"penstock train{trainings}"]


def _folder_files(toml: str, *names: str, **others: str) -> Callable[[], dict[str, str]]:
    """Returns a function for the files of an example: its config, `names` beside it, and `others` from other examples."""

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


def _workspace_template(name: str, about: str, entry: str, extra: str, portable: str) -> Template:
    code = {"main.py": entry, "agent.py": "multiply/agent.py"}
    files = partial(rollout_files, name, about=about, code=code, packages=AGENT_PACKAGES[extra])

    def portable_form() -> dict[str, str]:
        own = portable_files(name, about=about, code=portable, packages=AGENT_PACKAGES[extra])
        return {path: text for path, text in files().items() if not path.endswith("/agent.py")} | own

    title = f"a workspace: {about[:1].lower()}{about[1:]}"
    return Template(about=title, files=files, extra=extra, rollout=name, portable=portable_form)


AGENT_PACKAGES = {"strands": ("strands-agents", "openai"), "openai-agents": ("openai-agents",)}


TEMPLATES = {
    "plain": Template(
        about="a two-turn agent that calls a tool, with a plain `openai` client",
        files=_folder_files("multiply/train.toml", "agent.py", *TASK_FILES),
    ),
    "tiny": Template(
        about="the same with a policy of half a million weights that is made here: learns in half a minute",
        files=_folder_files("multiply/tiny.toml", "agent.py", "tiny_tasks.jsonl", "tiny_heldout.jsonl"),
    ),
    "strands": Template(
        about="the same agent written with Strands Agents",
        files=_folder_files("multiply/strands.toml", "agent.py", "strands_agent.py", *TASK_FILES),
        extra="strands",
    ),
    "openai-agents": Template(
        about="the same agent written with the OpenAI Agents SDK",
        files=_folder_files("multiply/openai_agents.toml", "agent.py", "openai_agent.py", *TASK_FILES),
        extra="openai-agents",
    ),
    "flow": Template(
        about="the same agent as a flow, in the style of Claw-R1", files=_folder_files("flow/train.toml", "flow.py", **TASK_FILES)
    ),
    "command": Template(
        about="the same agent as a program of its own that knows nothing of penstock",
        files=_folder_files("command/train.toml", "program.py", "grader.py", **TASK_FILES),
    ),
    "team": Template(
        about="a planner and an executor, each a policy of its own on a model that is made here: both learn within a minute",
        files=_folder_files(
            "team/train.toml",
            "team.py",
            **{name: f"multiply/{name}" for name in ("tiny_tasks.jsonl", "tiny_heldout.jsonl")},
        ),
    ),
    "multiply-local-strands": _workspace_template(
        "multiply-local-strands",
        "An agent that multiplies with a tool, written with Strands Agents",
        "multiply/strands_agent.py",
        "strands",
        "osmosis/strands_main.py",
    ),
    "multiply-local-openai": _workspace_template(
        "multiply-local-openai",
        "An agent that multiplies with a tool, written with the OpenAI Agents SDK",
        "multiply/openai_agent.py",
        "openai-agents",
        "osmosis/openai_main.py",
    ),
}


def apply_template(folder: Path, name: str, *, force: bool = False, portable: bool = False) -> list[Path]:
    """Writes a template's project, all files or none; ConfigError if a file exists, unless `force`."""
    template = TEMPLATES.get(name)
    if template is None:
        raise ConfigError(f"there is no template {name!r}; there are {', '.join(TEMPLATES)}")
    files = template.portable() if portable and template.portable else template.files()
    written = write_files(folder, files, force=force)
    if template.rollout:
        create_missing_folders(folder)
        write_gitignore(folder)
    return written


# Writing.


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


def write_gitignore(folder: Path) -> None:
    """Writes a .gitignore if there is none."""
    file = folder / ".gitignore"
    if not file.exists():
        file.write_text(GITIGNORE, encoding="utf-8")
