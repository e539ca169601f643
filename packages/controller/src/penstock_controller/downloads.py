"""Downloads of run outputs, and uploads and downloads of datasets. A file appears only when it is complete."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from penstock.config import RunKind
from penstock.errors import ConfigError, ControllerError
from penstock_controller.client import ControllerClient, ProgressCallback, download_file, upload_file

MAX_PARALLEL = 8
MAX_LINKS = 500
"""The most links that one request may ask for."""
EXTENSIONS = ("jsonl", "csv", "parquet")


@dataclass(slots=True)
class DownloadResult:
    downloaded: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])
    """Files that exist already with the right size."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Error messages by path."""
    bytes: int = 0
    """Total size of the downloaded files."""


@dataclass(frozen=True, slots=True)
class RunDownload:
    """The download of one run's files into a folder; shared by several threads."""

    client: ControllerClient
    kind: RunKind
    run_id: str
    folder: Path
    result: DownloadResult = field(default_factory=DownloadResult)
    lock: Any = field(default_factory=Lock)

    def download(self, item: Mapping[str, Any], size: int, counter: "ProgressCounter") -> None:
        """Downloads one file; an error is recorded and does not affect other files."""
        path = str(item["path"])
        try:
            target = safe_path(self.folder, path)
            make_folder(target.parent)
            try:
                download_file(str(item["url"]), target, size=size, advance=counter)
            except ControllerError as error:
                if error.status != 403:
                    raise
                download_file(self._new_link(item), target, size=size, advance=counter)  # the link expired while it waited
        except (ControllerError, ConfigError) as error:
            with self.lock:
                self.result.failed[path] = str(error)
            return
        with self.lock:
            self.result.downloaded.append(path)
            self.result.bytes += size

    def _new_link(self, item: Mapping[str, Any]) -> str:
        requested = {key: item[key] for key in ("path", "token") if item.get(key)}
        return str(self.client.download_urls(self.kind, self.run_id, [requested])["items"][0]["url"])


class ProgressCounter:
    """Sums up the bytes that several threads have downloaded, and reports them."""

    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self._done, self._total, self._progress, self._lock = 0, total, progress, Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress("downloading", self._done, self._total)


def download_files(
    client: ControllerClient,
    kind: RunKind,
    run_id: str,
    files: Sequence[Mapping[str, Any]],
    into: Path,
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> DownloadResult:
    """Downloads files of a run's manifest in parallel; skips those that exist with the right size."""
    make_folder(into)
    download = RunDownload(client, kind, run_id, into)
    requested: list[Mapping[str, Any]] = []
    for file in files:
        path, size = str(file["path"]), int(file["size"])
        try:
            target = safe_path(into, path)
        except ConfigError as error:
            download.result.failed[path] = str(error)
            continue
        if not overwrite and target.is_file() and target.stat().st_size == size:
            download.result.skipped.append(path)
        else:
            requested.append(file)
    counter = ProgressCounter(sum(int(file["size"]) for file in requested), progress)
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        for first in range(0, len(requested), MAX_LINKS):
            _download_batch(download, requested[first : first + MAX_LINKS], pool, counter)
    return download.result


def _download_batch(
    download: RunDownload, files: Sequence[Mapping[str, Any]], pool: ThreadPoolExecutor, counter: ProgressCounter
) -> None:
    requested = [{key: file[key] for key in ("path", "token") if file.get(key)} for file in files]
    sizes = {str(file["path"]): int(file["size"]) for file in files}
    items: list[dict[str, Any]] = download.client.download_urls(download.kind, download.run_id, requested)["items"]
    linked = {str(item["path"]) for item in items}
    download.result.failed.update({path: "the controller gave no link for it" for path in sizes if path not in linked})
    wait([pool.submit(download.download, item, sizes[str(item["path"])], counter) for item in items if str(item["path"]) in sizes])


def upload_dataset(
    client: ControllerClient,
    path: Path,
    *,
    name: str | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Uploads a file as the dataset `name` (default: the file's stem) and returns the dataset.

    If the name is in use, raises ControllerError with status 409 unless `overwrite`; the old content stays until the new is valid.
    """
    extension, size = check_dataset_file(path)
    dataset = _begin_upload(client, name or path.stem, size, extension, overwrite=overwrite)
    try:
        _send_file(path, dataset["upload"], progress)
        return client.complete_dataset(str(dataset["id"]), extension=extension)
    except BaseException:
        with suppress(ControllerError):  # the first error is the one to report
            client.abort_dataset(str(dataset["id"]))
        raise


def check_dataset_file(path: Path) -> tuple[str, int]:
    """Returns the extension and the size of a dataset file; ConfigError if it cannot be one."""
    extension = path.suffix.removeprefix(".").lower()
    if extension not in EXTENSIONS:
        raise ConfigError(f"{path}: give a file that ends in {', '.join('.' + each for each in EXTENSIONS)}")
    try:
        with path.open("rb") as file:
            return extension, file.seek(0, os.SEEK_END)
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be read: {cause.strerror}; give the path of a dataset") from cause


def _begin_upload(client: ControllerClient, name: str, size: int, extension: str, *, overwrite: bool) -> dict[str, Any]:
    try:
        return client.begin_dataset(name, size=size, extension=extension)
    except ControllerError as error:
        known = error.details.get("existing_dataset_id")
        if not (overwrite and error.status == 409 and known):
            raise
        return client.begin_dataset(name, size=size, extension=extension, overwrite_id=str(known))


def _send_file(path: Path, upload: Mapping[str, Any], progress: ProgressCallback | None) -> None:
    if upload.get("method") != "simple":
        raise ControllerError("the controller asks for an upload in parts; this client sends files whole", code="UPLOAD_UNKNOWN")
    upload_file(str(upload["presigned_url"]), path, dict(upload.get("upload_headers") or {}), progress)


def download_dataset(
    client: ControllerClient,
    ref: str,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Downloads a dataset's file to `output`: a file, or a folder (existing, or written `NAME/`; default: the current one)."""
    record = client.dataset(ref)
    link = client.dataset_link(ref)
    name = PurePosixPath(str(link.get("file_name") or record.get("file_name") or "dataset")).name
    path = Path(output or "")
    target = safe_path(path, name) if path.is_dir() or str(output).endswith("/") else path
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} is there already and stays; give another place with -o, or --overwrite")
    make_folder(target.parent)
    size = record.get("file_size")
    counter = ProgressCounter(int(size or 0), progress)
    download_file(str(link["presigned_url"]), target, advance=counter)
    return target


def safe_path(folder: Path, path: str) -> Path:
    """Returns a controller's `path` under `folder`; ConfigError if it leads outside."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\\" in path or "\0" in path or ".." in parts:
        raise ConfigError(f"the controller names a file {path!r}, which would lie outside of {folder}; it is left out")
    return folder.joinpath(*parts)


def make_folder(folder: Path) -> None:
    """Creates the folder if needed; ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"{folder}: cannot be written to: {cause.strerror}; give another place with -o") from cause
