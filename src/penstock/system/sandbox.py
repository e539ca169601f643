"""A sandbox for programs that must not see some files, nor the processes and memory of others.

    sandbox = choose_sandbox("auto", needs=[folder])
    command = sandbox.command(["node", "agent.mjs"], hidden=[run_folder], writable=[scratch])
    process = subprocess.Popen(command.argv, cwd=folder, start_new_session=True, **command.options)
    code = sandbox.exit_code(process.wait())

`bubblewrap` (Linux, the program `bwrap`): the program sees the same files without the hidden ones, has only its own processes,
and lacks the capabilities to change that. `user` (as root): it runs under a separate user id, which must not be able to read the
hidden files. Signals to its process group, exit codes and the terminal work as without a sandbox.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.errors import ConfigError
from penstock.system.processes import last_line

SandboxName = Literal["bubblewrap", "user", "off"]
SandboxWish = Literal["auto", "bubblewrap", "user", "off"]

USER_IDS = range(52_000, 60_000)
"""Ids that distributions leave free; each program gets another one."""
ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE", "NET_RAW")
"""Capabilities that root keeps in bubblewrap: for package managers and the like. None lifts a mount or reads past one."""
DEVICES = ("/dev/dri", "/dev/kfd", "/dev/kvm", "/dev/fuse", "/dev/net/tun")
"""Devices that programs use besides the usual ones, NVIDIA's excepted; disks are left out."""
PROBE_S = 10.0

# bwrap itself outlives SIGINT and SIGTERM to its group, to wait for the program and return its exit code; ignored signals are
# inherited, so the program's are reset. Python ignores SIGPIPE and SIGXFSZ at its start.
_IGNORE_SIGNALS = ("/bin/sh", "-c", 'trap "" INT QUIT TERM; exec "$@"', "sh")
_RESET_SIGNALS = """import os, signal, sys
for name in ("INT", "QUIT", "TERM", "PIPE", "XFSZ"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_DFL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")
"""
_CHECK_READABLE = 'for path; do [ -r "$path" ] && { [ ! -d "$path" ] || [ -x "$path" ]; } || { echo "$path" >&2; exit 1; }; done'


class SandboxedCommand(NamedTuple):
    """What to start in place of the program."""

    argv: list[str]
    options: dict[str, Any]
    """Further arguments of `subprocess.Popen` or `asyncio.create_subprocess_exec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A way to start programs, chosen once."""

    name: SandboxName
    reason: str = field(default="", compare=False)
    """Why it does not isolate, and what to do about it."""

    @property
    def isolates(self) -> bool:
        return self.name != "off"

    def command(
        self,
        argv: Sequence[str],
        *,
        hidden: Iterable[Path] = (),
        readonly: Iterable[Path] = (),
        writable: Iterable[Path] = (),
    ) -> SandboxedCommand:
        """Returns the command that starts `argv` in the sandbox.

        A `hidden` folder is empty, a file cannot be opened. `readonly` ones cannot be changed. `writable` ones can, also inside a
        hidden folder; under `user` they are given to the program's user id, so they should be made for it. What does not exist is
        left out.
        """
        if self.name == "bubblewrap":
            mounts = _mounts(mounts_in_order(hidden, readonly, writable))
            return SandboxedCommand([*_IGNORE_SIGNALS, *_bubblewrap(), *mounts, "--", *_inner(argv)], {})
        if self.name == "user":
            user = new_user_id()
            for path in writable:
                os.chown(path, user, user)
            return SandboxedCommand(list(argv), {"user": user, "group": user, "extra_groups": []})
        return SandboxedCommand(list(argv), {})

    def exit_code(self, code: int) -> int:
        """Returns the program's exit code as `subprocess` gives it: bwrap ends with 128 + n if signal n killed the program."""
        return 128 - code if self.name == "bubblewrap" and 128 < code <= 192 else code

    def exposed(self, hidden: Iterable[Path]) -> list[Path]:
        """Those of `hidden` that a program in this sandbox could read all the same."""
        if self.name == "bubblewrap":
            return []
        return [path for path in hidden if path.exists() and (self.name == "off" or _others_read(path))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """A sandbox for the programs of a run, and what is out of their reach in it."""

    sandbox: Sandbox
    hidden: tuple[Path, ...] = ()
    readonly: tuple[Path, ...] = ()
    visible: tuple[Path, ...] = ()
    """What they need inside of a hidden folder."""

    def command(self, argv: Sequence[str], *, writable: Iterable[Path] = ()) -> SandboxedCommand:
        """See `Sandbox.command`."""
        visible = () if self.sandbox.name == "user" else self.visible  # which would give the user's own files away
        return self.sandbox.command(argv, hidden=self.hidden, readonly=self.readonly, writable=[*visible, *writable])


AUTO: tuple[SandboxName, ...] = ("bubblewrap", "user")


def choose_sandbox(wish: SandboxWish, *, needs: Iterable[Path] = (), auto: Sequence[SandboxName] = AUTO) -> Sandbox:
    """Returns the sandbox that `wish` names; for `auto`, the first of `auto` that this machine allows, else `off` with the reason.

    `needs` are files and folders that the program must be able to read. ConfigError if the machine lacks what `wish` names.
    """
    if wish == "off":
        return Sandbox(name="off", reason="it is switched off")
    needed = tuple(str(path) for path in needs)
    names: Sequence[SandboxName] = auto if wish == "auto" else (wish,)
    why_not: list[str] = []
    for name in names:
        if not (why := _why_not(name, needed)):
            return Sandbox(name=name)
        why_not.append(f"{name}: {why}")
    reason = "; ".join(why_not)
    if wish != "auto":
        raise ConfigError(f"sandbox = {wish!r}: {reason}")
    return Sandbox(name="off", reason=reason)


def new_user_id() -> int:
    """Returns a user id that no other program has, most likely."""
    return secrets.choice(USER_IDS)


def _why_not(name: SandboxName, needs: tuple[str, ...]) -> str:
    return _why_not_bubblewrap() if name == "bubblewrap" else _why_not_user(needs)


# bubblewrap


@cache
def _why_not_bubblewrap() -> str:
    if sys.platform != "linux":
        return "it is for Linux only"
    if shutil.which("bwrap") is None:
        return "the program bwrap is missing; install the package bubblewrap"
    problem = _run([*_bubblewrap(), "--", *_inner(["/bin/sh", "-c", ":"])])
    return f"{problem}; allow user namespaces, or run as root" if problem else ""


def _bubblewrap() -> list[str]:
    """The part of the command that all programs share."""
    line = ["bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    for device in (*DEVICES, *map(str, Path("/dev").glob("nvidia*"))):
        line += ["--dev-bind-try", device, device]
    if os.geteuid() == 0:
        line += ["--ro-bind-try", "/sys", "/sys", "--cap-drop", "ALL"]
        for capability in (*ROOT_CAPABILITIES, "SETFCAP"):  # without it, root could not make a sandbox in here
            line += ["--cap-add", f"CAP_{capability}"]
    return line


MountKind = Literal["hidden", "readonly", "writable"]


def mounts_in_order(hidden: Iterable[Path], readonly: Iterable[Path], writable: Iterable[Path]) -> list[tuple[Path, MountKind]]:
    """Returns the paths that exist, without links, each with what is to be mounted there.

    A folder comes before what is in it, whose mount it would cover otherwise.
    """
    found: dict[Path, MountKind] = {}
    kinds: tuple[tuple[MountKind, Iterable[Path]], ...] = (("hidden", hidden), ("readonly", readonly), ("writable", writable))
    for kind, paths in kinds:
        found |= {path.resolve(): kind for path in paths if path.exists()}
    return sorted(found.items(), key=lambda item: len(item[0].parts))


def _mounts(mounts: Iterable[tuple[Path, MountKind]]) -> list[str]:
    line: list[str] = []
    for path, kind in mounts:
        if kind != "hidden":
            line += ["--bind" if kind == "writable" else "--ro-bind", str(path), str(path)]
        elif path.is_dir():
            line += ["--tmpfs", str(path)]
        else:
            line += ["--ro-bind", os.devnull, str(path)]
    return line


def _inner(argv: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _RESET_SIGNALS, *argv]


# A separate user id


def _why_not_user(needs: tuple[str, ...]) -> str:
    return "it needs root" if os.geteuid() != 0 else _unreadable(needs)


@cache
def _unreadable(needs: tuple[str, ...]) -> str:
    user = new_user_id()
    problem = _run(["/bin/sh", "-c", _CHECK_READABLE, "sh", *needs], user=user, group=user, extra_groups=[])
    return f"another user cannot read {problem}; move it out of a private folder" if problem else ""


def _others_read(path: Path) -> bool:
    """Whether a user who is neither owner nor in the group can reach and read it."""
    resolved = path.resolve()
    readable = bool(resolved.stat().st_mode & (0o5 if resolved.is_dir() else 0o4))
    return readable and all(parent.stat().st_mode & 0o1 for parent in resolved.parents)


def _run(command: Sequence[str], **options: Any) -> str:
    """Runs a probe; returns the last line of its output if it fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S, **options)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} ({error})"
    return (last_line(done.stderr) or f"{command[0]} failed") if done.returncode else ""
