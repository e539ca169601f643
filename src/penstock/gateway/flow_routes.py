"""The flow routes: what code that is trusted with a rollout may say of it. A flow token opens them for its own rollout."""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import GraderError, PoolError, PoolFailed, RequestError, WorkerLost
from penstock.gateway import adhoc
from penstock.gateway.auth import Tokens
from penstock.gateway.calls import Limits
from penstock.gateway.control import SamplingBody
from penstock.gateway.dialects.generate import expand
from penstock.gateway.flow_bodies import (
    CompleteBody,
    InitBody,
    RegisterBody,
    RewardBody,
    StepBody,
    StepsBody,
    parse,
    read,
    wrong,
)
from penstock.gateway.graph import TokenGraph
from penstock.gateway.routes import DEFAULT_PROMPT, reply
from penstock.gateway.serve import Service
from penstock.gateway.sessions import Sessions
from penstock.gateway.submission import Submissions, find_step
from penstock.gateway.trajectories import Registration, Trajectories
from penstock.http.asgi import header
from penstock.http.listen import root_url
from penstock.pool.base import Pool
from penstock.records import Message


class Judge(Protocol):
    """Rewards a conversation."""

    def __call__(self, rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> Awaitable[float]:
        """`rollout_id` is empty where nothing says whose it is; `fields` are of its row. GraderError where there is no reward."""
        ...


class FlowRoutes:
    """Endpoints. `scope["rollout_id"]` is whose flow token the caller has; empty where it may speak for any rollout."""

    def __init__(
        self, pool: Pool, sessions: Sessions, trajectories: Trajectories, service: Service, *, tokens: Tokens, limits: Limits
    ) -> None:
        self.judge: Judge | None = None
        self._pool = pool
        self._sessions = sessions
        self._trajectories = trajectories
        self._submissions = Submissions(pool, sessions, trajectories, service)
        self._service = service
        self._tokens = tokens
        self._limits = limits

    async def init(self, request: Request) -> Response:
        """The rollout that the caller's token belongs to, or a new one, and where its agent calls the model."""
        await self._read(request, InitBody)
        mine = request.scope["rollout_id"]
        root = root_url(self._sessions.base_url, header(request.scope["headers"], b"host"))
        if not mine:
            uid = self._tokens.trajectory()
            return reply({"trajectory_uid": uid, "base_url": f"{root}/{uid}/{DEFAULT_PROMPT}/v1"})
        session = await self._sessions.get(mine)
        return reply({"trajectory_uid": mine, "base_url": f"{root}/{session.token}/{session.rollout.group_id}/v1"})

    async def register(self, request: Request) -> Response:
        """Say what a trajectory is, before its first call."""
        body = await self._read(request, RegisterBody)
        rollout_id = self._own(request, request.path_params["trajectory"])
        said = self._registration(body, request.path_params["prompt"])
        await self._trajectories.register(rollout_id, said)
        return reply({"status": "ok"})

    async def complete(self, request: Request) -> Response:
        """Grade a trajectory, and take no more calls for it."""
        body = await self._read(request, CompleteBody)
        rollout_id = self._own(request, request.path_params["trajectory"])
        rollout = await self._trajectories.complete(rollout_id, body.reward)
        if body.channel not in (None, rollout.channel):
            self._service.count("ignored:channel")
        return reply({"status": "ok"})

    async def submit(self, request: Request) -> Response:
        """Take steps that were sampled here, with their rewards; all of them, or none."""
        body = await self._read(request, StepsBody)
        by_rollout: dict[str, list[StepBody]] = {}
        for place, step in enumerate(body.steps):
            if not step.trajectory_uid and not request.scope["rollout_id"]:
                raise wrong("say which trajectory the step belongs to", "body", "steps", place, "trajectory_uid")
            rollout_id = self._own(request, step.trajectory_uid or request.scope["rollout_id"])
            by_rollout.setdefault(rollout_id, []).append(step)
        await self._submissions.take(by_rollout, request.query_params.get("channel"))
        return reply({"accepted": len(body.steps)})

    async def reward(self, request: Request) -> Response:
        """Ask the judge, which is the run's grader or a rule for the row's data source."""
        body = await self._read(request, RewardBody)
        named = body.trajectory_uid or request.scope["rollout_id"]
        rollout_id = self._own(request, named) if named else ""
        if self.judge is None:
            text = "this gateway has no judge; grade in the flow itself, or run it with `penstock train`"
            raise RequestError(text, status=503, code="no_judge")
        messages = await self._messages(rollout_id, body)
        try:
            reward = await self.judge(rollout_id, messages, {**body.extra_fields, **body.dataset_fields})
        except GraderError as error:
            raise RequestError(str(error), status=422, code="not_judged") from error
        except PoolFailed:
            raise
        except PoolError as error:
            raise RequestError(str(error), status=404, code="unknown_rollout") from error
        except (TimeoutError, WorkerLost) as error:
            raise RequestError(f"the judge gave no answer: {error}", status=503, code="not_judged") from error
        return reply({"reward": reward, "reward_score": reward, "reward_extra_info": {}})

    async def ready(self, request: Request) -> Response:
        """Whether calls are taken."""
        if self._sessions.stopping:
            raise RequestError("the gateway is stopping", status=503, code="stopping")
        try:
            await self._pool.position()
        except PoolFailed as error:
            raise RequestError(f"the pool cannot be used: {error}", status=503, code="not_recorded") from error
        return reply({"status": "ready"})

    def _own(self, request: Request, name: str) -> str:
        """The rollout that `name` stands for, where the caller may speak for it; RequestError 403 where not."""
        mine, rollout_id = request.scope["rollout_id"], self._tokens.rollout_of(name)
        if mine and rollout_id != mine:
            text = f"the flow token is that of {mine}; it does not open trajectory {rollout_id[:200]}"
            raise RequestError(text, status=403, code="rollout_mismatch")
        return rollout_id

    def _registration(self, body: RegisterBody, prompt_uid: str) -> Registration:
        metadata = None if body.metadata is None else dict(body.metadata)
        sampling = body.sampling
        if metadata is not None:
            if metadata.pop("policy_version", None) is not None:
                self._service.count("ignored:policy_version")
            if isinstance(metadata.get("sampling"), dict) and sampling is None:
                sampling = parse(SamplingBody, orjson.dumps(metadata.pop("sampling")), "body", "metadata", "sampling")
            if ours := [name for name in metadata if name.startswith(adhoc.OURS)]:
                raise wrong(f"names that begin with {adhoc.OURS!r} are ours", "body", "metadata", ours[0])
        changed = None if sampling is None else sampling.model_dump(exclude_none=True)
        return Registration(prompt_uid=prompt_uid, channel=body.channel, metadata=metadata, sampling=changed)

    async def _messages(self, rollout_id: str, body: RewardBody) -> list[Message]:
        """What is to be judged: as given, or as recorded of the reply with these tokens, or the text that they spell."""
        if body.messages is not None:
            return expand(body.messages)
        prompt_ids, response_ids = body.prompt_ids or [], body.response_ids or []
        attempt = await self._trajectories.find(rollout_id, whole=True) if rollout_id else None
        if attempt is not None:
            steps = {step.index: step for step in attempt.steps}
            step = find_step(steps, StepBody(prompt_ids=prompt_ids, response_ids=response_ids))
            if step is not None:
                return list(TokenGraph(attempt).messages(step.answer) or [step.message])
        decode = self._service.source.spelling.decode
        return [{"role": "user", "content": decode(prompt_ids)}, {"role": "assistant", "content": decode(response_ids)}]

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        body = await read(request, kind, self._limits.body_bytes)
        for name in body.ignored():
            self._service.count(f"ignored:{name}")
        return body
