"""Reads and validates the requests of a rollout server. URLs in them may name only hosts that the server was started with."""

import asyncio
import ipaddress
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from penstock.errors import ConfigError, RequestError
from penstock.http.asgi import JsonBudget, check_size, read_body
from penstock.http.listen import LOOPBACK
from penstock_compat.rollout_server.protocol import LONGEST_ID, RolloutInitRequest

MAX_URL_CHARS = 4096
MAX_VALUES, MAX_DEPTH = 200_000, 72
"""JSON values in a body, and how deep they are nested: a dataset's columns may have 64 levels."""


B = TypeVar("B", bound=BaseModel)

THREADED_PARSE_BYTES = 1 << 20
"""A larger body is parsed in a thread, so that it does not block the event loop."""


class BodyIssue(NamedTuple):
    """One error in a body."""

    field: str
    """A dotted path; empty for the body as a whole."""
    message: str


class InvalidBody(RequestError):
    """A body that is refused. The message lists all its errors without quoting it, since it may hold keys."""

    def __init__(self, issues: list[BodyIssue]) -> None:
        line = "; ".join(f"{field}: {message}" if field else message for field, message in issues)
        super().__init__(line, status=422, code="invalid_body")
        self.issues = issues


class CancelRequest(BaseModel):
    """`POST /rollout/cancel`: exactly one of the three."""

    model_config = ConfigDict(extra="forbid")

    ids: list[str] | None = Field(default=None, max_length=10_000, fail_fast=True)
    prefix: str | None = Field(default=None, min_length=1, max_length=LONGEST_ID)
    all: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.ids is not None) + (self.prefix is not None) + self.all != 1:
            raise ValueError('give exactly one of {"ids": […]}, {"prefix": "…"} and {"all": true}')
        return self

    def matcher(self) -> Callable[[str], bool]:
        """Returns a function that says whether a rollout is to be cancelled, by its id."""
        if self.ids is not None:
            return frozenset(self.ids).__contains__
        return lambda rollout_id: self.all or rollout_id.startswith(self.prefix or "")


async def read_rollout(request: Request, *, hosts: "AllowedHosts", max_bytes: int) -> RolloutInitRequest:
    """Raises RequestError if the rollout cannot be accepted."""
    body = await _read(request, RolloutInitRequest, max_bytes)
    issues = [BodyIssue(name, why) for name, url in _urls(body).items() if (why := hosts.refusal(url))]
    for name in ("rollout_id", "controller_api_key", "llm_api_key"):
        text: str | None = getattr(body, name)
        if text and not (text.isascii() and text.isprintable() and text == text.strip()):
            issues.append(BodyIssue(name, "is sent in a header: use printable ASCII characters, without spaces around them"))
    if issues:
        raise InvalidBody(issues)
    return body


async def read_cancel(request: Request, *, max_bytes: int) -> CancelRequest:
    return await _read(request, CancelRequest, max_bytes)


def parse(kind: type[B], body: bytes) -> B:
    """Parses a JSON body; InvalidBody names each field that is wrong."""
    check_size(body)
    try:  # json, not orjson: integers may have any size
        value: Any = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as cause:
        raise InvalidBody([BodyIssue("", f"the body is not valid JSON: {cause}")]) from cause
    try:
        JsonBudget(MAX_VALUES, depth=MAX_DEPTH).spend(value, "the body")
    except RequestError as cause:
        raise InvalidBody([BodyIssue("", str(cause))]) from cause
    try:
        return kind.model_validate(value)
    except ValidationError as cause:
        raise InvalidBody([_issue(error) for error in cause.errors(include_url=False)]) from cause


async def _read(request: Request, kind: type[B], max_bytes: int) -> B:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestError(f"the request is larger than {max_bytes} bytes; send less", status=413, code="request_too_large")
    body = await read_body(request.receive, max_bytes)
    if body is None:
        raise RequestError("the caller hung up", code="hung_up")
    return parse(kind, body) if len(body) < THREADED_PARSE_BYTES else await asyncio.to_thread(parse, kind, body)


def _urls(body: RolloutInitRequest) -> dict[str, str]:
    names = ("chat_completions_url", "completion_callback_url", "grader_callback_url")
    return {name: url for name in names if (url := getattr(body, name)) is not None}


def _issue(error: Any) -> BodyIssue:
    message = str(error["msg"]).removeprefix("Value error, ")
    return BodyIssue(".".join(str(part) for part in error["loc"]), f"{message[:1].lower()}{message[1:]}")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


class AllowedHosts:
    """Hosts that may be called: `name`, `name:port`, `*.name` for subdomains, an address, or a network such as `10.0.0.0/8`."""

    def __init__(self, allowed: Iterable[str] = LOOPBACK) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in allowed:
            self._add(entry.strip().lower())

    def refusal(self, url: str) -> str | None:
        """Returns why `url` may not be called, or None if it may. The text continues a sentence whose subject is the URL."""
        if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            return f"is no URL: use up to {MAX_URL_CHARS} plain ASCII characters"
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            return f"is no URL: {error}"
        if parts.scheme not in ("http", "https") or not host:
            return "must be an http:// or https:// URL with a host"
        if "@" in parts.netloc:
            return "must not hold a user or password; send a key in controller_api_key"
        if parts.fragment:
            return "must not hold a fragment"
        if self._allows(host, port or (443 if parts.scheme == "https" else 80)):
            return None
        return f"names the host {host}, which this server may not call; start it with that host among PENSTOCK_ROLLOUT_HOSTS"

    def _add(self, entry: str) -> None:
        if "/" in entry and "://" not in entry:
            try:
                self._networks.append(ipaddress.ip_network(entry))
                return
            except ValueError as cause:
                raise ConfigError(f"hosts: {entry!r} is no network: {cause}; write one as 10.0.0.0/8") from cause
        if not entry or "/" in entry or "@" in entry or "*" in entry.removeprefix("*."):
            raise ConfigError(f"hosts: {entry!r} is no host; write a name, name:port, *.name, an address or a network")
        self._names.add(entry.removeprefix("[").removesuffix("]"))

    def _allows(self, host: str, port: int) -> bool:
        parents = {f"*.{host.split('.', dots)[-1]}" for dots in range(1, host.count(".") + 1)}
        if not self._names.isdisjoint({host, f"{host}:{port}", f"[{host}]:{port}", *parents}):
            return True
        with suppress(ValueError):
            address = ipaddress.ip_address(host)
            return any(address in network for network in self._networks)
        return False
