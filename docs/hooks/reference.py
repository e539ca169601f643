"""The generated pages: config keys, commands, and the keys that `claw_r1` takes."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from pydantic import BaseModel

from penstock.config import PolicySection, RunConfig, Section
from penstock.engines import SECTIONS
from penstock.rollout.executors import EXECUTORS


def config_reference() -> str:
    """A table of keys for each section of the TOML file, engine and executor."""
    parts: list[str] = []
    for name, field in RunConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            parts.append(_section(f"[{name}]", name, kind))
    shared = RunConfig.model_fields["engine"].annotation
    parts += [_section(f"[engine] for `{name}`", "engine", SECTIONS.load(name), less=shared) for name in SECTIONS.table]
    parts.append(_section("[policies.NAME]", "policies.NAME", PolicySection))
    for name in EXECUTORS.table:
        kind = EXECUTORS.load(name).section
        if kind is not Section and kind.model_fields:
            parts.append(_section(f"[executor] for `{name}`", "executor", kind))
    return "\n".join(filter(None, parts))


def command_reference() -> str:
    """The help of every command, as the terminal prints it."""
    from penstock.cli.app import app

    return "\n".join(_command(typer.main.get_command(app), "penstock"))


def claw_keys() -> str:
    """The tables of keys that `python -m claw_r1.async_main` takes."""
    from claw_r1.keys import ALIASES, COMBINED_KEYS, FIXED_KEYS, IGNORED_KEYS, MAPPED_KEYS

    sets = [(f"`{key}`", f"`{each.ours}`", each.note) for key, each in MAPPED_KEYS.items()]
    sets += [
        (f"`{key}`", ", ".join(f"`{name}`" for name in ours.split(", ") if name), note)
        for key, (ours, note) in COMBINED_KEYS.items()
    ]
    only = [
        (f"`{key}`", ", ".join(f"`{_written(value)}`" for value in rule.values), rule.reason) for key, rule in FIXED_KEYS.items()
    ]
    ignored = [(", ".join(f"`{key}`" for key in keys), reason) for reason, keys in IGNORED_KEYS.items()]
    return "\n\n".join(
        (
            "## Keys with an effect\n\n" + table(("Key", "Sets here", ""), sets),
            "## Other spellings\n\n" + table(("Key", "Same as"), [(f"`{new}`", f"`{key}`") for new, key in ALIASES.items()]),
            "## Keys with a fixed value\n\n" + table(("Key", "Only", "Reason"), only),
            "## Keys without effect\n\n" + table(("Keys", "Reason"), ignored),
        )
    )


GENERATED = {"config": config_reference, "commands": command_reference, "claw keys": claw_keys}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _section(title: str, prefix: str, kind: type[BaseModel], less: Any = None) -> str:
    """The keys of a section, without those of the class `less`."""
    texts, known = field_texts(kind), getattr(less, "model_fields", {})
    rows = [
        (f"`{prefix}.{key}`", _default(field), texts.get(key, "")) for key, field in kind.model_fields.items() if key not in known
    ]
    summary = " ".join((kind.__doc__ or "").split()).partition("`: ")[2]
    return f"## {title}\n\n{summary[:1].upper()}{summary[1:]}\n\n{table(('Key', 'Default', ''), rows)}\n" if rows else ""


def _default(field: Any) -> str:
    """The default as TOML writes it."""
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    if value is None:
        return "required" if field.is_required() else "unset"
    return f"`{json.dumps(value, default=str)}`"


def field_texts(kind: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in ("pydantic", "builtins"):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _command(command: Any, path: str) -> Iterator[str]:
    context = command.make_context(path, [], resilient_parsing=True)
    context.terminal_width = 100
    yield f"## {path}\n\n```text\n{command.get_help(context).strip()}\n```\n"
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield from _command(each, f"{path} {name}")


def _written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
