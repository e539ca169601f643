"""One HTTP exchange with a controller: JSON both ways, a file sent, a file fetched; whatever fails is a ControllerError."""

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
from penstock.controller.runs import RunKind
from penstock.errors import ConfigError, ControllerError
from penstock.system.files import replacing

CHUNK_BYTES = 256 * 1024
FILE_TIMEOUT_S = 300.0
RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Between the attempts at a file."""
RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})
"""Statuses after which a file is tried again."""

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int | None], None]
"""Is told a stage, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """What is asked of whom."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def send_json(exchange: HttpRequest, body: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """Send JSON and return the object that came back; an empty reply is `{}`."""
    content = None if body is None else orjson.dumps(body)
    typed = dict(exchange.headers) | ({} if content is None else {"content-type": "application/json"})
    with _open_response(exchange, content, typed, timeout_s=timeout_s) as response:
        return _parse_reply(exchange, response.status, _read(exchange, response))


def upload_file(
    url: str, path: Path, headers: Mapping[str, str], progress: ProgressCallback | None = None, *, stage: str = ""
) -> dict[str, Any]:
    """PUT a file as it is on disk, again after a passing fault, and return what was answered; `progress` is told `stage`."""
    exchange = HttpRequest(method="PUT", url=url, headers=headers)
    shown = stage or f"sending {path.name}"

    def attempt() -> dict[str, Any]:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            told = _ProgressReader(file, lambda done: progress and progress(shown, done, size))
            sized = {**headers, "content-length": str(size)}
            with _open_response(exchange, told, sized, timeout_s=FILE_TIMEOUT_S) as response:
                return _parse_reply(exchange, response.status, _read(exchange, response))

    return _retry(attempt)


def download_file(url: str, path: Path, *, size: int | None = None, advance: Callable[[int], object] | None = None) -> int:
    """GET into `path`, which appears only when it is whole; the number of bytes. Again after a passing fault."""
    exchange = HttpRequest(method="GET", url=url)
    try:
        with replacing(path) as draft:
            return _retry(lambda: _download_once(exchange, draft, size, advance))
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be written: {cause.strerror or cause}; give another folder with -o") from cause


def _download_once(exchange: HttpRequest, draft: Path, size: int | None, advance: Callable[[int], object] | None) -> int:
    with _open_response(exchange, None, {}, timeout_s=FILE_TIMEOUT_S) as response:
        if response.status >= 400:
            _parse_reply(exchange, response.status, _read(exchange, response))
        promised = response.headers.get("content-length")
        expected = size if size is not None else int(promised) if promised else None
        written = 0
        with draft.open("wb") as out:
            while block := _read(exchange, response, CHUNK_BYTES):
                written += out.write(block)
                if advance is not None:
                    advance(len(block))
        if expected is not None and written != expected:
            text = f"{exchange.url}: {written} bytes came, {expected} were promised"
            raise ControllerError(f"{text}; try again", code="TRANSFER_CUT", status=502)
    return written


def _retry(attempt: Callable[[], T]) -> T:
    """Whatever `attempt` returns, after several attempts where faults are of a passing kind."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return attempt()
        except ControllerError as error:
            if error.status is not None and error.status not in RETRY_STATUSES:
                raise
        time.sleep(pause_s)
    return attempt()


class _ProgressReader:
    """A file that tells how far it was read."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], object]) -> None:
        self._file, self._tell = file, tell

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(max(size, CHUNK_BYTES))
        self._tell(self._file.tell())
        return block


@contextmanager
def _open_response(
    exchange: HttpRequest, body: bytes | _ProgressReader | None, headers: Mapping[str, str], *, timeout_s: float
) -> Generator[http.client.HTTPResponse]:
    """The reply to a request, on a connection that is closed in the end."""
    connection, target = _connection(exchange.url, timeout_s)
    try:
        with _translate_errors(exchange):
            try:
                connection.request(exchange.method, target, cast("Any", body), dict(headers))
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:  # pyright: ignore[reportUnnecessaryComparison]
                    raise
            response = connection.getresponse()  # a refusal that came before all of a file was sent is read all the same
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
def _translate_errors(exchange: HttpRequest) -> Generator[None]:
    """Names what keeps a request from being answered."""
    origin = "/".join(exchange.url.split("/", 3)[:3])
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


def _read(exchange: HttpRequest, response: http.client.HTTPResponse, size: int | None = None) -> bytes:
    with _translate_errors(exchange):
        return response.read() if size is None else response.read(size)


def _parse_reply(exchange: HttpRequest, status: int, content: bytes) -> dict[str, Any]:
    """The JSON object of a reply; ControllerError where it tells of an error or is none."""
    try:
        found: Any = orjson.loads(content) if content.strip() else {}
    except orjson.JSONDecodeError:
        found = None
    told = cast("dict[str, Any]", found) if isinstance(found, dict) else None
    if status < 300 and told is not None:
        return told
    origin = "/".join(exchange.url.split("/", 3)[:3])
    if told is None:
        text = f"{origin} answers with something that is no controller's reply (status {status})"
        raise ControllerError(f"{text}; correct PENSTOCK_CONTROLLER", code="CONTROLLER_ANSWER", status=status)
    message = str(told.get("error") or told.get("message") or f"{origin} answers with status {status}")
    raise ControllerError(message, code=str(told.get("code") or f"HTTP_{status}"), status=status, details=told)


ROUTES: Mapping[RunKind, str] = {"eval": "eval-runs", "train": "training-runs"}
PAGE_ROWS = 50
"""The most rows that a list gives at once."""
Scope = Literal["all", "user", "workspace"]
JsonObject = dict[str, Any]


class ControllerClient:
    """Asks a controller; whatever it refuses, and that it cannot be reached, is a ControllerError with its code.

    Nothing is asked twice but uploads and downloads of files: a request that changes something is sent once.
    A `ref` is a name or an id.
    """

    def __init__(self, url: str, token: str | None, git: str | None = None, *, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.git = git
        """`owner/name` of the repository that stands for the code where no snapshot is sent along."""
        self.token = token
        self._timeout_s = timeout_s

    def health(self) -> JsonObject:
        """That it serves, without a token."""
        return self._ask("GET", "/health", token=False)

    def verify(self) -> JsonObject:
        """Who the token belongs to."""
        return self._cli("GET", "verify")

    def authorize_device(self, device_name: str) -> JsonObject:
        """Ask for a login that a person approves with `penstock controller approve`."""
        return self._cli("POST", "device/authorize", {"deviceName": device_name}, token=False)

    def device_token(self, device_code: str) -> JsonObject:
        """The token of an approved login; a ControllerError whose message is `authorization_pending` until then."""
        return self._cli("POST", "device/token", {"device_code": device_code}, token=False)

    def approve(self, user_code: str) -> JsonObject:
        """Let the device in that shows this code."""
        return self._cli("POST", "device/approve", {"user_code": user_code})

    def revoke(self, token_id: str) -> JsonObject:
        """Make a token worthless."""
        return self._cli("DELETE", f"tokens/{_segment(token_id)}")

    def submit_run(self, kind: RunKind, body: Mapping[str, Any]) -> JsonObject:
        """Queue a run: `id, name, status, created_at`. It takes as long as the preflight of the controller does."""
        return self._cli("POST", ROUTES[kind], body, timeout_s=300.0)

    def runs(self, kind: RunKind, *, limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """A page of runs under `eval_runs` or `training_runs`, newest first."""
        return self._cli("GET", ROUTES[kind], query={"limit": limit, "offset": offset})

    def run(self, kind: RunKind, ref: str) -> JsonObject:
        """All there is to know of a run but its numbers; the run itself is under `eval_run` or `training_run`."""
        return self._cli("GET", _run(kind, ref))

    def stop(self, kind: RunKind, ref: str) -> JsonObject:
        """Ask a run to end."""
        return self._cli("POST", _run(kind, ref, "stop"), {})

    def metrics(self, kind: RunKind, ref: str) -> JsonObject:
        """A run's numbers so far."""
        return self._cli("GET", _run(kind, ref, "metrics"))

    def logs(
        self,
        kind: RunKind,
        ref: str,
        *,
        limit: int = PAGE_ROWS,
        cursor: str | None = None,
        direction: Literal["older", "newer"] = "older",
    ) -> JsonObject:
        """A page of what a run's process said: the newest one and back from there, or from the beginning on (`newer`)."""
        return self._cli("GET", _run(kind, ref, "logs"), query={"limit": limit, "direction": direction, "cursor": cursor})

    def checkpoints(self, ref: str) -> JsonObject:
        """Those that a training run has kept."""
        return self._cli("GET", _run("train", ref, "checkpoints"))

    def manifest(self, kind: RunKind, ref: str, *, types: Sequence[str], rows: str | None = None) -> JsonObject:
        """The files of a run that can be downloaded: `{files: [{path, size, token?}], totals}`."""
        return self._cli("GET", _run(kind, ref, "samples/manifest"), query={"types": ",".join(types), "rows": rows})

    def download_urls(self, kind: RunKind, ref: str, items: Sequence[Mapping[str, Any]]) -> JsonObject:
        """Links of files of a manifest, at most 500 at once: `{items: [{path, url}]}`."""
        return self._cli("POST", _run(kind, ref, "samples/download-urls"), {"items": list(items)})

    def put_snapshot(self, archive: Path, digest: str, progress: ProgressCallback | None = None) -> JsonObject:
        """Upload code once; the controller knows it by its SHA-256."""
        url = f"{self.url}/api/cli/snapshots/{digest}"
        return upload_file(
            url, archive, {**self._headers(), "content-type": "application/gzip"}, progress, stage="sending the code"
        )

    def begin_dataset(self, name: str, *, size: int, extension: str, overwrite_id: str | None = None) -> JsonObject:
        """A new dataset with `upload`, which says where the file goes."""
        body: JsonObject = {"file_name": name, "file_size": size, "extension": extension}
        return self._cli("POST", "datasets", body | ({"overwrite_dataset_id": overwrite_id} if overwrite_id else {}))

    def complete_dataset(self, dataset_id: str, *, extension: str, parts: Sequence[Mapping[str, Any]] = ()) -> JsonObject:
        """Say that the file is there; the dataset as it is then."""
        body: JsonObject = {"file_extension": extension} | ({"parts": list(parts)} if parts else {})
        return self._cli("POST", f"datasets/{_segment(dataset_id)}/complete", body, timeout_s=300.0)

    def abort_dataset(self, dataset_id: str) -> JsonObject:
        """Give an upload up."""
        return self._cli("POST", f"datasets/{_segment(dataset_id)}/abort", {})

    def datasets(self, *, limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """A page of datasets under `datasets`, newest first."""
        return self._cli("GET", "datasets", query={"limit": limit, "offset": offset})

    def dataset(self, ref: str) -> JsonObject:
        """One dataset, with its first rows under `data_preview`."""
        return self._cli("GET", f"datasets/{_segment(ref)}")

    def dataset_link(self, ref: str) -> JsonObject:
        """Where its file can be fetched: `presigned_url`, `file_name`."""
        return self._cli("GET", f"datasets/{_segment(ref)}/download")

    def dataset_logs(self, ref: str, *, limit: int = PAGE_ROWS, cursor: str | None = None) -> JsonObject:
        """What was noted while it was received."""
        return self._cli("GET", f"datasets/{_segment(ref)}/logs", query={"limit": limit, "direction": "older", "cursor": cursor})

    def models(self, kind: Literal["base", "lora"], *, limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """A page of models under `models`: those to begin with, or those that runs have trained."""
        return self._cli("GET", f"models/{kind}", query={"limit": limit, "offset": offset})

    def model(self, name: str) -> JsonObject:
        return self._cli("GET", f"models/{_segment(name)}")

    def deploy(self, name: str, *, engine: str | None = None) -> JsonObject:
        """Have a trained model served, by the engine that is named."""
        return self._cli("POST", f"models/{_segment(name)}/deploy", {"engine": engine} if engine else {}, timeout_s=300.0)

    def undeploy(self, name: str) -> JsonObject:
        """Serve it no longer."""
        return self._cli("POST", f"models/{_segment(name)}/undeploy", {})

    def secrets(self, *, scope: Scope = "all", limit: int = PAGE_ROWS, offset: int = 0) -> JsonObject:
        """A page of secrets under `environment_secrets`, never with their values."""
        return self._cli("GET", "environment-secrets", query={"scope": scope, "limit": limit, "offset": offset})

    def set_secret(self, name: str, value: str, scope: Literal["user", "workspace"]) -> JsonObject:
        """Keep a secret, in the place of one of the same name and scope."""
        return self._cli("POST", "environment-secrets", {"name": name, "value": value, "scope": scope})

    def delete_secret(self, name: str, scope: Literal["user", "workspace"]) -> JsonObject:
        return self._cli("DELETE", "environment-secrets", {"name": name, "scope": scope})

    def rollouts(self, *, limit: int = PAGE_ROWS, offset: int = 0, branch: str | None = None) -> JsonObject:
        """A page of rollouts in the repositories that the controller knows, under `rollouts`."""
        return self._cli("GET", "rollouts", query={"limit": limit, "offset": offset, "branch": branch})

    def register_repository(self, name: str, path: Path) -> JsonObject:
        """Let `owner/name` stand for a repository on the controller's machine."""
        return self._cli("POST", "repositories", {"name": name, "path": str(path)})

    def _cli(
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
        return self._ask(method, f"/api/cli/{path}?{urlencode(chosen)}".rstrip("?"), body, token=token, timeout_s=timeout_s)

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: bool = True,
        timeout_s: float | None = None,
    ) -> JsonObject:
        exchange = HttpRequest(method=method, url=f"{self.url}{path}", headers=self._headers(token=token))
        return send_json(exchange, body, timeout_s=timeout_s or self._timeout_s)

    def _headers(self, *, token: bool = True) -> dict[str, str]:
        headers = {"user-agent": f"penstock/{__version__}"}
        if self.git:
            headers["x-osmosis-git"] = self.git
        if token and self.token:
            headers["authorization"] = f"Bearer {self.token}"
        return headers


def all_rows(following: Callable[[int], JsonObject], key: str) -> Iterator[JsonObject]:
    """The rows of all pages of a list; `following` fetches the page at an offset."""
    offset: int | None = 0
    while offset is not None:
        page = following(offset)
        rows: list[JsonObject] = page.get(key) or []
        yield from rows
        offset = page.get("next_offset") if rows else None


def _run(kind: RunKind, ref: str, below: str = "") -> str:
    return f"{ROUTES[kind]}/{_segment(ref)}" + (f"/{below}" if below else "")


def _segment(text: str) -> str:
    """`text` as one segment of a path."""
    return quote(text, safe="") or "%20"
