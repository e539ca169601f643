"""The control routes: what a runner elsewhere may do with a rollout. An agent's token opens none of them."""

from typing import TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from penstock.codec import from_json
from penstock.errors import PoolError, RequestError
from penstock.gateway.calls import Limits
from penstock.gateway.endpoint import read_body
from penstock.gateway.routes import reply
from penstock.gateway.sessions import Sessions
from penstock.pool.base import Pool
from penstock.records import End, Grade

T = TypeVar("T", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class OpenBody(_Body):
    """`POST /rollouts`"""

    rollout_id: str


class GradeBody(_Body):
    """`POST /rollouts/{id}/grade`"""

    reward: FiniteFloat
    source: str = "control"
    transcript: str | None = None
    step: int | None = Field(default=None, ge=0)


class EndBody(_Body):
    """`POST /rollouts/{id}/end`"""

    end: End = Field(default=End.COMPLETED, strict=False)
    message: str = ""


class Control:
    """Endpoints for runners that are not in this process."""

    def __init__(self, pool: Pool, sessions: Sessions, limits: Limits) -> None:
        self._pool = pool
        self._sessions = sessions
        self._limits = limits

    async def open(self, request: Request) -> Response:
        """Let a rollout of the pool call the model; gives its model token and where to call."""
        body = await self._read(request, OpenBody)
        session = await self._sessions.get(body.rollout_id)
        return reply({"rollout_id": session.rollout_id, "token": session.token, "base_url": session.base_url})

    async def grade(self, request: Request) -> Response:
        """Reward a rollout, one of its transcripts or one of its steps."""
        body = await self._read(request, GradeBody)
        grade = from_json(Grade, orjson.dumps(body.model_dump() | {"rollout_id": request.path_params["rollout_id"]}))
        try:
            await self._pool.grade(grade)
        except PoolError as error:
            raise RequestError(str(error), status=409, code="not_graded") from error
        return reply({"rollout_id": grade.rollout_id, "reward": grade.reward})

    async def end(self, request: Request) -> Response:
        """End a rollout; the first end stays, and says so."""
        body = await self._read(request, EndBody)
        rollout_id = request.path_params["rollout_id"]
        try:
            first = await self._pool.end(rollout_id, body.end, body.message)
            end = (await self._pool.attempt(rollout_id)).end
        except PoolError as error:
            raise RequestError(str(error), status=404, code="unknown_rollout") from error
        self._sessions.close(rollout_id)
        return reply({"rollout_id": rollout_id, "end": end, "first": first})

    async def _read(self, request: Request, kind: type[T]) -> T:
        body = await read_body(request.receive, self._limits.body_bytes)
        try:
            return kind.model_validate_json(body or b"{}")
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise RequestError(f"{where}: {first['msg']}", code="invalid_value", param=where) from error
