"""Projects to begin with: each is one of the examples, and evaluates and trains as it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import ConfigError
from penstock.workspace.layout import EVALS, TRAININGS
from penstock.workspace.scaffold import fix, write_files, write_ignored
from penstock.workspace.texts import example, rollout_files

FILE = "penstock.toml"
"""What `penstock train` and `penstock eval run` take where no file is named."""
TASKS = {"tasks.jsonl": "multiply/tasks.jsonl", "heldout.jsonl": "multiply/heldout.jsonl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A project, as it is written into a folder."""

    about: str
    files: Callable[[], dict[str, str]]
    """Texts by their paths."""
    extra: str = ""
    """What must be installed beside `penstock[local]`."""
    rollout: str = ""
    """Of one that is a workspace: its rollout. Else it is a folder with a `penstock.toml`."""

    @property
    def following(self) -> list[str]:
        """The commands that come next, in that folder."""
        install = [f'pip install "penstock[local,{self.extra}]"'] if self.extra else []
        evals, trainings = (f" {folder}/{self.rollout}.toml" if self.rollout else "" for folder in (EVALS, TRAININGS))
        return [*install, f"penstock eval run{evals}", f"penstock train{trainings}"]


def _folder(toml: str, *names: str, **others: str) -> Callable[[], dict[str, str]]:
    """The files of an example: its config, what lies beside it under the same name, and tasks of another one."""

    def files() -> dict[str, str]:
        home = Path(toml).parent
        config = example(toml).replace(f" examples/{toml}", "").replace('"../multiply/', '"')  # all of it is in one folder there
        return {
            FILE: config,
            **{name: example(f"{home}/{name}") for name in names},
            **{to: example(it) for to, it in others.items()},
        }

    return files


def _workspace(name: str, about: str, entry: str, extra: str) -> Template:
    code = {"main.py": entry, "agent.py": "multiply/agent.py"}
    files = partial(rollout_files, name, about=about, code=code, extras=f"local,{extra}")
    return Template(about=f"a workspace: {about[:1].lower()}{about[1:]}", files=files, extra=extra, rollout=name)


TEMPLATES = {
    "plain": Template(
        about="a two-turn agent that calls a tool, with a plain `openai` client",
        files=_folder("multiply/train.toml", "agent.py", *TASKS),
    ),
    "tiny": Template(
        about="the same with a policy of half a million weights that is made here: learns in half a minute",
        files=_folder("multiply/tiny.toml", "agent.py", "tiny_tasks.jsonl", "tiny_heldout.jsonl"),
    ),
    "strands": Template(
        about="the same agent written with Strands Agents",
        files=_folder("multiply/strands.toml", "agent.py", "strands_agent.py", *TASKS),
        extra="strands",
    ),
    "openai-agents": Template(
        about="the same agent written with the OpenAI Agents SDK",
        files=_folder("multiply/openai_agents.toml", "agent.py", "openai_agent.py", *TASKS),
        extra="openai-agents",
    ),
    "flow": Template(
        about="the same agent as a flow, in the style of Claw-R1", files=_folder("flow/train.toml", "flow.py", **TASKS)
    ),
    "command": Template(
        about="the same agent as a program of its own that knows nothing of penstock",
        files=_folder("command/train.toml", "program.py", "grader.py", **TASKS),
    ),
    "multiply-local-strands": _workspace(
        "multiply-local-strands",
        "An agent that multiplies with a tool, written with Strands Agents",
        "multiply/strands_agent.py",
        "strands",
    ),
    "multiply-local-openai": _workspace(
        "multiply-local-openai",
        "An agent that multiplies with a tool, written with the OpenAI Agents SDK",
        "multiply/openai_agent.py",
        "openai-agents",
    ),
}


def apply_template(folder: Path, name: str, *, force: bool = False) -> list[Path]:
    """Write a template's project, all or nothing; ConfigError names what is in the way, which `force` writes over."""
    template = TEMPLATES.get(name)
    if template is None:
        raise ConfigError(f"there is no template {name!r}; there are {', '.join(TEMPLATES)}")
    written = write_files(folder, template.files(), force=force)
    if template.rollout:
        fix(folder)
        write_ignored(folder)
    return written
