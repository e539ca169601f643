"""What a command works with: its settings, its workspace, its login, the controller and pages of its lists."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import orjson
import typer

from osmosis_ai.cli.output import CliError, Listing, moment, plain
from penstock_controller.client import ControllerClient

# Environment

LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*
    (?:"(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>[^']*)' | (?P<bare>[^#\n]*?(?:[^\s#]\#[^\n]*?)?))\s*(?:\#.*)?""",
    re.VERBOSE,
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def load_environment(start: Path) -> None:
    """Loads the nearest `.env` in `start` or its parents."""
    for folder in (start, *start.parents):
        file = folder / ".env"
        if file.is_file():
            for name, value in read_settings(file.read_text(encoding="utf-8", errors="replace")):
                os.environ.setdefault(name, value)
            return


def read_settings(text: str) -> Iterator[tuple[str, str]]:
    """Yields name and value of each line that sets a variable, and skips other lines."""
    for line in text.splitlines():
        if (found := LINE.fullmatch(line)) is None:
            continue
        double, single, bare = found.group("double", "single", "bare")
        if double is not None:
            yield found["name"], re.sub(r"\\(.)", lambda escape: ESCAPES.get(escape[1], escape[1]), double)
        else:
            yield found["name"], single if single is not None else bare


# Logins


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


# Connection


@dataclass(frozen=True, slots=True)
class Git:
    """The identity of a workspace's code."""

    identity: str
    """`owner/name`, or `local/<folder>` without a remote."""
    remote_url: str | None

    def as_json(self) -> dict[str, Any]:
        return {"identity": self.identity, "remote_url": self.remote_url}


@dataclass(frozen=True, slots=True)
class Connection:
    """A workspace and its controller."""

    client: ControllerClient
    git: Git
    workspace: Path

    @property
    def where(self) -> dict[str, Any]:
        """The fields that every result contains."""
        return {"git": self.git.as_json(), "workspace_directory": str(self.workspace)}


def connect() -> Connection:
    """Connects from the working directory. Starts a local controller unless OSMOSIS_PLATFORM_URL names one."""
    workspace = require_workspace()
    git = identify(workspace)
    return Connection(open_client(git.identity), git, workspace)


def require_workspace(start: Path | None = None) -> Path:
    """Returns the workspace that contains `start`. Raises WORKSPACE_REQUIRED, naming the missing folders."""
    from penstock_controller.workspace import Workspace, find_workspace

    here = (start or Path()).resolve()
    if (found := find_workspace(here)) is not None:
        return found.path
    missing = ", ".join(f"{name}/" for name in Workspace(here).missing())
    text = f"{here} is in no workspace: there is no {missing}"
    raise CliError(f"{text}; go to one, or make this one with: osmosis doctor --fix", "WORKSPACE_REQUIRED")


def identify(workspace: Path) -> Git:
    """Identifies the workspace by its git remote `origin`, on any host."""
    asked = subprocess.run(["git", "remote", "get-url", "origin"], cwd=workspace, capture_output=True, text=True, check=False)
    remote = asked.stdout.strip() if asked.returncode == 0 else ""
    path = re.sub(r"^[a-z+]+://[^/]+|^[^/@]+@[^:/]+:", "", remote).removesuffix("/").removesuffix(".git")
    names = [name for name in path.split("/") if name]
    if len(names) < 2:
        return Git(f"local/{_word(workspace.name)}", remote or None)
    return Git("/".join(map(_word, names[-2:])), _without_password(remote))


def open_client(git: str | None = None) -> ControllerClient:
    """Opens the controller of OSMOSIS_PLATFORM_URL, or else the local one."""
    url = platform_url()
    if url is None:
        from penstock_controller.local import find_controller

        client = find_controller()
        client.git = git
        return client
    login = saved_login(url)
    token = os.environ.get("OSMOSIS_TOKEN") or (login.token if login else None)
    if not token:
        raise CliError(f"Not logged in at {url}; run: osmosis auth login, or set OSMOSIS_TOKEN")
    return ControllerClient(url, token, git)


def platform_url() -> str | None:
    """Returns OSMOSIS_PLATFORM_URL, or None if it is not set."""
    return (os.environ.get("OSMOSIS_PLATFORM_URL") or "").strip().rstrip("/") or None


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "workspace"


def _without_password(remote: str) -> str:
    return re.sub(r"(?<=://)[^/@]+@", "", remote)


# Pages

LARGEST = 50
LARGEST_LOGS = 200

Limit = Annotated[int, typer.Option("--limit", help=f"How many to show, 1 to {LARGEST}.")]
All = Annotated[bool, typer.Option("--all", help="Show all of them.")]
LogLimit = Annotated[int, typer.Option("--limit", help=f"How many lines, 1 to {LARGEST_LOGS}.")]
Cursor = Annotated[str | None, typer.Option("--cursor", help="Show earlier lines: the next_cursor of an earlier call.")]
LOG_FIELDS = ("timestamp", "level", "step", "message", "details")


class Page(NamedTuple):
    rows: list[dict[str, Any]]
    total_count: int
    has_more: bool
    next_offset: int | None
    reply: Mapping[str, Any]
    """The whole first reply."""

    def listed(self) -> dict[str, Any]:
        """Returns the paging fields of an envelope."""
        return {"total_count": self.total_count, "has_more": self.has_more, "next_offset": self.next_offset}


def fetch_page(following: Callable[[int, int], dict[str, Any]], key: str, *, limit: int, everything: bool) -> Page:
    """Reads one page, or all rows if `everything`. `following(limit, offset)` returns a page."""
    if not 1 <= limit <= LARGEST:
        raise CliError(f"--limit is {limit}; give a number from 1 to {LARGEST}, or --all")
    first = following(LARGEST if everything else limit, 0)
    rows: list[dict[str, Any]] = list(first.get(key) or [])
    total, offset = first.get("total_count", len(rows)), first.get("next_offset")
    if not everything:
        return Page(rows, total, bool(first.get("has_more")), offset, first)
    while offset is not None:
        page = following(LARGEST, offset)
        more: list[dict[str, Any]] = page.get(key) or []
        rows += more
        offset = page.get("next_offset") if more else None
    return Page(rows, total, False, None, first)


def show_logs(
    following: Callable[[int, str | None], dict[str, Any]], here: Connection, *, limit: int, cursor: str | None
) -> Listing:
    """Returns a page of a log, oldest line first."""
    if not 1 <= limit <= LARGEST_LOGS:
        raise CliError(f"--limit is {limit}; give a number from 1 to {LARGEST_LOGS}")
    reply = following(limit, cursor)
    rows: Sequence[dict[str, Any]] = reply.get("logs") or []
    earlier: str | None = reply.get("next_cursor")
    return Listing(
        items=[{name: row.get(name) for name in LOG_FIELDS} for row in rows],
        shown=[[moment(row.get("timestamp")), *(plain(row.get(name)) for name in LOG_FIELDS[1:4])] for row in rows],
        titles=["Time", "Level", "Step", "Message"],
        total_count=len(rows),
        has_more=earlier is not None,
        extra={"next_cursor": earlier, **here.where},
        hint=f"Earlier lines: --cursor {earlier}" if earlier else "",
    )
