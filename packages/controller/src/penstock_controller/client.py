"""HTTP client of a controller: JSON requests, file uploads and downloads. Every failure is a ControllerError."""

import http.client
import os
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import orjson

from penstock import __version__
from penstock.config import RunKind
from penstock.errors import ConfigError, ControllerError
from penstock.system.files import replacing
from penstock_controller.identity import GIT_HEADER, NO_REPOSITORY

ROUTES: Mapping[RunKind, str] = {"eval": "eval-runs", "train": "training-runs"}
PAGE_ROWS = 50
"""The largest page of a list."""
CHUNK_BYTES = 256 * 1024
FILE_TIMEOUT_S = 300.0
RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts to send or fetch a file."""
RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})
"""Statuses after which a file transfer is repeated."""
T = TypeVar("T")
Scope = Literal["all", "user", "workspace"]
JsonObject = dict[str, Any]
ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the stage, the amount done, and the total amount or None."""


class ControllerClient:
    """A controller's API, one method per route. A `ref` is a name or an id.

    Only file transfers are retried: a request that changes something is sent once.
    """

    def __init__(self, url: str, token: str | None, git: str | None = None, *, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.git = git
        """`owner/name` of the repository to take the code from if no snapshot is sent."""
        self.token = token
        self._timeout_s = timeout_s

    def health(self) -> JsonObject:
        return self._send("GET", "/health", token=False)

    def verify(self) -> JsonObject:
        """Returns whom the token belongs to."""
        return self._send_cli("GET", "verify")

    def authorize_device(self, device_name: str) -> JsonObject:
        """Starts a login, which the owner approves with `penstock controller approve`."""
        return self._send_cli("POST", "device/authorize", {"deviceName": device_name}, token=False)

    def device_token(self, device_code: str) -> JsonObject:
        """Returns the token of an approved login; until then a ControllerError with the message `authorization_pending`."""
        return self._send_cli("POST", "device/token", {"device_code": device_code}, token=False)

    def approve(self, user_code: str, *, person: str | None = None) -> JsonObject:
        """Approves the login with this code, as a device of `person`, or of nobody else."""
        return self._send_cli("POST", "device/approve", {"user_code": user_code} | ({"person": person} if person else {}))

    def tokens(self, *, limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """Returns a page of devices' tokens under `tokens`, newest first: the owner's all, another's own."""
        return self._send_cli("GET", "tokens", query={"limit": limit, "offset": offset})

    def revoke(self, token_id: str) -> JsonObject:
        return self._send_cli("DELETE", f"tokens/{_segment(token_id)}")

    def submit_run(self, kind: RunKind, body: Mapping[str, Any]) -> JsonObject:
        """Queues a run and returns its `id, name, status, created_at`. Takes as long as the controller's validation."""
        return self._send_cli("POST", ROUTES[kind], body, timeout_s=300.0)

    def runs(self, kind: RunKind, *, limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """Returns a page of runs under `eval_runs` or `training_runs`, newest first."""
        return self._send_cli("GET", ROUTES[kind], query={"limit": limit, "offset": offset})

    def run(self, kind: RunKind, ref: str) -> JsonObject:
        """Returns a run's details; the run itself is under `eval_run` or `training_run`."""
        return self._send_cli("GET", _run_path(kind, ref))

    def stop(self, kind: RunKind, ref: str) -> JsonObject:
        return self._send_cli("POST", _run_path(kind, ref, "stop"), {})

    def metrics(self, kind: RunKind, ref: str) -> JsonObject:
        return self._send_cli("GET", _run_path(kind, ref, "metrics"))

    def logs(
        self,
        kind: RunKind,
        ref: str,
        *,
        limit: int = PAGE_ROWS,
        cursor: str | None = None,
        direction: Literal["older", "newer"] = "older",
    ) -> JsonObject:
        """Returns a page of a run's log: backwards from the end, or with `newer` forwards from the beginning."""
        return self._send_cli("GET", _run_path(kind, ref, "logs"), query={"limit": limit, "direction": direction, "cursor": cursor})

    def checkpoints(self, ref: str) -> JsonObject:
        return self._send_cli("GET", _run_path("train", ref, "checkpoints"))

    def manifest(self, kind: RunKind, ref: str, *, types: Sequence[str], rows: str | None = None) -> JsonObject:
        """Returns the files of a run that can be downloaded: `{files: [{path, size, token?}], totals}`."""
        return self._send_cli("GET", _run_path(kind, ref, "samples/manifest"), query={"types": ",".join(types), "rows": rows})

    def download_urls(self, kind: RunKind, ref: str, items: Sequence[Mapping[str, Any]]) -> JsonObject:
        """Returns links to files of a manifest, at most 500 at once: `{items: [{path, url}]}`."""
        return self._send_cli("POST", _run_path(kind, ref, "samples/download-urls"), {"items": list(items)})

    def put_snapshot(self, archive: Path, digest: str, progress: ProgressCallback | None = None) -> JsonObject:
        """Uploads a code archive; the controller stores it by its SHA-256."""
        url = f"{self.url}/api/cli/snapshots/{digest}"
        return upload_file(
            url, archive, {**self._headers(), "content-type": "application/gzip"}, progress, stage="sending the code"
        )

    def begin_dataset(self, name: str, *, size: int, extension: str, overwrite_id: str | None = None) -> JsonObject:
        """Starts an upload; `upload` of the reply says where to send the file."""
        body: JsonObject = {"file_name": name, "file_size": size, "extension": extension}
        return self._send_cli("POST", "datasets", body | ({"overwrite_dataset_id": overwrite_id} if overwrite_id else {}))

    def complete_dataset(self, dataset_id: str, *, extension: str, parts: Sequence[Mapping[str, Any]] = ()) -> JsonObject:
        """Completes an upload and returns the dataset."""
        body: JsonObject = {"file_extension": extension} | ({"parts": list(parts)} if parts else {})
        return self._send_cli("POST", f"datasets/{_segment(dataset_id)}/complete", body, timeout_s=300.0)

    def abort_dataset(self, dataset_id: str) -> JsonObject:
        return self._send_cli("POST", f"datasets/{_segment(dataset_id)}/abort", {})

    def datasets(self, *, limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """Returns a page of datasets under `datasets`, newest first."""
        return self._send_cli("GET", "datasets", query={"limit": limit, "offset": offset})

    def dataset(self, ref: str) -> JsonObject:
        """Returns a dataset, with its first rows under `data_preview`."""
        return self._send_cli("GET", f"datasets/{_segment(ref)}")

    def dataset_link(self, ref: str) -> JsonObject:
        """Returns a link to the dataset's file: `presigned_url`, `file_name`."""
        return self._send_cli("GET", f"datasets/{_segment(ref)}/download")

    def dataset_logs(self, ref: str, *, limit: int = PAGE_ROWS, cursor: str | None = None) -> JsonObject:
        query = {"limit": limit, "direction": "older", "cursor": cursor}
        return self._send_cli("GET", f"datasets/{_segment(ref)}/logs", query=query)

    def models(self, kind: Literal["base", "lora"], *, limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """Returns a page of models under `models`: pretrained ones (`base`) or checkpoints (`lora`)."""
        return self._send_cli("GET", f"models/{kind}", query={"limit": limit, "offset": offset})

    def model(self, name: str) -> JsonObject:
        return self._send_cli("GET", f"models/{_segment(name)}")

    def deploy(self, name: str, *, engine: str | None = None) -> JsonObject:
        return self._send_cli("POST", f"models/{_segment(name)}/deploy", {"engine": engine} if engine else {}, timeout_s=300.0)

    def undeploy(self, name: str) -> JsonObject:
        return self._send_cli("POST", f"models/{_segment(name)}/undeploy", {})

    def secrets(self, *, scope: Scope = "all", limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """Returns a page of secrets, without values, under `environment_secrets`."""
        return self._send_cli("GET", "environment-secrets", query={"scope": scope, "limit": limit, "offset": offset})

    def set_secret(self, name: str, value: str, scope: Literal["user", "workspace"]) -> JsonObject:
        """Stores a secret, replacing one of the same name and scope."""
        return self._send_cli("POST", "environment-secrets", {"name": name, "value": value, "scope": scope})

    def delete_secret(self, name: str, scope: Literal["user", "workspace"]) -> JsonObject:
        return self._send_cli("DELETE", "environment-secrets", {"name": name, "scope": scope})

    def rollouts(self, *, limit: int = PAGE_ROWS, offset: int = 0, branch: str | None = None) -> JsonObject:
        """Returns a page of the rollouts in the client's repository, under `rollouts`."""
        return self._send_cli("GET", "rollouts", query={"limit": limit, "offset": offset, "branch": branch})

    def register_repository(self, name: str, path: Path) -> JsonObject:
        """Registers a folder on the controller's machine as `owner/name`."""
        return self._send_cli("POST", "repositories", {"name": name, "path": str(path)})

    def _send_cli(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        token: bool = True,
        timeout_s: float | None = None,
    ) -> JsonObject:
        chosen = {key: value for key, value in (query or {}).items() if value is not None}
        return self._send(method, f"/api/cli/{path}?{urlencode(chosen)}".rstrip("?"), body, token=token, timeout_s=timeout_s)

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: bool = True,
        timeout_s: float | None = None,
    ) -> JsonObject:
        headers = {GIT_HEADER: NO_REPOSITORY} if token and "/verify" not in path else {}
        request = HttpRequest(method=method, url=f"{self.url}{path}", headers=headers | self._headers(token=token))
        return send_json(request, body, timeout_s=timeout_s or self._timeout_s)

    def _headers(self, *, token: bool = True) -> dict[str, str]:
        headers = {"user-agent": f"penstock/{__version__}"}
        if self.git:
            headers[GIT_HEADER] = self.git
        if token and self.token:
            headers["authorization"] = f"Bearer {self.token}"
        return headers


def all_rows(fetch_page: Callable[[int], JsonObject], key: str) -> Iterator[JsonObject]:
    """Yields the rows of all pages of a list; `fetch_page` takes an offset."""
    offset: int | None = 0
    while offset is not None:
        page = fetch_page(offset)
        rows: list[JsonObject] = page.get(key) or []
        yield from rows
        offset = page.get("next_offset") if rows else None


def _run_path(kind: RunKind, ref: str, below: str = "") -> str:
    return f"{ROUTES[kind]}/{_segment(ref)}" + (f"/{below}" if below else "")


def _segment(text: str) -> str:
    """Quotes `text` as one path segment."""
    return quote(text, safe="") or "%20"


# HTTP.


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def send_json(request: HttpRequest, body: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """Sends JSON and returns the JSON object of the reply; an empty reply is `{}`."""
    content = None if body is None else orjson.dumps(body)
    typed = dict(request.headers) | ({} if content is None else {"content-type": "application/json"})
    with _open_response(request, content, typed, timeout_s=timeout_s) as response:
        return _parse_reply(request, response.status, _read(request, response))


def upload_file(
    url: str, path: Path, headers: Mapping[str, str], progress: ProgressCallback | None = None, *, stage: str = ""
) -> dict[str, Any]:
    """PUTs a file, with retries, and returns the reply; `stage` is passed to `progress`."""
    request = HttpRequest(method="PUT", url=url, headers=headers)
    label = stage or f"sending {path.name}"

    def attempt() -> dict[str, Any]:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            reader = _ProgressReader(file, lambda done: progress and progress(label, done, size))
            sized = {**headers, "content-length": str(size)}
            with _open_response(request, reader, sized, timeout_s=FILE_TIMEOUT_S) as response:
                return _parse_reply(request, response.status, _read(request, response))

    return _retry(attempt)


def download_file(url: str, path: Path, *, size: int | None = None, advance: Callable[[int], object] | None = None) -> int:
    """GETs into `path`, with retries; returns the number of bytes. `path` appears only when it is complete."""
    request = HttpRequest(method="GET", url=url)
    try:
        with replacing(path) as draft:
            return _retry(lambda: _download_once(request, draft, size, advance))
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be written: {cause.strerror or cause}; give another folder with -o") from cause


def _download_once(request: HttpRequest, draft: Path, size: int | None, advance: Callable[[int], object] | None) -> int:
    with _open_response(request, None, {}, timeout_s=FILE_TIMEOUT_S) as response:
        if response.status >= 400:
            _parse_reply(request, response.status, _read(request, response))
        promised = response.headers.get("content-length")
        expected = size if size is not None else int(promised) if promised else None
        written = 0
        with draft.open("wb") as out:
            while block := _read(request, response, CHUNK_BYTES):
                written += out.write(block)
                if advance is not None:
                    advance(len(block))
        if expected is not None and written != expected:
            text = f"{request.url}: {written} bytes came, {expected} were promised"
            raise ControllerError(f"{text}; try again", code="TRANSFER_CUT", status=502)
    return written


def _retry(attempt: Callable[[], T]) -> T:
    """Calls `attempt` until it succeeds; raises if the error is not transient, or after the last attempt."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return attempt()
        except ControllerError as error:
            if error.status is not None and error.status not in RETRY_STATUSES:
                raise
        time.sleep(pause_s)
    return attempt()


class _ProgressReader:
    """A file that reports its position after each read."""

    def __init__(self, file: BinaryIO, report: Callable[[int], object]) -> None:
        self._file, self._report = file, report

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(max(size, CHUNK_BYTES))  # http.client asks for small blocks
        self._report(self._file.tell())
        return block


@contextmanager
def _open_response(
    request: HttpRequest, body: bytes | _ProgressReader | None, headers: Mapping[str, str], *, timeout_s: float
) -> Generator[http.client.HTTPResponse]:
    """Sends a request and yields the response; closes the connection afterwards."""
    connection, target = _connection(request.url, timeout_s)
    try:
        with _translate_errors(request):
            try:
                connection.request(request.method, target, cast("Any", body), dict(headers))
            except (BrokenPipeError, ConnectionResetError):
                # The server may have refused the request before it read all of a file: its reply can still be read.
                if connection.sock is None:  # pyright: ignore[reportUnnecessaryComparison]
                    raise
            response = connection.getresponse()
        yield response
    finally:
        connection.close()


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is no address of a controller; write it as http://HOST:PORT")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=ssl.create_default_context()), target
    return http.client.HTTPConnection(host, port, timeout=timeout_s), target


@contextmanager
def _translate_errors(request: HttpRequest) -> Generator[None]:
    """Turns connection errors and timeouts into ControllerErrors."""
    origin = "/".join(request.url.split("/", 3)[:3])
    try:
        yield
    except TimeoutError as cause:
        text = f"the controller at {origin} did not answer in time"
        raise ControllerError(f"{text}; see: penstock controller status", code="CONTROLLER_TIMEOUT") from cause
    except (OSError, http.client.HTTPException) as cause:
        why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        text = f"no controller answers at {origin}: {why}"
        remedy = "start it with: penstock controller up, or correct PENSTOCK_CONTROLLER"
        raise ControllerError(f"{text}; {remedy}", code="CONTROLLER_UNREACHABLE") from cause


def _read(request: HttpRequest, response: http.client.HTTPResponse, size: int | None = None) -> bytes:
    with _translate_errors(request):
        return response.read() if size is None else response.read(size)


def _parse_reply(request: HttpRequest, status: int, content: bytes) -> dict[str, Any]:
    """Returns the JSON object of a reply; ControllerError if it is an error or no JSON object."""
    try:
        value: Any = orjson.loads(content) if content.strip() else {}
    except orjson.JSONDecodeError:
        value = None
    body = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    if status < 300 and body is not None:
        return body
    origin = "/".join(request.url.split("/", 3)[:3])
    if body is None:
        text = f"{origin} answers with something that is no controller's reply (status {status})"
        raise ControllerError(f"{text}; correct PENSTOCK_CONTROLLER", code="CONTROLLER_ANSWER", status=status)
    message = str(body.get("error") or body.get("message") or f"{origin} answers with status {status}")
    raise ControllerError(message, code=str(body.get("code") or f"HTTP_{status}"), status=status, details=body)
