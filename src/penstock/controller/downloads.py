"""Files from and to a controller: what a run left, datasets both ways. A file that is there is whole."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from penstock.controller.client import ControllerClient, ProgressCallback, download_file, upload_file
from penstock.controller.runs import RunKind
from penstock.errors import ConfigError, ControllerError

MAX_PARALLEL = 8
MAX_LINKS = 500
"""The most links that are asked for at once."""
EXTENSIONS = ("jsonl", "csv", "parquet")


@dataclass(slots=True)
class DownloadResult:
    """What came of a download."""

    downloaded: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])
    """Those that were there with the right size."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Why, by path."""
    bytes: int = 0
    """Of those that were downloaded."""


@dataclass(frozen=True, slots=True)
class RunDownload:
    """Where the files of one run go, and how far that is."""

    client: ControllerClient
    kind: RunKind
    run_id: str
    path: Path
    fetched: DownloadResult = field(default_factory=DownloadResult)
    lock: Any = field(default_factory=Lock)

    def fetch(self, item: Mapping[str, Any], size: int, tell: "ProgressCounter") -> None:
        """One file; what goes wrong with it is noted and keeps no other from coming."""
        path = str(item["path"])
        try:
            target = safe_path(self.path, path)
            make_folder(target.parent)
            try:
                download_file(str(item["url"]), target, size=size, advance=tell)
            except ControllerError as error:
                if error.status != 403:
                    raise
                download_file(self._new_link(item), target, size=size, advance=tell)  # the link was over before its turn came
        except (ControllerError, ConfigError) as error:
            with self.lock:
                self.fetched.failed[path] = str(error)
            return
        with self.lock:
            self.fetched.downloaded.append(path)
            self.fetched.bytes += size

    def _new_link(self, item: Mapping[str, Any]) -> str:
        asked = {key: item[key] for key in ("path", "token") if item.get(key)}
        return str(self.client.download_urls(self.kind, self.run_id, [asked])["items"][0]["url"])


class ProgressCounter:
    """Adds up what several threads have fetched."""

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
    """Fetch files of a run's manifest into a folder, several at once; a file of the right size is there already."""
    make_folder(into)
    folder = RunDownload(client, kind, run_id, into)
    wanted: list[Mapping[str, Any]] = []
    for file in files:
        path, size = str(file["path"]), int(file["size"])
        try:
            target = safe_path(into, path)
        except ConfigError as error:
            folder.fetched.failed[path] = str(error)
            continue
        if not overwrite and target.is_file() and target.stat().st_size == size:
            folder.fetched.skipped.append(path)
        else:
            wanted.append(file)
    tell = ProgressCounter(sum(int(file["size"]) for file in wanted), progress)
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        for first in range(0, len(wanted), MAX_LINKS):
            _download_batch(folder, wanted[first : first + MAX_LINKS], pool, tell)
    return folder.fetched


def _download_batch(
    folder: RunDownload, files: Sequence[Mapping[str, Any]], pool: ThreadPoolExecutor, tell: ProgressCounter
) -> None:
    asked = [{key: file[key] for key in ("path", "token") if file.get(key)} for file in files]
    sizes = {str(file["path"]): int(file["size"]) for file in files}
    items: list[dict[str, Any]] = folder.client.download_urls(folder.kind, folder.run_id, asked)["items"]
    came = {str(item["path"]) for item in items}
    folder.fetched.failed.update({path: "the controller gave no link for it" for path in sizes if path not in came})
    wait([pool.submit(folder.fetch, item, sizes[str(item["path"])], tell) for item in items if str(item["path"]) in sizes])


def upload_dataset(
    client: ControllerClient,
    path: Path,
    *,
    name: str | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Send a file as a dataset named `name`, else as the file is; the dataset as the controller has it then.

    Where one of that name is there, ControllerError CONFLICT, unless it is to be replaced; it stays until the new one is whole.
    """
    extension, size = check_dataset_file(path)
    begun = _begin_upload(client, name or path.stem, size, extension, overwrite=overwrite)
    try:
        _send_file(path, begun["upload"], progress)
        return client.complete_dataset(str(begun["id"]), extension=extension)
    except BaseException:
        with suppress(ControllerError):  # what went wrong is the news
            client.abort_dataset(str(begun["id"]))
        raise


def check_dataset_file(path: Path) -> tuple[str, int]:
    """The kind and the size of a file that can be a dataset; ConfigError for others."""
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
    """Fetch a dataset's file into the current folder, to a file, or into a folder (one that is there, or `NAME/`)."""
    record = client.dataset(ref)
    link = client.dataset_link(ref)
    name = PurePosixPath(str(link.get("file_name") or record.get("file_name") or "dataset")).name
    place = Path(output or "")
    target = safe_path(place, name) if place.is_dir() or str(output).endswith("/") else place
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} is there already and stays; give another place with -o, or --overwrite")
    make_folder(target.parent)
    size = record.get("file_size")
    tell = ProgressCounter(int(size or 0), progress)
    download_file(str(link["presigned_url"]), target, advance=tell)
    return target


def safe_path(folder: Path, path: str) -> Path:
    """`path` of a controller's answer under `folder`; ConfigError for one that leads elsewhere."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\\" in path or "\0" in path or ".." in parts:
        raise ConfigError(f"the controller names a file {path!r}, which would lie outside of {folder}; it is left out")
    return folder.joinpath(*parts)


def make_folder(folder: Path) -> Path:
    """The folder, made if need be; ConfigError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"{folder}: cannot be written to: {cause.strerror}; give another place with -o") from cause
    return folder
