"""The author's code of a run: which files it is, and what changed in them since the run was started.

Rewards of an edited grader cannot be compared with those from before, so a run continues with changed code only if asked to.
"""

import difflib
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import penstock
from penstock.errors import ConfigError, Issue
from penstock.events import Events
from penstock.run.folder import CodeVersion, RunFolder
from penstock.sdk.discovery import Agent

ALLOW = "--allow-code-change"
SHOWN_LINES = 12
"""Changed lines that a refusal shows."""
PACKAGE = Path(penstock.__file__).parent


def author_files(agent: Agent) -> dict[str, str]:
    """Returns the texts of the agent's files, by path from the entry file's folder.

    They are the entry file, the modules in its folder and below that it imports, files that the grader's config names, and for a
    command those among its arguments. For an agent made from objects they are the sources of these.
    """
    if agent.sources:
        return dict(agent.sources)
    entry = agent.entry.resolve()
    home = entry if entry.is_dir() else entry.parent  # flows may be named by a table, without an entry file
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    own = [path for file in modules if file and (path := Path(file)).suffix == ".py" and _is_own(path, home)]
    configured = [value for _, value in agent.grader_config or () if isinstance(value, Path)]
    arguments = [agent.source.folder / argument for argument in agent.source.command]
    files = {path.resolve() for path in (agent.entry, *own, *configured, *arguments) if path.is_file()}
    texts = {str(path.relative_to(home) if path.is_relative_to(home) else path): path.read_bytes() for path in sorted(files)}
    return {name: text.decode("utf-8", "replace") for name, text in texts.items()}


def _is_own(file: Path, home: Path) -> bool:
    return file.is_relative_to(home) and "site-packages" not in file.parts and not file.is_relative_to(PACKAGE)


def use_code(folder: RunFolder, agent: Agent, events: Events, *, allow_change: bool) -> None:
    """Keep the agent's code in the run folder. ConfigError if it is not the code that the run has used, unless that is allowed.

    Before the first step nothing was trained, and any change is allowed: the evaluation before training is then made again.
    """
    for problem in folder.set_aside_damaged():
        events.emit("record.damaged", text=problem)
    versions, files, step = folder.code_versions(), author_files(agent), len(folder.metrics())
    changed = changed_lines(versions[-1].files, files) if versions else []
    if changed and step and not allow_change:
        raise _refusal(folder, changed)
    if not versions or changed:  # a new run, one of an earlier penstock, or other code
        folder.add_code_version(CodeVersion(after_step=step, files=files))
    if changed and not step:
        folder.keep_evaluations(-1)
    if changed:
        text = f"{CodeChange(step, _names(changed)).text}: rewards from before may not compare with those from now on"
        events.emit("code.changed", step=step, files=_names(changed), text=text)


class CodeChange(NamedTuple):
    after_step: int
    files: list[str]

    @property
    def text(self) -> str:
        return f"the code changed after step {self.after_step} ({', '.join(self.files)})"


def code_changes(folder: RunFolder) -> list[CodeChange]:
    """Returns the changes that the run went on with."""
    pairs = itertools.pairwise(folder.code_versions())
    return [CodeChange(new.after_step, _names(changed_lines(old.files, new.files))) for old, new in pairs]


def changed_lines(before: Mapping[str, str], now: Mapping[str, str]) -> list[Issue]:
    """Returns one issue for each line that was removed or added, with its file as the key."""
    found: list[Issue] = []
    for name in sorted({*before, *now}):
        if name not in now or name not in before:
            found.append(Issue(name, f"{name} is {'new' if name in now else 'not used any more'}"))
            continue
        old, new = before[name].splitlines(), now[name].splitlines()
        for kind, old_from, old_to, new_from, new_to in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
            if kind != "equal":
                found += [Issue(name, f"{name}, line {at + 1}: - {old[at]}") for at in range(old_from, old_to)]
                found += [Issue(name, f"{name}, line {at + 1}: + {new[at]}") for at in range(new_from, new_to)]
    return found


def _names(changed: list[Issue]) -> list[str]:
    return list(dict.fromkeys(issue.key for issue in changed))


def _refusal(folder: RunFolder, changed: list[Issue]) -> ConfigError:
    more = len(changed) - SHOWN_LINES
    shown = changed[:SHOWN_LINES] + ([Issue("", f"and {more} more lines")] if more > 0 else [])
    lines = f" ({shown[0].message})" if len(shown) == 1 else ""
    what = f"{folder.path} was trained with other code: {', '.join(_names(changed))} changed{lines}"
    return ConfigError(
        f"{what}, and two rewards would be mixed in one curve; "
        f"change it back, set another run.name, start over with --fresh, or continue with {ALLOW}, which marks the change",
        shown,
    )
