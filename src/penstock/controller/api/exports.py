"""Copies of what a run has come to, for downloads: each is written once, never changed, and known by its own name.

A client first learns a file's size and fetches it later, while the run goes on: so what it was told of is kept. No copy holds a
secret of the run.
"""

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from penstock.controller.api.progress import Tried, open_results
from penstock.controller.api.trajectories import trajectory
from penstock.controller.runlog import Strike
from penstock.controller.runs import Run, RunFiles
from penstock.controller.vault import Vault
from penstock.errors import ControllerError
from penstock.records import Attempt, Task

KEPT = 8
"""Copies of a file that changes, such as the log of a run that goes on; older ones are removed."""
TEXT_BYTES = 16 << 20
"""Of an agent's own file that is looked through for secrets."""


@dataclass(frozen=True, slots=True)
class Exports:
    """Of one run. They are read and written where this is called: in a thread, but for `keep_trajectories`."""

    run: Run
    files: RunFiles
    strike: Strike | None
    """None where the run has no secrets."""

    @property
    def folder(self) -> Path:
        """Where the copies are."""
        return self.files.path / "exports"

    def keep(self, stem: str, suffix: str, content: bytes) -> Path:
        """A copy of something that may change."""
        content = self._clean(content)
        path = self.folder / f"{stem}-{sha256(content).hexdigest()[:32]}{suffix}"
        if not path.exists():
            self._write(path, content)
            older = sorted(self.folder.glob(f"{stem}-*{suffix}"), key=lambda each: each.stat().st_mtime)
            for each in older[:-KEPT]:
                each.unlink(missing_ok=True)
        return path

    async def keep_trajectories(self, tried: Iterable[Tried]) -> dict[Tried, Path]:
        """A copy of each; what has ended does not change, so that it is made once."""
        wanted = {each: self.folder / f"trajectory-{each.rollout_id}.json" for each in tried}
        missing = [each for each, path in wanted.items() if not path.exists()]
        pool = await asyncio.to_thread(open_results, self.files.results(self.run)) if missing else None
        if pool is None:
            return {each: path for each, path in wanted.items() if each not in missing}
        try:
            for each in missing:
                attempt, task = await pool.attempt(each.rollout_id), await pool.task(each.rollout_id)
                await asyncio.to_thread(self._keep_trajectory, wanted[each], each.row, task, attempt)
        finally:
            await pool.close()
        return wanted

    def _keep_trajectory(self, path: Path, row: int, task: Task, attempt: Attempt) -> None:
        self._write(path, self._clean(trajectory(self.run, row, task, attempt)))

    def clean_copy(self, file: Path) -> Path:
        """An agent's own file; a copy where it holds a secret."""
        if self.strike is None or file.stat().st_size > TEXT_BYTES:
            return file
        content = file.read_bytes()
        if self._clean(content) == content:
            return file
        return self.keep(f"artifact-{sha256(str(file).encode()).hexdigest()[:16]}", "", content)

    def _clean(self, content: bytes) -> bytes:
        if self.strike is None:
            return content
        try:
            return self.strike(content.decode()).encode()
        except UnicodeDecodeError:
            return content

    def _write(self, path: Path, content: bytes) -> None:
        """Whole or not at all; two that write the same thing do not meet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def striking(run: Run, vault: Vault) -> Strike | None:
    """What takes the run's secrets out of a text; those that were removed since are not known any more."""
    values: list[str] = []
    for name in run.submission.secrets:
        try:
            values += vault.values([name]).values()
        except ControllerError:
            continue
    return Strike(values) if values else None
