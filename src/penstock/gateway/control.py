"""The control routes: a runner in another process opens, grades and ends rollouts. They need the control token."""

from typing import Annotated, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from penstock.codec import from_json
from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway.request import GatewayLimits
from penstock.gateway.routes import json_response
from penstock.gateway.session import Sessions, make_task, open_adhoc, pool_refusals
from penstock.http.asgi import JsonBudget, parse_json, read_body
from penstock.pool.base import AFTER_ALL, Pool
from penstock.records import ADHOC_CHANNEL, MAX_REWARD, End, Grade

T = TypeVar("T", bound=BaseModel)


class ControlBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$")]
"""Safe in a token, a path and a header."""
Name = Annotated[str, Field(max_length=200)]
MAX_BYTES, MAX_VALUES = 1 << 20, 1000
"""The limits of a body."""


class SamplingBody(ControlBody):
    """Changes to the gateway's sampling defaults."""

    max_tokens: int | None = Field(default=None, ge=1, le=2**53)
    temperature: FiniteFloat | None = Field(default=None, ge=0, le=100)
    top_p: FiniteFloat | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**53)
    min_p: FiniteFloat | None = Field(default=None, ge=0, lt=1)


class OpenBody(ControlBody):
    """`POST /rollouts`: an existing rollout by its id, else a new one."""

    rollout_id: Id | None = None
    group_id: Id | None = None
    task_id: str = Field(default=ADHOC_CHANNEL, min_length=1, max_length=1000)
    channel: Id = ADHOC_CHANNEL
    sampling: SamplingBody = SamplingBody()


BoundedReward = Annotated[FiniteFloat, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class GradeBody(ControlBody):
    reward: BoundedReward
    source: Name = "control"
    transcript: Name | None = None
    step: int | None = Field(default=None, ge=0, lt=2**31)


class EndBody(ControlBody):
    end: End = Field(default=End.COMPLETED, strict=False)
    message: str = Field(default="", max_length=100_000)


class ControlRoutes:
    def __init__(self, pool: Pool, sessions: Sessions, limits: GatewayLimits) -> None:
        self._pool = pool
        self._sessions = sessions
        self._limits = limits

    async def open(self, request: Request) -> Response:
        """Open a rollout, made if it does not exist; returns its model token and base URLs.

        The same body with an id gives the same rollout again.
        """
        body = await self._read(request, OpenBody)
        session = await self._sessions.get(await self._find(body) or await self._make(body))
        return json_response(
            {
                "rollout_id": session.rollout_id,
                "token": session.token,
                "base_url": session.base_url,
                "anthropic_base_url": session.base_url.removesuffix("/v1"),
            }
        )

    async def grade(self, request: Request) -> Response:
        """Reward a rollout, one of its transcripts or one of its steps."""
        body = await self._read(request, GradeBody)
        grade = from_json(Grade, orjson.dumps(body.model_dump() | {"rollout_id": request.path_params["rollout_id"]}))
        self._sessions.note_grade(grade.rollout_id)
        with pool_refusals(status=409, code="not_graded"):
            await self._pool.grade(grade)
        return json_response({"rollout_id": grade.rollout_id, "reward": grade.reward})

    async def end(self, request: Request) -> Response:
        """End a rollout. The first end stays; `first` says whether this was it."""
        body = await self._read(request, EndBody)
        rollout_id = request.path_params["rollout_id"]
        with pool_refusals(status=404, code="unknown_rollout"):
            first = await self._pool.end(rollout_id, body.end, body.message)
            end = (await self._pool.rollout(rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)).end
        self._sessions.close(rollout_id)
        return json_response({"rollout_id": rollout_id, "end": end, "first": first})

    async def _find(self, body: OpenBody) -> str | None:
        """The existing rollout, if the body names nothing but its id; else None."""
        if body.rollout_id is None or body.model_fields_set != {"rollout_id"}:
            return None
        try:
            return (await self._pool.rollout(body.rollout_id, first_step=AFTER_ALL, first_node=AFTER_ALL)).ref.id
        except PoolFailed:
            raise
        except PoolError:
            return None

    async def _make(self, body: OpenBody) -> str:
        sampling = body.sampling.model_dump(exclude_none=True)
        with pool_refusals(status=409, code="rollout_exists"):
            rollout = await open_adhoc(
                self._pool,
                rollout_id=body.rollout_id or "",
                group_id=body.group_id or "",
                task_id=body.task_id,
                channel=body.channel,
                sampling=sampling,
            )
            same = await self._pool.task(rollout.id) == make_task(body.task_id, sampling)
        if not same:
            text = f"rollout {rollout.id} is there with another task or sampling; leave them out, or give another id"
            raise RequestError(text, status=409, code="rollout_exists")
        return rollout.id

    async def _read(self, request: Request, kind: type[T]) -> T:
        body = await read_body(request.receive, min(MAX_BYTES, self._limits.body_bytes)) or b"{}"
        JsonBudget(MAX_VALUES).spend(parse_json(body), "the body")  # pydantic makes an error of each unknown field
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise RequestError(f"{where}: {first['msg']}", code="invalid_value", param=where) from error
