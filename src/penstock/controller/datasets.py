"""Datasets: files under names. A new file takes its name's place only once it is whole and every row of it was looked at."""

import asyncio
import threading
from collections.abc import AsyncIterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from penstock.controller.database import Database
from penstock.controller.dataset_checks import check_dataset
from penstock.controller.dataset_files import DatasetFiles, digest_of
from penstock.controller.dataset_rows import Dataset, DatasetRows, Upload, check_wish, error_of, is_forgotten, over, refused
from penstock.errors import ControllerError, DatasetError

LARGEST_MB = 5000
PATIENCE_S = 20.0
"""How long `complete` waits for the look at a file: a client waits 30 s. What takes longer goes on as `processing`."""

__all__ = ["Dataset", "Datasets", "Upload"]


class Datasets:
    """All of them. Files are looked at in threads, one after the other; a look that `close` or a kill broke off is begun again."""

    def __init__(self, database: Database, folder: Path, *, largest_mb: int = LARGEST_MB, patience_s: float = PATIENCE_S) -> None:
        self._rows, self._files = DatasetRows(database), DatasetFiles(folder)
        self._largest, self._patience_s = largest_mb * 1_000_000, patience_s
        self._one_look, self._settling = threading.Lock(), threading.Lock()
        self._checks: dict[str, Future[None]] = {}
        self._closing = False
        self.logs = self._rows.logs
        self._recover()

    def close(self) -> None:
        """Change nothing any more; a look that goes on comes to nothing."""
        with self._settling:
            self._closing = True

    def get(self, ref: str) -> Dataset:
        """By id or name; ControllerError 404 where there is none."""
        found = self._rows.find(ref)
        if found is None:
            text = f"there is no dataset {ref[:200]!r}; see: penstock dataset list"
            raise ControllerError(text, code="DATASET_NOT_FOUND", status=404)
        return self._placed(found)

    def page(self, *, limit: int, offset: int) -> tuple[list[Dataset], int]:
        """Newest first, and how many there are in all."""
        found, total = self._rows.page(limit=limit, offset=offset)
        return [self._placed(each) for each in found], total

    def upload(self, ref: str) -> Upload | None:
        """What is on its way to a dataset."""
        return next(iter(self._rows.uploads(self.get(ref).id)), None)

    def begin(self, name: str, size: int, extension: str, overwrite_id: str | None = None, *, creator: str = "") -> Dataset:
        """Expect a file for a name without content, or for the one that `overwrite_id` is, whose content stays until `complete`.

        ControllerError 409 for a name in use, with `existing_dataset_id`.
        """
        check_wish(name, size, extension, largest=self._largest)
        before = self._rows.find(name)
        forgotten = self._rows.uploads(before.id) if before else []
        upload = self._rows.begin(name, size, extension, overwrite_id=overwrite_id, creator=creator)
        for each in forgotten:
            self._files.discard(each.key)
        return self._as_uploaded(upload)

    async def receive(self, dataset_id: str, stream: AsyncIterable[bytes], *, key: str | None = None) -> None:
        """Take a file as it comes; one of another size than was told is refused. It may be sent again until `complete`.

        `key` is of the upload that the caller was let in for.
        """
        upload = self._expected(dataset_id, key)
        self._rows.move(upload, "uploading")
        try:
            digest = await self._files.receive(upload, stream)
        except BaseException as error:
            if not self._is_current(upload) and isinstance(error, ControllerError):
                raise over(dataset_id) from error
            if self._is_current(upload):
                self._rows.move(upload, upload.state)
            raise
        await asyncio.to_thread(self._received, upload, digest)

    async def complete(self, dataset_id: str, extension: str | None = None) -> Dataset:
        """Look at every row, then put the file in its place. Repeating it is harmless, and tells of a flaw again (DatasetError)."""
        upload = self.upload(dataset_id)
        known = self.get(dataset_id)  # after it: a look that ended meanwhile has changed both
        if upload is None:
            return _had(known)
        if upload.error is not None:
            raise error_of(upload.error)
        if extension is not None and extension.lower().lstrip(".") != upload.extension:
            raise refused(f"dataset {known.name!r} was begun as {upload.extension}, not {extension[:20]!r}", "file_extension")
        if upload.digest is None:
            text = f"dataset {known.name!r}: its file has not arrived; upload it first"
            raise ControllerError(text, code="UPLOAD_MISSING", status=409)
        try:
            look = asyncio.wrap_future(self._begin_check(upload))
        except ControllerError:
            if self.upload(dataset_id) == upload:
                raise
            return await self.complete(dataset_id, extension)  # another call's look ended just now
        done, _ = await asyncio.wait({look}, timeout=self._patience_s)
        if not done:
            look.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return self._as_uploaded(replace(upload, state="processing"))
        look.result()
        return self.get(known.id)

    def abort(self, dataset_id: str) -> Dataset:
        """Give up what is on its way; content that was there stays. Repeating it is harmless."""
        known = self.get(dataset_id)
        for upload in self._rows.uploads(known.id):
            self._rows.cancel(upload, "the upload was cancelled")
            self._files.discard(upload.key)
        return self.get(known.id)

    def add_file(self, path: Path, name: str, *, overwrite: bool = False, creator: str = "") -> Dataset:
        """Keep a copy of a file of this machine, looked at as an upload is; one that is known under the name is left.

        It waits for the disk and for the look: call it in a thread.
        """
        extension, known = path.suffix.lower().lstrip("."), self._rows.find(name)
        if not path.is_file():
            raise DatasetError(f"{path}: no such file; check the path")
        if known is not None and known.digest is not None and (known.digest, known.extension) == (digest_of(path), extension):
            return self._placed(known)
        replaced = known.id if overwrite and known is not None else None
        begun = self.begin(name, path.stat().st_size, extension, replaced, creator=creator)
        upload = self._expected(begun.id, None)
        self._received(upload, self._files.copy(upload, path))
        self._begin_check(self._expected(begun.id, upload.key)).result()
        return self.get(begun.id)

    def _recover(self) -> None:
        """Go on where a killed controller stopped: give up old uploads, sweep files of none, and look on where a look was begun."""
        for upload in self._rows.uploads():
            if is_forgotten(upload):
                self._rows.cancel(upload, "the upload was never completed")
            elif upload.digest is not None and upload.error is None and self._files.find(upload, upload.digest) is None:
                self._rows.lost(upload)
            elif upload.state == "uploading":
                self._rows.move(upload, "pending" if upload.digest is None else "received")
        waiting = [(each, each.digest) for each in self._rows.uploads() if each.digest is not None and each.error is None]
        self._files.sweep({self._files.draft(upload, digest) for upload, digest in waiting})
        for upload, _ in waiting:
            if upload.state == "processing":
                self._begin_check(upload)

    def _expected(self, dataset_id: str, key: str | None) -> Upload:
        upload = self.upload(dataset_id)
        if upload is None or upload.state in ("processing", "failed") or (key is not None and key != upload.key):
            raise over(dataset_id)
        return upload

    def _received(self, upload: Upload, digest: str) -> None:
        try:
            self._rows.received(upload, digest)
        except ControllerError:
            if not self._is_current(upload):
                self._files.discard(upload.key)
            raise

    def _begin_check(self, upload: Upload) -> "Future[None]":
        """The look at an upload's file, which is made once however often it is asked for."""
        running = self._checks.get(upload.key)
        if running is None:
            moved, running = self._rows.move(upload, "processing"), Future[None]()
            self._checks[upload.key] = running
            threading.Thread(target=self._look, args=(moved, running), name="dataset-look", daemon=True).start()
        return running

    def _look(self, upload: Upload, told: "Future[None]") -> None:
        try:
            with self._one_look:
                self._check(upload)
        except Exception as error:
            told.set_exception(error)
        else:
            told.set_result(None)
        finally:
            self._checks.pop(upload.key, None)

    def _check(self, upload: Upload) -> None:
        """From a file that waits to the content of its name, or to what is wrong with it."""
        with self._settling:
            self._refuse_end()
            name, file = self.get(upload.dataset).name, self._files.find(upload, str(upload.digest))
            if file is None:
                self._rows.lost(upload)
                raise ControllerError(f"dataset {name!r}: its file is gone; upload it again", code="UPLOAD_MISSING", status=409)
        flaw, rows = None, 0
        try:
            rows = check_dataset(file, f"{name}.{upload.extension}")
        except DatasetError as error:
            flaw = error
        with self._settling:
            self._refuse_end()
            if flaw is None:
                self._files.keep(upload, str(upload.digest))
                self._rows.settle(upload, rows)
                return
            self._rows.fail(upload, flaw)
            self._files.discard(upload.key)
            raise flaw

    def _refuse_end(self) -> None:
        if self._closing:
            text = "the controller stopped while it looked at the file; complete the upload again"
            raise ControllerError(text, code="CONTROLLER_STOPPING", status=503)

    def _is_current(self, upload: Upload) -> bool:
        return any(each.key == upload.key for each in self._rows.uploads(upload.dataset))

    def _as_uploaded(self, upload: Upload) -> Dataset:
        """The dataset as it will be, if all goes well."""
        return replace(self.get(upload.dataset), status=upload.state, size=upload.size, extension=upload.extension)

    def _placed(self, dataset: Dataset) -> Dataset:
        return dataset if dataset.digest is None else replace(dataset, path=self._files.content(dataset.digest, dataset.extension))


def _had(dataset: Dataset) -> Dataset:
    """A dataset that expects nothing: it has its content, or there is no use in completing it."""
    if dataset.digest is None:
        text = f"dataset {dataset.name!r}: {dataset.message or 'nothing was uploaded'}; begin the upload again"
        raise ControllerError(text, code="UPLOAD_OVER", status=409)
    return dataset
