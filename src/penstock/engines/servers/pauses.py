"""Servers that are paused for new weights, and how they are brought back whatever happens.

Before a server is paused, the requests that would bring it back are noted in two places: with a child process (this module run with
`python -m`), which sends them if our process dies, and in a locked file, which the next run reads if the child died too. The same
requests are sent if new weights fail to load: a server whose loading broke off has layers without weights, and the next token that
it samples kills it, so it gets its previous weights back before it resumes. Whoever sends them holds the file's lock: no other run
changes the server meanwhile.

The file also says which start of the server has had its weights changed, for servers that cannot name their weights.
"""

import asyncio
import json
import os
import select
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Sequence
from hashlib import blake2b
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from penstock.system.files import FileLock
from penstock.system.processes import module_command, spawn_detached

STEP_S = 600.0
"""Timeout of one request: reading weights takes long."""
RESUME_S = 10.0
"""How long this process tries to resume a server; the child process keeps trying."""
CHILD_RESUME_S = 120.0
RETRY_S = 0.2
LOCK_S = 30.0
"""How long another run on this machine may take to change the weights of the same server."""
POLL_S = 0.5


class ServerCall(NamedTuple):
    """A POST to a server, or a GET if it has no body."""

    path: str
    body: dict[str, Any] | None
    answer: str | None = ""
    """What the answer must hold to be believed: something else may answer in the server's place. None believes no answer: the
    next call of the step asks whether this one had its effect."""


RecoverySteps = Sequence[Sequence[ServerCall]]
"""The requests that bring a server back, in order. Of each step, the first request that succeeds ends it. The last step resumes."""


class Recovery(NamedTuple):
    url: str
    steps: RecoverySteps
    key: str = ""

    def run(self, *, resume_s: float = RESUME_S, step_s: float = STEP_S) -> bool:
        """Send the requests; returns whether the server was resumed. Blocks.

        Steps before the last may fail, unless they ask whether they had their effect: what follows would do harm without it.
        """
        for step in self.steps:
            last = step is self.steps[-1]
            deadline = time.monotonic() + resume_s
            while not any(self._post(call, min(resume_s, step_s) if last else step_s) for call in step):
                if not last and step[0].answer is not None:
                    break
                if time.monotonic() >= deadline:
                    return False
                time.sleep(RETRY_S)
        return True

    def _post(self, call: ServerCall, limit_s: float) -> bool:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        body = None if call.body is None else json.dumps(call.body).encode()
        request = urllib.request.Request(self.url + call.path, body, headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=limit_s) as answer:
                return call.answer is not None and call.answer.encode() in answer.read()
        except (OSError, ValueError, HTTPException):  # an error status, a closed or silent connection, an answer that is none
            return False


class PauseRecord(NamedTuple):
    """What the file of a server says."""

    steps: RecoverySteps = ()
    """What brings it back; empty if it is not paused."""
    changed: str = ""
    """The start of the server whose weights were changed last, as the server reports it."""


class PausedServers:
    """The servers that this process has paused, noted for the case that it dies."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self._folder, self._key = folder, key
        self._locks: dict[str, FileLock | None] = {}
        self._pipe: int | None = None
        self._child: int | None = None

    def __contains__(self, url: str) -> bool:
        return url in self._locks

    async def add(self, url: str, steps: RecoverySteps, *, changed: str = "") -> bool:
        """Note a server that is about to be paused; False if another run of this machine has paused it.

        `changed` is the start of the server if its weights are about to be changed.
        """
        if url not in self._locks:
            lock = _open_record(self._folder, url)
            if lock is not None and not await lock.wait_async(LOCK_S):
                lock.close()
                return False
            self._locks[url] = lock
        changed = changed or read_record(self._folder, url).changed
        noted = _write_record(self._locks[url], PauseRecord(steps, changed))
        self._tell(url, steps, noted=noted)
        return True

    def discard(self, url: str) -> None:
        """Note that a server was resumed."""
        lock = self._locks.pop(url, None)
        if lock is not None:
            _write_record(lock, read_record(self._folder, url)._replace(steps=()))
            lock.close()
        self._tell(url, (), noted=False)

    async def close(self) -> None:
        """Let the child process bring back what is still paused, and end."""
        if self._pipe is None or self._child is None:
            return
        for lock in filter(None, self._locks.values()):
            lock.close()
        os.close(self._pipe)
        child, self._pipe = self._child, None
        if not self._locks:
            await asyncio.to_thread(os.waitpid, child, 0)

    def remove_if_killed(self, folder: Path) -> None:
        """Have a folder removed if this process dies, after the servers that may read it were brought back."""
        self._send({"remove": str(folder)})

    def _tell(self, url: str, steps: RecoverySteps, *, noted: bool) -> None:
        self._send({"url": url, "key": self._key, "steps": steps, "folder": str(self._folder) if noted else ""})

    def _send(self, note: dict[str, Any]) -> None:
        if self._pipe is None:
            reading, self._pipe = os.pipe()
            self._child = spawn_detached(module_command(__name__), log=Path(os.devnull), stdin=reading)
            os.close(reading)
        os.write(self._pipe, json.dumps(note).encode() + b"\n")


def bring_back_left(folder: Path, url: str, key: str = "") -> bool | None:
    """Resume a server that a dead process of this machine left paused; None if none did, else whether it was resumed. Blocks."""
    if not _record_path(folder, url).exists():
        return None
    with FileLock(_record_path(folder, url)) as lock:
        # Its child process may be at it, another process of it may still end, or a run that lives is changing the server.
        if not lock.wait(LOCK_S) or not (record := read_record(folder, url)).steps:
            return None
        resumed = Recovery(url, record.steps, key).run()
        if resumed:
            _write_record(lock, record._replace(steps=()))
        return resumed


def read_record(folder: Path, url: str) -> PauseRecord:
    try:
        found = json.loads(_record_path(folder, url).read_bytes())
        return PauseRecord(_parse_steps(found["steps"]), str(found.get("changed", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return PauseRecord()


def _record_path(folder: Path, url: str) -> Path:
    return folder / f"{blake2b(url.encode(), digest_size=8).hexdigest()}.json"


def _open_record(folder: Path, url: str) -> FileLock | None:
    """The file of a server; None where the disk does not take it. The child process is then the only safeguard."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FileLock(_record_path(folder, url), mode=0o600)
    except OSError:
        return None


def _write_record(lock: FileLock | None, record: PauseRecord) -> bool:
    """Whether the disk took it; if not, the child process is left."""
    if lock is None:
        return False
    try:
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, json.dumps(record._asdict()).encode(), 0)
        os.fsync(lock.descriptor)
    except OSError:
        return False
    return True


def _parse_steps(steps: Any) -> list[list[ServerCall]]:
    return [[ServerCall(*call) for call in step] for step in steps]


# The child process


def main() -> None:
    """Read notes from stdin until the parent is gone, then bring back what it left paused."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they may be meant for the whole group, and this is needed then
    paused: dict[str, tuple[Recovery, Path | None]] = {}
    removed: list[str] = []
    for line in _lines_of_parent():
        note = json.loads(line)
        if "remove" in note:
            removed.append(note["remove"])
            continue
        paused.pop(note["url"], None)
        if note["steps"]:
            recovery = Recovery(note["url"], _parse_steps(note["steps"]), note["key"])
            paused[note["url"]] = recovery, Path(note["folder"]) if note["folder"] else None
    threads = [threading.Thread(target=_bring_back, args=each) for each in paused.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)


def _lines_of_parent() -> Any:
    parent, rest = os.getppid(), b""
    while True:
        # A process that the parent forked may hold the pipe open, so its end is not waited for alone.
        if not select.select([0], [], [], POLL_S)[0]:
            if os.getppid() != parent:
                return
            continue
        piece = os.read(0, 1 << 16)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _bring_back(recovery: Recovery, folder: Path | None) -> None:
    if folder is None or (lock := _open_record(folder, recovery.url)) is None:
        recovery.run(resume_s=CHILD_RESUME_S)
        return
    with lock:
        held = lock.wait(LOCK_S)  # a process that ours forked may keep it
        record = read_record(folder, recovery.url)
        if record.steps != recovery.steps:
            return  # a later run has brought the server back, and may be changing its weights now
        if recovery.run(resume_s=CHILD_RESUME_S) and held:
            _write_record(lock, record._replace(steps=()))


if __name__ == "__main__":
    main()
