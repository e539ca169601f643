"""A client written from the platform's contract alone: its headers, one connection for each request, no retries, and the fields
that it cannot do without."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

VERSION = "0.2.31"
ROUTES = {"eval": "eval-runs", "train": "training-runs"}
DETAILS = {"eval": "eval_run", "train": "training_run"}


class Refused(Exception):
    """A reply that is not 2xx."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status} {body}")
        self.status, self.body = status, body
        self.code = body.get("code")


class Broken(AssertionError):
    """A reply that the contract does not allow."""


@dataclass(frozen=True)
class ApiClient:
    """One user's."""

    url: str
    token: str | None
    git: str | None = "acme/agents"

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        """Send JSON; the object that came back, `{}` for nothing."""
        asked = f"?{urlencode({k: v for k, v in query.items() if v is not None})}" if query else ""
        sent = None if body is None else json.dumps(body).encode()
        return self.send(method, f"/api/cli/{path}{asked}", sent)

    def send(self, method: str, target: str, body: bytes | None = None, **headers: str) -> dict[str, Any]:
        status, content, _ = exchange(self.url, method, target, body, self.headers() | headers)
        try:
            found = json.loads(content) if content else {}
        except ValueError as cause:
            raise Broken(f"{method} {target}: not JSON: {content[:200]!r}") from cause
        if not isinstance(found, dict):
            raise Broken(f"{method} {target}: no object: {found!r}")
        if not 200 <= status < 300:
            raise Refused(status, found)
        return found

    def headers(self) -> dict[str, str]:
        own = {"Content-Type": "application/json", "User-Agent": f"osmosis-cli/{VERSION}", "X-Osmosis-CLI-Version": VERSION}
        own |= {"Authorization": f"Bearer {self.token}"} if self.token is not None else {}
        return own | ({"X-Osmosis-Git": self.git} if self.git else {})

    def submit(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        return need(self.ask("POST", ROUTES[kind], body), "id", "name", "status", "created_at")

    def page(self, kind: str, *, limit: Any = 50, offset: Any = 0) -> dict[str, Any]:
        key = ROUTES[kind].replace("-", "_")
        page = self.ask("GET", ROUTES[kind], limit=limit, offset=offset)
        for row in listed(page, key):
            need(row, *(("id", "name", "status", "created_at") if kind == "eval" else ("id",)))
        return page

    def every(self, kind: str, *, limit: int) -> list[dict[str, Any]]:
        """As `--all` walks: until `next_offset` is null or a page is empty."""
        found: list[dict[str, Any]] = []
        offset: int | None = 0
        while offset is not None:
            page = self.page(kind, limit=limit, offset=offset)
            rows = page[ROUTES[kind].replace("-", "_")]
            if not rows:
                break
            found += rows
            if page["next_offset"] is not None and page["next_offset"] <= offset:
                raise Broken("next_offset does not advance")
            offset = page["next_offset"]
        return found

    def info(self, kind: str, ref: str) -> dict[str, Any]:
        detail = self.ask("GET", f"{ROUTES[kind]}/{segment(ref)}")
        need(detail, DETAILS[kind])
        need(detail[DETAILS[kind]], "id")
        return detail

    def stop(self, kind: str, ref: str) -> None:
        self.ask("POST", f"{ROUTES[kind]}/{segment(ref)}/stop", {})

    def metrics(self, kind: str, ref: str) -> dict[str, Any]:
        found = need(self.ask("GET", f"{ROUTES[kind]}/{segment(ref)}/metrics"), f"{DETAILS[kind]}_id", "status", "overview")
        for metric in found.get("metrics", []):
            for point in metric["data_points"]:
                need(point, "step", "value", "timestamp")
        return found

    def logs(self, kind: str, ref: str, **query: Any) -> dict[str, Any]:
        found = need(self.ask("GET", f"{ROUTES[kind]}/{segment(ref)}/logs", **{"direction": "older"} | query), "logs")
        for entry in found["logs"]:
            if not all(isinstance(entry[key], str) for key in ("timestamp", "level", "step", "message")):
                raise Broken(f"a log entry with something else than strings: {entry}")
        return found

    def checkpoints(self, ref: str) -> list[dict[str, Any]]:
        found = need(self.ask("GET", f"training-runs/{segment(ref)}/checkpoints"), "training_run_id")
        return [need(each, "id") for each in found["checkpoints"]]

    def manifest(self, kind: str, ref: str, types: str, rows: str | None = None) -> list[dict[str, Any]]:
        found = self.ask("GET", f"{ROUTES[kind]}/{segment(ref)}/samples/manifest", types=types, rows=rows)
        return [need(each, "path", "size") for each in listed(found, "files")]

    def download(self, kind: str, ref: str, files: list[dict[str, Any]]) -> dict[str, bytes]:
        """The bytes of every file, exactly as many as the manifest says."""
        wanted = [{key: each[key] for key in ("path", "token") if key in each} for each in files]
        items = self.ask("POST", f"{ROUTES[kind]}/{segment(ref)}/samples/download-urls", {"items": wanted})["items"]
        urls, found = {need(item, "path", "url")["path"]: item["url"] for item in items}, dict[str, bytes]()
        for each in files:
            status, content, _ = fetch(urls[each["path"]])
            if status != 200 or len(content) != each["size"]:
                raise Broken(f"{each}: {status} with {len(content)} bytes: {content[:200]!r}")
            found[each["path"]] = content
        return found


def need(found: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Without one of these the command ends with INTERNAL."""
    if missing := [key for key in keys if found.get(key) in (None, "")]:
        raise Broken(f"{missing} missing in {found}")
    return found


def listed(page: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if not isinstance(page.get(key), list):
        raise Broken(f"{key} is no list in {page}")
    return page[key]


def segment(ref: str) -> str:
    return quote(ref, safe="")


def fetch(url: str, *, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes, dict[str, str]]:
    """A link: no Authorization, no header of the platform's; https, or loopback."""
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise Broken(f"{url}: a client refuses this link")
    return exchange(f"{parts.scheme}://{parts.netloc}", method, parts.path + (f"?{parts.query}" if parts.query else ""), body, {})


def exchange(url: str, method: str, target: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
    """Sends one request on a new connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        return response.status, response.read(), {key.lower(): value for key, value in response.getheaders()}
    finally:
        connection.close()
