"""Saved logins, one per controller address, in a file that only its owner can read."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from osmosis_ai.cli.output import CliError


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A token and its owner."""

    token: str
    email: str
    name: str | None = None
    expires_at: str | None = None
    token_id: str | None = None


def saved_login(url: str) -> Login | None:
    found = _read().get(url)
    return Login(**found) if found else None


def save_login(url: str, login: Login) -> None:
    """Saves the login and replaces an earlier one."""
    _write({**_read(), url: asdict(login)})


def forget_login(url: str) -> None:
    _write({other: login for other, login in _read().items() if other != url})


def logins_file() -> Path:
    """A file other than upstream's, which has a different format."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "penstock" / "osmosis-logins.json"


def _read() -> dict[str, Any]:
    try:
        found: Any = orjson.loads(logins_file().read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    except OSError as cause:
        raise CliError(f"{logins_file()}: logins cannot be read: {cause.strerror}; check the file", "AUTH_REQUIRED") from cause
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _write(logins: dict[str, Any]) -> None:
    file = logins_file()
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(orjson.dumps(logins))
        draft.replace(file)
    except OSError as cause:
        with suppress(OSError):
            draft.unlink()
        raise CliError(f"{file}: the login cannot be kept: {cause.strerror}; set XDG_CONFIG_HOME or OSMOSIS_TOKEN") from cause
