"""What a model may be called: a built-in, a repository on the Hugging Face hub, or a path."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ModelError

BUILT_IN = ("smollm2-135m", "tiny")

FORMS = f"give a built-in ({', '.join(BUILT_IN)}), hf:ORG/NAME[@REV], or the path of a model folder or .gguf file"

_HUB = re.compile(r"hf:(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A model that a user named, and where it is to be looked for."""

    kind: Literal["built-in", "hub", "folder", "gguf"]
    name: str
    """As the user may write it again; for a path, its last part."""
    repository: str = ""
    """ORG/NAME on the hub."""
    revision: str | None = None
    """None: whatever the repository's main branch holds at the first pull."""
    path: Path = Path()
    """Of a folder or a file; absolute."""


def parse(text: str) -> Reference:
    """Read a reference; ModelError names the nearest model and the forms that are accepted."""
    if text in BUILT_IN:
        return Reference(kind="built-in", name=text)
    if text.startswith("hf:"):
        return _parse_hub(text)
    try:
        found = _parse_path(text)
    except (OSError, RuntimeError, ValueError) as cause:  # too long for a path, a user who does not exist, …
        raise ModelError(f"unknown model {text[:80]!r}; {FORMS}") from cause
    if found is None:
        raise ModelError(_unknown(text))
    return found


def _parse_path(text: str) -> Reference | None:
    path = Path(text).expanduser()
    if not text.strip() or not path.exists():
        return None
    if path.is_dir():
        return Reference(kind="folder", name=path.resolve().name, path=path.resolve())
    if path.suffix.lower() == ".gguf":
        return Reference(kind="gguf", name=path.stem, path=path.resolve())
    raise ModelError(f"{text}: not a .gguf file; {FORMS}")


def _parse_hub(text: str) -> Reference:
    found = _HUB.fullmatch(text)
    if found is None:
        raise ModelError(
            f"{text!r} is not a model on the hub: write hf:ORG/NAME or hf:ORG/NAME@REV, for example hf:Qwen/Qwen3-0.6B"
        )
    return Reference(kind="hub", name=text, repository=found["repository"], revision=found["revision"])


def _unknown(text: str) -> str:
    if text.startswith(("/", "./", "../", "~")) or text.endswith((".gguf", "/")):
        return f"{text}: no such folder or file; {FORMS}"
    if _HUB.fullmatch(f"hf:{text}"):
        return f"unknown model {text!r}: no such path; did you mean 'hf:{text}'? {_capital(FORMS)}"
    near = difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=0.5)
    return f"unknown model {text!r}; did you mean {near[0]!r}? {_capital(FORMS)}" if near else f"unknown model {text!r}; {FORMS}"


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
