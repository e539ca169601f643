"""What a rollout server is asked, read and checked: everything that is wrong with a request at once, each thing by its field."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from penstock.errors import RequestError
from penstock.http.asgi import read_body
from penstock.rollout.server.hosts import Hosts
from penstock.rollout.server.wire import RolloutInitRequest

B = TypeVar("B", bound=BaseModel)

LARGE = 1 << 20
"""Bytes above which a body is parsed in a thread, so that others need not wait."""


class Issue(NamedTuple):
    """One thing that is wrong with a body."""

    field: str
    """With dots between its parts; empty for the body as a whole."""
    message: str


class InvalidBody(RequestError):
    """A body that is refused; says all that is wrong with it, without quoting it: it may hold keys."""

    def __init__(self, issues: list[Issue]) -> None:
        line = "; ".join(f"{field}: {message}" if field else message for field, message in issues)
        super().__init__(line, status=422, code="invalid_body")
        self.issues = issues


class CancelRequest(BaseModel):
    """`POST /rollout/cancel`: exactly one of the three."""

    model_config = ConfigDict(extra="forbid")

    ids: list[str] | None = None
    prefix: str | None = Field(default=None, min_length=1)
    all: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.ids is not None) + (self.prefix is not None) + self.all != 1:
            raise ValueError('give exactly one of {"ids": […]}, {"prefix": "…"} and {"all": true}')
        return self

    def wanted(self) -> Callable[[str], bool]:
        """Whether a rollout is meant, by its id."""
        if self.ids is not None:
            return frozenset(self.ids).__contains__
        return lambda rollout_id: self.all or rollout_id.startswith(self.prefix or "")


async def read_rollout(request: Request, *, hosts: Hosts, largest: int) -> RolloutInitRequest:
    """The rollout that is asked for; RequestError says why it cannot be accepted."""
    body = await _read(request, RolloutInitRequest, largest)
    issues = [Issue(name, why) for name, url in _urls(body).items() if (why := hosts.refusal(url))]
    for name in ("rollout_id", "controller_api_key", "llm_api_key"):
        text: str | None = getattr(body, name)
        if text and not (text.isascii() and text.isprintable() and text == text.strip()):
            issues.append(Issue(name, "is sent in a header: use printable ASCII characters, without spaces around them"))
    if issues:
        raise InvalidBody(issues)
    return body


async def read_cancel(request: Request, *, largest: int) -> CancelRequest:
    """Which rollouts are to be cancelled."""
    return await _read(request, CancelRequest, largest)


def parse(kind: type[B], body: bytes) -> B:
    """`body` as JSON of this kind, with numbers of any size as they are; InvalidBody names each field that is wrong."""
    try:
        value: Any = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as cause:
        raise InvalidBody([Issue("", f"the body is not valid JSON: {cause}")]) from cause
    try:
        return kind.model_validate(value)
    except ValidationError as cause:
        raise InvalidBody([_issue(error) for error in cause.errors(include_url=False)]) from cause


async def _read(request: Request, kind: type[B], largest: int) -> B:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > largest:
        raise RequestError(f"the request is larger than {largest} bytes; send less", status=413, code="request_too_large")
    body = await read_body(request.receive, largest)
    if body is None:
        raise RequestError("the caller hung up", code="hung_up")
    return parse(kind, body) if len(body) < LARGE else await asyncio.to_thread(parse, kind, body)


def _urls(body: RolloutInitRequest) -> dict[str, str]:
    names = ("chat_completions_url", "completion_callback_url", "grader_callback_url")
    return {name: url for name in names if (url := getattr(body, name)) is not None}


def _issue(error: Any) -> Issue:
    message = str(error["msg"]).removeprefix("Value error, ")
    return Issue(".".join(str(part) for part in error["loc"]), f"{message[:1].lower()}{message[1:]}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
