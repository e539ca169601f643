"""Flow routes: `/generate`, steps that flows submit, rewards, and trajectories that callers name."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from penstock.errors import GraderError, PoolFailed, RequestError, WorkerLost
from penstock.gateway.app import GatewayParts, SamplingBody
from penstock.gateway.auth import Access, GatewayTokens
from penstock.gateway.graph import TokenGraph
from penstock.gateway.request import CALL_SCOPE, CallScope
from penstock.gateway.routes import DEFAULT_PROMPT, FunctionEndpoint, Route, json_response
from penstock.gateway.session import RESERVED_PREFIX, pool_refusals
from penstock.http.asgi import header, parse_json, read_body
from penstock.http.listen import root_url
from penstock.records import Message
from penstock.sdk.samples import assistant_text
from penstock_compat.gateway.bodies import (
    MAX_REWARD_BYTES,
    CompleteBody,
    InitBody,
    RegisterBody,
    RewardBody,
    StepBody,
    StepsBody,
    detail_body,
    parse_as,
    read_as,
    read_small,
    schema_error,
)
from penstock_compat.gateway.generate import flatten_nested
from penstock_compat.gateway.read_api import ReadApi
from penstock_compat.gateway.submissions import Submissions, find_step
from penstock_compat.gateway.trajectories import Registration, Trajectories
from penstock_compat.graders.rule import rule_reward


async def reward_by_rule(rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> float:
    return rule_reward(assistant_text(messages), fields)


class FlowRoutes:
    """The endpoints. `CallScope.rollout_id` is the rollout of the caller's flow token; empty if it may act for any rollout."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._pool = parts.pool
        self._sessions = parts.sessions
        self._trajectories = Trajectories(parts.pool, parts.sessions, parts.named, parts.tokens)
        self._submissions = Submissions(parts.pool, parts.sessions, self._trajectories, parts.pipeline)
        self._pipeline = parts.pipeline
        self._tokens = parts.tokens
        self._limits = parts.limits

    def routes(self) -> list[Route]:
        """See `RoutePlugin`: the routes of flows, and the read API."""
        base = "/{trajectory}/{prompt}/v1"
        posted = {
            "/submit_steps": self.submit,
            "/compute_reward": self.reward,
            "/init_trajectory": self.init,
            f"{base}/register_trajectory": self.register,
            f"{base}/complete_trajectory": self.complete,
            "/complete_trajectory/{trajectory}": self.complete,
        }
        mode = "open" if self._tokens.is_open else "token"
        return [
            Route("GET", "/ready", Access.NONE, FunctionEndpoint(self.ready), detail_body),
            *(Route("POST", path, Access.FLOW, FunctionEndpoint(endpoint), detail_body) for path, endpoint in posted.items()),
            *ReadApi(self._pool, self._pipeline.engine, mode=mode).routes(),
        ]

    def model_route(self, dialect: str, route: ASGIApp) -> ASGIApp:
        """See `RoutePlugin`."""
        return GenerateRoute(route, self._tokens, body_bytes=self._limits.body_bytes) if dialect == "generate" else route

    async def init(self, request: Request) -> Response:
        """The caller's rollout, or a new one, and the base URL for its agent."""
        await self._read(request, InitBody)
        own_id = CallScope.of(request.scope).rollout_id
        root = root_url(self._sessions.base_url, header(request.scope["headers"], b"host"))
        if not own_id:
            uid = self._tokens.new_signed_id()
            return json_response({"trajectory_uid": uid, "base_url": f"{root}/{uid}/{DEFAULT_PROMPT}/v1"})
        session = await self._sessions.get(own_id)
        return json_response({"trajectory_uid": own_id, "base_url": f"{root}/{session.token}/{session.rollout.group_id}/v1"})

    async def register(self, request: Request) -> Response:
        """Set a trajectory's channel, metadata and sampling, before its first call."""
        body = await self._read(request, RegisterBody)
        rollout_id = self._own(request, request.path_params["trajectory"])
        registration = self._registration(body, request.path_params["prompt"])
        await self._trajectories.register(rollout_id, registration)
        return json_response({"status": "ok"})

    async def complete(self, request: Request) -> Response:
        """Grade a trajectory and refuse its further calls."""
        body = await self._read(request, CompleteBody)
        rollout_id = self._own(request, request.path_params["trajectory"])
        rollout = await self._trajectories.complete(rollout_id, body.reward)
        if body.channel not in (None, rollout.channel):
            self._pipeline.count("ignored:channel")
        return json_response({"status": "ok"})

    async def submit(self, request: Request) -> Response:
        """Store the rewards of steps that were sampled here, all of them or none; steps of unknown trajectories are imported."""
        body = await self._read(request, StepsBody, self._limits.body_bytes)
        by_rollout: dict[str, list[StepBody]] = {}
        for index, step in enumerate(body.steps):
            if not step.trajectory_uid and not CallScope.of(request.scope).rollout_id:
                raise schema_error("say which trajectory the step belongs to", "body", "steps", index, "trajectory_uid")
            rollout_id = self._own(request, step.trajectory_uid or CallScope.of(request.scope).rollout_id)
            by_rollout.setdefault(rollout_id, []).append(step)
        await self._submissions.take(by_rollout, request.query_params.get("channel"))
        return json_response({"accepted": len(body.steps)})

    async def reward(self, request: Request) -> Response:
        """The reward by the run's grader, or by the rule for the row's data source."""
        body = await self._read(request, RewardBody, MAX_REWARD_BYTES)
        named = body.trajectory_uid or CallScope.of(request.scope).rollout_id
        rollout_id = self._own(request, named) if named else ""
        reward_function = self._parts.reward_function() or (None if self._parts.has_run else reward_by_rule)
        if reward_function is None:
            text = "this gateway has no judge; grade in the flow itself, or run it with `penstock train`"
            raise RequestError(text, status=503, code="no_judge")
        messages = await self._messages(rollout_id, body)
        try:
            with pool_refusals(status=404, code="unknown_rollout"):
                reward = await reward_function(rollout_id, messages, {**body.extra_fields, **body.dataset_fields})
        except GraderError as error:
            raise RequestError(str(error), status=422, code="not_judged") from error
        except (TimeoutError, WorkerLost) as error:
            raise RequestError(f"the judge gave no answer: {error}", status=503, code="not_judged") from error
        return json_response({"reward": reward, "reward_score": reward, "reward_extra_info": {}})

    async def ready(self, request: Request) -> Response:
        """Whether calls are served."""
        if self._sessions.stopping:
            raise RequestError("the gateway is stopping", status=503, code="stopping")
        try:
            await self._pool.position()
        except PoolFailed as error:
            raise RequestError(f"the pool cannot be used: {error}", status=503, code="not_recorded") from error
        return json_response({"status": "ready"})

    def _own(self, request: Request, name: str) -> str:
        """The rollout that `name` stands for; RequestError 403 if the caller may not act for it."""
        own_id, rollout_id = CallScope.of(request.scope).rollout_id, self._tokens.rollout_of(name)
        if own_id and rollout_id != own_id:
            text = f"the flow token is that of {own_id}; it does not open trajectory {rollout_id[:200]}"
            raise RequestError(text, status=403, code="rollout_mismatch")
        return rollout_id

    def _registration(self, body: RegisterBody, prompt_uid: str) -> Registration:
        metadata = None if body.metadata is None else dict(body.metadata)
        sampling = body.sampling
        if metadata is not None:
            if metadata.pop("policy_version", None) is not None:
                self._pipeline.count("ignored:policy_version")
            if isinstance(metadata.get("sampling"), dict) and sampling is None:
                sampling = parse_as(SamplingBody, orjson.dumps(metadata.pop("sampling")), "body", "metadata", "sampling")
            if ours := [name for name in metadata if name.startswith(RESERVED_PREFIX)]:
                raise schema_error(f"names that begin with {RESERVED_PREFIX!r} are ours", "body", "metadata", ours[0])
        changed = None if sampling is None else sampling.model_dump(exclude_none=True)
        return Registration(prompt_uid=prompt_uid, channel=body.channel, metadata=metadata, sampling=changed)

    async def _messages(self, rollout_id: str, body: RewardBody) -> list[Message]:
        """The messages to grade: as sent, or of the recorded step with these tokens, or the text of the tokens."""
        if body.messages is not None:
            return flatten_nested(body.messages)
        prompt_ids, response_ids = body.prompt_ids or [], body.response_ids or []
        rollout = await self._trajectories.find(rollout_id, with_steps=True) if rollout_id else None
        if rollout is not None:
            steps = {step.index: step for step in rollout.steps}
            step = find_step(steps, StepBody(prompt_ids=prompt_ids, response_ids=response_ids))
            if step is not None:
                return list(TokenGraph(rollout).messages(step.answer) or [step.message])
        decode = self._pipeline.source.tokenizer.decode
        return [{"role": "user", "content": decode(prompt_ids)}, {"role": "assistant", "content": decode(response_ids)}]

    async def _read(self, request: Request, kind: type[Any], limit: int | None = None) -> Any:
        body = await (read_small(request, kind) if limit is None else read_as(request, kind, min(limit, self._limits.body_bytes)))
        for name in body.ignored():
            self._pipeline.count(f"ignored:{name}")
        return body


class GenerateRoute:
    """Reads the rollout from the body of a `/generate` call, then passes the call on with its body unread."""

    def __init__(self, model: ASGIApp, tokens: GatewayTokens, *, body_bytes: int) -> None:
        self._model = model
        self._tokens = tokens
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive, self._body_bytes)
        if body is None:
            return
        self._attribute(scope, _ids(body))
        unread = [body]

        async def receive_again() -> AsgiMessage:
            return {"type": "http.request", "body": unread.pop()} if unread else await receive()

        await self._model(scope, receive_again, send)

    def _attribute(self, scope: Scope, ids: dict[str, Any]) -> None:
        caller = CallScope.of(scope)
        named, token_rollout = ids.get("trajectory_uid") or "", caller.rollout_id
        if not isinstance(named, str):
            raise RequestError("trajectory_uid must be a string", status=422, code="invalid_value", param="trajectory_uid")
        if token_rollout and named and self._tokens.rollout_of(named) != token_rollout:
            text = f"trajectory_uid names {named[:200]}, but the caller's is {token_rollout}; leave it out"
            raise RequestError(text, status=403, code="rollout_mismatch", param="trajectory_uid")
        if not token_rollout:
            named = named or header(scope["headers"], b"x-rollout-id")
            caller = caller._replace(rollout_id=self._tokens.rollout_of(named) if named else self._tokens.new_signed_id())
        if caller.prompt_uid == DEFAULT_PROMPT and isinstance(ids.get("prompt_uid"), str):
            caller = caller._replace(prompt_uid=ids["prompt_uid"] or DEFAULT_PROMPT)
        scope[CALL_SCOPE] = caller


def _ids(body: bytes) -> dict[str, Any]:
    try:
        return parse_json(body)
    except RequestError as error:
        raise RequestError(str(error), status=422, code=error.code) from error
