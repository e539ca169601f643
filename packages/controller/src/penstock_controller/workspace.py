"""Workspaces: the folders of rollouts, experiment files and datasets, and how they are written. They need no git."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.cli.scaffold import Template, read_example, write_files
from penstock.errors import ConfigError, DatasetError
from penstock.system.packages import install_command

ROLLOUTS, EVALS, TRAININGS, DATASETS = "rollouts", "configs/eval", "configs/training", "data"
FOLDERS = (ROLLOUTS, EVALS, TRAININGS, DATASETS)
DATASET_SUFFIXES = (".jsonl", ".csv", ".parquet")
ROLLOUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Valid names of rollouts."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder that contains FOLDERS."""

    path: Path

    def rollouts(self) -> list[str]:
        """Returns the folders under rollouts/ that contain Python files, sorted."""
        folder = self.path / ROLLOUTS
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted(each.name for each in found if each.is_dir() and not each.name.startswith(".") and any(each.glob("*.py")))

    def missing(self) -> list[str]:
        """Returns the folders of the layout that do not exist."""
        return [name for name in FOLDERS if not (self.path / name).is_dir()]

    def dataset(self, name: str) -> Path:
        """Returns a dataset's file: data/NAME with a known suffix, or a path; DatasetError lists the datasets that exist."""
        named = [self.path / DATASETS / f"{name}{ending}" for ending in DATASET_SUFFIXES]
        paths = [Path(name).expanduser(), self.path / name, self.path / DATASETS / name]
        found = [path for path in named if path.is_file()] or [
            path for path in paths if path.suffix in DATASET_SUFFIXES and path.is_file()
        ]
        if len(found) > 1 and found[0] in named:
            names = ", ".join(path.name for path in found)
            raise DatasetError(f"experiment.dataset = {name!r} is several files: {names}; write the one with its ending")
        if found:
            return found[0].resolve()
        existing = sorted(path.stem for path in (self.path / DATASETS).glob("*") if path.suffix in DATASET_SUFFIXES)
        known = f"there are {', '.join(existing)}" if existing else "there is none yet"
        raise DatasetError(f"experiment.dataset = {name!r}: no {DATASETS}/{name}.jsonl, .csv or .parquet; {known}")


def find_workspace(start: Path) -> Workspace | None:
    """Returns the nearest workspace from `start` upwards; None if there is none."""
    here = start.resolve()
    for folder in (here, *here.parents):
        workspace = Workspace(folder)
        if not workspace.missing():
            return workspace
    return None


def workspace_of(start: Path) -> Workspace:
    """Returns the nearest workspace from `start` upwards; ConfigError if there is none."""
    found = find_workspace(start)
    if found is None:
        text = f"{start}: not inside a workspace, a folder with {', '.join(f'{name}/' for name in FOLDERS)}"
        raise ConfigError(f"{text}; make what is missing with: penstock doctor --fix")
    return found


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

{about}. It runs as it is, with a small model on this machine, and on the Osmosis platform:

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

{about}. It runs as it is, with a small model on this machine:

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
        f"{folder}/pyproject.toml": _project(name, needed),  # here `osmosis-ai` is penstock-compat
        f"{folder}/README.md": PORTABLE_README.format(about=about, **paths),
    }


def _project(name: str, packages: tuple[str, ...], note: str = "") -> str:
    return PROJECT.format(name=name, packages=", ".join(f'"{each}"' for each in packages), note=note)


def write_gitignore(folder: Path) -> None:
    """Writes a .gitignore if there is none."""
    file = folder / ".gitignore"
    if not file.exists():
        file.write_text(GITIGNORE, encoding="utf-8")


# Workspace templates.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceTemplate(Template):
    """A workspace with one rollout."""

    rollout: str
    """Its name."""
    portable: Callable[[], dict[str, str]]
    """Returns texts by path for a project that also runs on the Osmosis platform."""
    workspace = True

    @property
    def next_commands(self) -> list[str]:
        evaluate, train = f"penstock eval run {EVALS}/{self.rollout}.toml", f"penstock train {TRAININGS}/{self.rollout}.toml"
        return [install_command(self.extra), evaluate, train]

    def write(self, folder: Path, *, force: bool = False, portable: bool = False) -> list[Path]:
        written = write_files(folder, self.portable() if portable else self.files(), force=force)
        create_missing_folders(folder)
        write_gitignore(folder)
        return written


AGENT_PACKAGES = {"strands": ("strands-agents", "openai"), "openai-agents": ("openai-agents",)}


def _workspace_template(name: str, about: str, entry: str, extra: str, portable: str) -> WorkspaceTemplate:
    code = {"main.py": entry, "agent.py": "multiply/agent.py"}
    files = partial(rollout_files, name, about=about, code=code, packages=AGENT_PACKAGES[extra])

    def portable_form() -> dict[str, str]:
        own = portable_files(name, about=about, code=portable, packages=AGENT_PACKAGES[extra])
        return {path: text for path, text in files().items() if not path.endswith("/agent.py")} | own

    title = f"a workspace: {about[:1].lower()}{about[1:]}"
    return WorkspaceTemplate(about=title, files=files, extra=extra, rollout=name, portable=portable_form)


STRANDS = _workspace_template(
    "multiply-local-strands",
    "An agent that multiplies with a tool, written with Strands Agents",
    "multiply/strands_agent.py",
    "strands",
    "osmosis/strands_main.py",
)
OPENAI_AGENTS = _workspace_template(
    "multiply-local-openai",
    "An agent that multiplies with a tool, written with the OpenAI Agents SDK",
    "multiply/openai_agent.py",
    "openai-agents",
    "osmosis/openai_main.py",
)
TEMPLATES = {each.rollout: each for each in (STRANDS, OPENAI_AGENTS)}
