"""Confinement of this process in its own Linux namespaces: for a forked process that must not start another program.

After `confine_process`, hidden files are covered, other processes cannot be read, whoever owns them, and the capabilities to change
that are gone, for good and for everything that this process starts. It stays the same process, with the same id and the same user.
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from penstock.system.processes import PR_SET_DUMPABLE, protect_memory
from penstock.system.sandbox import ROOT_CAPABILITIES, mounts_in_order

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x0002_0000, 0x0800_0000, 0x1000_0000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 1, 32, 4096, 16384, 1 << 19
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 23, 24, 38, 47, 4
CAPABILITY_VERSION_3 = 0x2008_0522
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7} | {
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
}
"""Numbers of `ROOT_CAPABILITIES`."""
KERNEL_FILES = ("/proc/sys", "/proc/sysrq-trigger", "/sys")
"""Root changes the whole machine by writing there, and needs no capability for it."""
_FLAGS = {os.ST_NOSUID: 2, os.ST_NODEV: 4, os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
"""Flags of a mount, as statvfs gives them and as mount takes them: another namespace may add to them, never take one away."""


def confine_process(*, hidden: Iterable[Path] = (), readonly: Iterable[Path] = (), writable: Iterable[Path] = ()) -> None:
    """Confines this process, which must have one thread; see `Sandbox.command` for the paths. OSError if the system refuses."""
    is_root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    _prctl(PR_SET_DUMPABLE, 1)  # its files in /proc would belong to root
    if is_root:
        _unshare_as_root()
        hidden = [*hidden, *_disks()]
        readonly = [*readonly, *map(Path, KERNEL_FILES)]
    else:
        _check(_libc().unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(line)
    _mount(None, "/", None, MS_REC | MS_SLAVE)
    _cover(hidden, readonly, writable)
    _drop_capabilities([CAPABILITIES[name] for name in ROOT_CAPABILITIES] if is_root else [])
    protect_memory()


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _prctl(option: int, *arguments: int) -> int:
    return _libc().prctl(option, *(*arguments, 0, 0, 0, 0)[:4])


def _unshare_as_root() -> None:
    """Keeps every user id as it is. Only a process outside of the new namespace may say so: a child that waits for it."""
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            os.close(writing)
            if os.read(reading, 1):
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{parent}/{name}").write_text("0 0 4294967295")
                os._exit(0)
        finally:
            os._exit(1)
    os.close(reading)
    try:
        _check(_libc().unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
        os.write(writing, b"1")
    finally:
        os.close(writing)
        _, status = os.waitpid(child, 0)
    if status:
        raise PermissionError("the user ids of a user namespace cannot be set")


def _disks() -> list[Path]:
    """Block devices: root could read every file there."""
    with os.scandir("/dev") as entries:
        return [Path(entry.path) for entry in entries if stat.S_ISBLK(entry.stat(follow_symlinks=False).st_mode)]


def _cover(hidden: Iterable[Path], readonly: Iterable[Path], writable: Iterable[Path]) -> None:
    mounts = mounts_in_order(hidden, readonly, writable)
    # Opened before anything is covered, to be reached afterwards.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path, kind in mounts if kind == "writable"}
    for path, kind in mounts:
        if kind == "writable":
            path.mkdir(parents=True, exist_ok=True)
            _mount(f"/proc/self/fd/{sources[path]}", str(path), None, MS_BIND)
        elif kind == "readonly":
            _mount(str(path), str(path), None, MS_BIND | MS_REC)
            known = sum(flag for known, flag in _FLAGS.items() if os.statvfs(path).f_flag & known)
            _mount(None, str(path), None, MS_BIND | MS_REMOUNT | MS_RDONLY | known)
        elif path.is_dir():
            _mount("tmpfs", str(path), "tmpfs", 0, "size=1m,mode=755")
        else:
            _mount(os.devnull, str(path), None, MS_BIND)
    for descriptor in sources.values():
        os.close(descriptor)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc().mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def _drop_capabilities(kept: Iterable[int]) -> None:
    mask = sum(1 << number for number in kept)
    number = 0
    while number < 64 and _prctl(PR_CAPBSET_READ, number) >= 0:  # until there is no such capability
        if not mask & 1 << number:
            _check(_prctl(PR_CAPBSET_DROP, number), "drop a capability")
        number += 1
    _check(_prctl(PR_SET_NO_NEW_PRIVS, 1), "no new privileges")
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    _check(_libc().capset(header, data), "capset")
