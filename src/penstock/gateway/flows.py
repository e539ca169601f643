"""Flow routes: `/generate`, steps that flows submit, rewards, and trajectories that callers name.

Errors are `{"detail": …}`, with 422 if a body does not have the expected form.
"""

import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from penstock.codec import context_digest
from penstock.errors import GraderError, PoolFailed, RequestError, WorkerLost
from penstock.gateway.auth import GatewayTokens
from penstock.gateway.call import GatewayLimits
from penstock.gateway.call_pipeline import CallPipeline
from penstock.gateway.control import BoundedReward, SamplingBody
from penstock.gateway.dialects.generate import flatten_nested
from penstock.gateway.graph import TokenGraph
from penstock.gateway.imported import IMPORTED, IMPORTED_KEY, NO_LOGPROBS, check_imported, import_steps
from penstock.gateway.model_routes import PROMPT_UID
from penstock.gateway.routes import DEFAULT_PROMPT, json_response
from penstock.gateway.session import RESERVED_PREFIX, Sessions, pool_refusals
from penstock.gateway.trajectories import FLOW_SOURCE, Registration, Trajectories
from penstock.graders.rule import assistant_text, rule_reward
from penstock.http.asgi import JsonBudget, check_size, header, parse_json, read_body
from penstock.http.listen import root_url
from penstock.pool.base import Pool
from penstock.records import Attempt, Grade, Mark, Message, Step

T = TypeVar("T", bound=BaseModel)


# Bodies and errors

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Bounded by `MAX_JSON_VALUES`, like all of the body. The first wrong entry ends the check: a million errors take seconds."""
Uid = Annotated[str, Field(max_length=1000)]
MAX_STEPS, MAX_MESSAGES, MAX_METADATA = 1000, 10_000, 10_000
"""Steps in one submission; messages to reward; JSON values in a small body, such as metadata, and in dataset fields."""
MAX_SMALL_BYTES = 4 << 20
"""The limit of a body without tokens and messages."""
MAX_REWARD_BYTES = 8 << 20
"""Rules search the text with regular expressions, which nothing can interrupt."""


class SchemaError(RequestError):
    """A body, query or path that is not of the form asked for."""

    def __init__(self, detail: list[dict[str, Any]]) -> None:
        where = ".".join(map(str, detail[0]["loc"]))
        super().__init__(f"{where}: {detail[0]['msg']}", status=422, code="invalid_value", param=where)
        self.detail = detail


def detail_body(error: RequestError) -> dict[str, Any]:
    return {"detail": error.detail if isinstance(error, SchemaError) else str(error), "code": error.code}


def schema_error(message: str, *where: str | int) -> SchemaError:
    return SchemaError([{"type": "value_error", "loc": list(where), "msg": message}])


class FlowBody(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    def ignored(self) -> list[str]:
        """Names of fields that are not known."""
        return sorted(self.model_extra or {})


class StepBody(FlowBody):
    """A step as a flow submits it. What was sampled is known here already."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    reward: BoundedReward | None = None
    rollout_log_probs: Annotated[list[FiniteFloat], Field(fail_fast=True)] | None = None
    trajectory_uid: Uid = ""
    prompt_uid: Uid = ""
    step_index: int = 0
    policy_version: int = 0
    is_last: bool = False
    metadata: dict[str, Any] | None = None
    multi_modal_data: Any = None
    routed_experts: Any = None

    @model_validator(mode="after")
    def _aligned(self) -> "StepBody":
        given = self.rollout_log_probs
        if given is not None and len(given) != len(self.response_ids):
            raise ValueError(f"{len(given)} rollout_log_probs for {len(self.response_ids)} response_ids; give one each, or none")
        return self

    def ignored(self) -> list[str]:
        unused = [name for name in ("multi_modal_data", "routed_experts", "metadata") if getattr(self, name)]
        return [*super().ignored(), *unused]


class StepsBody(FlowBody):
    steps: list[StepBody] = Field(max_length=MAX_STEPS, fail_fast=True)


class RewardBody(FlowBody):
    """`POST /compute_reward`: messages, or the tokens of one reply."""

    trajectory_uid: Uid = ""
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    dataset_fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    prompt_ids: TokenIds | None = None
    response_ids: TokenIds | None = None
    num_turns: int = 2
    extra_fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    multi_modal_data: Any = None

    @model_validator(mode="after")
    def _one_form(self) -> "RewardBody":
        if self.messages is None and (self.prompt_ids is None or self.response_ids is None):
            raise ValueError("give messages, or prompt_ids and response_ids")
        _check_values(self.dataset_fields, self.extra_fields)
        return self


class RegisterBody(FlowBody):
    channel: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$")
    metadata: dict[str, Any] | None = None
    sampling: SamplingBody | None = None


class CompleteBody(FlowBody):
    reward: BoundedReward | None = None
    channel: Annotated[str, Field(max_length=200)] | None = None


class InitBody(FlowBody):
    pass


def _check_values(*fields: dict[str, Any]) -> None:
    budget = JsonBudget(MAX_METADATA)
    try:
        for each in fields:
            budget.spend(each, "dataset_fields")
    except RequestError as error:
        raise ValueError(str(error)) from error


async def read_small(request: Request, kind: type[T]) -> T:
    """See `read_as`; for a body without tokens and messages, whose values are counted before pydantic makes an error of each."""
    body = await read_body(request.receive, MAX_SMALL_BYTES)
    if body is None:
        raise RequestError("the caller hung up before its request was whole", code="incomplete_request")
    try:
        JsonBudget(MAX_METADATA).spend(orjson.loads(body.strip() or b"{}"), "the body")
    except orjson.JSONDecodeError:
        pass  # pydantic says what is wrong with it
    except RequestError as error:
        raise schema_error(str(error), "body") from error
    return parse_as(kind, body.strip() or b"{}")


async def read_as(request: Request, kind: type[T], limit: int) -> T:
    """The request's body as a `kind`, an empty body as `{}`; SchemaError 422 if it has another form."""
    body = await read_body(request.receive, limit)
    if body is None:
        raise RequestError("the caller hung up before its request was whole", code="incomplete_request")
    if kind is StepsBody and body.count(b'"response_ids"') > MAX_STEPS:  # pydantic would validate all of them first
        raise schema_error(f"hold more than {MAX_STEPS}; submit them in several requests", "body", "steps")
    return parse_as(kind, body.strip() or b"{}")


def parse_as(kind: type[T], body: bytes, *where: str) -> T:
    """`body` as a `kind`; SchemaError 422 if it has another form."""
    check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)[:20]
        where = where or ("body",)
        raise SchemaError(
            [{"type": each["type"], "loc": [*where, *each["loc"]], "msg": each["msg"]} for each in details]
        ) from error


# Routes


class RewardFunction(Protocol):
    def __call__(self, rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> Awaitable[float]:
        """`rollout_id` is empty if unknown; `fields` are of the dataset row. GraderError if there is no reward."""
        ...


async def reward_by_rule(rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> float:
    return rule_reward(assistant_text(messages), fields)


class FlowRoutes:
    """The endpoints. `scope["rollout_id"]` is the rollout of the caller's flow token; empty if it may act for any rollout."""

    def __init__(
        self,
        pool: Pool,
        sessions: Sessions,
        trajectories: Trajectories,
        pipeline: CallPipeline,
        *,
        tokens: GatewayTokens,
        limits: GatewayLimits,
    ) -> None:
        self.reward_function: RewardFunction | None = None
        self._pool = pool
        self._sessions = sessions
        self._trajectories = trajectories
        self._submissions = Submissions(pool, sessions, trajectories, pipeline)
        self._pipeline = pipeline
        self._tokens = tokens
        self._limits = limits

    async def init(self, request: Request) -> Response:
        """The caller's rollout, or a new one, and the base URL for its agent."""
        await self._read(request, InitBody)
        own_id = request.scope["rollout_id"]
        root = root_url(self._sessions.base_url, header(request.scope["headers"], b"host"))
        if not own_id:
            uid = self._tokens.new_trajectory_uid()
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
            if not step.trajectory_uid and not request.scope["rollout_id"]:
                raise schema_error("say which trajectory the step belongs to", "body", "steps", index, "trajectory_uid")
            rollout_id = self._own(request, step.trajectory_uid or request.scope["rollout_id"])
            by_rollout.setdefault(rollout_id, []).append(step)
        await self._submissions.take(by_rollout, request.query_params.get("channel"))
        return json_response({"accepted": len(body.steps)})

    async def reward(self, request: Request) -> Response:
        """The reward by the run's grader, or by the rule for the row's data source."""
        body = await self._read(request, RewardBody, MAX_REWARD_BYTES)
        named = body.trajectory_uid or request.scope["rollout_id"]
        rollout_id = self._own(request, named) if named else ""
        if self.reward_function is None:
            text = "this gateway has no judge; grade in the flow itself, or run it with `penstock train`"
            raise RequestError(text, status=503, code="no_judge")
        messages = await self._messages(rollout_id, body)
        try:
            with pool_refusals(status=404, code="unknown_rollout"):
                reward = await self.reward_function(rollout_id, messages, {**body.extra_fields, **body.dataset_fields})
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
        own_id, rollout_id = request.scope["rollout_id"], self._tokens.rollout_of(name)
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
        attempt = await self._trajectories.find(rollout_id, with_steps=True) if rollout_id else None
        if attempt is not None:
            steps = {step.index: step for step in attempt.steps}
            step = find_step(steps, StepBody(prompt_ids=prompt_ids, response_ids=response_ids))
            if step is not None:
                return list(TokenGraph(attempt).messages(step.answer) or [step.message])
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
        named, token_rollout = ids.get("trajectory_uid") or "", scope["rollout_id"]
        if not isinstance(named, str):
            raise RequestError("trajectory_uid must be a string", status=422, code="invalid_value", param="trajectory_uid")
        if token_rollout and named and self._tokens.rollout_of(named) != token_rollout:
            text = f"trajectory_uid names {named[:200]}, but the caller's is {token_rollout}; leave it out"
            raise RequestError(text, status=403, code="rollout_mismatch", param="trajectory_uid")
        if not token_rollout:
            named = named or header(scope["headers"], b"x-rollout-id")
            scope["rollout_id"] = self._tokens.rollout_of(named) if named else self._tokens.new_trajectory_uid()
        if scope[PROMPT_UID] == DEFAULT_PROMPT and isinstance(ids.get("prompt_uid"), str):
            scope[PROMPT_UID] = ids["prompt_uid"] or DEFAULT_PROMPT


def _ids(body: bytes) -> dict[str, Any]:
    try:
        return parse_json(body)
    except RequestError as error:
        raise RequestError(str(error), status=422, code=error.code) from error


# Submitted steps

SUBMITTED, NOT_SUBMITTED = "submitted by its flow", "not submitted by its flow"
MAX_COMPARED_STEPS = 8
"""Newest steps that a refused one is compared with, to say in what it differs."""


class MatchedStep(NamedTuple):
    submitted: StepBody
    recorded: Step


class RolloutSubmission(NamedTuple):
    """The submitted steps of one rollout, checked and not yet stored."""

    rollout_id: str
    steps: Sequence[StepBody]
    imported: Sequence[StepBody] = ()
    """Those that were sampled elsewhere."""
    unknown: bool = False
    """Whether the rollout is not open here."""


class Submissions:
    """Stores what flows submit. Submitting the same again changes nothing."""

    def __init__(self, pool: Pool, sessions: Sessions, trajectories: Trajectories, pipeline: CallPipeline) -> None:
        self._pool = pool
        self._sessions = sessions
        self._trajectories = trajectories
        self._pipeline = pipeline

    async def take(self, by_rollout: Mapping[str, Sequence[StepBody]], channel: str | None) -> None:
        """Store the rewards of steps, and complete a rollout with its last one; RequestError before anything is stored."""
        accepted = [await self._accept(rollout_id, steps, channel) for rollout_id, steps in by_rollout.items()]
        for each in filter(None, accepted):
            await self._import(each, channel)
            graph = await (await self._sessions.get(each.rollout_id)).graph(self._pool)
            for submitted in each.steps:
                await self._store(each.rollout_id, self._find(graph, submitted))
            if any(submitted.is_last for submitted in each.steps):
                await self._mark_others(each.rollout_id, graph)
                await self._trajectories.finish(each.rollout_id)

    async def _accept(self, rollout_id: str, steps: Sequence[StepBody], channel: str | None) -> RolloutSubmission | None:
        try:
            session = await self._sessions.get(rollout_id)
            graph = await session.graph(self._pool)
        except RequestError as error:
            if error.code == "unknown_rollout":
                check_imported(steps, self._vocabulary)
                return RolloutSubmission(rollout_id, steps, imported=steps, unknown=True)
            if error.code not in ("rollout_complete", "rollout_ended"):
                raise
            await self._check_repeated(rollout_id, steps, error)
            return None
        if channel not in (None, session.rollout.channel):
            self._pipeline.count("ignored:channel")
        missing = [submitted for submitted in steps if find_step(graph.steps, submitted) is None]
        if missing and IMPORTED_KEY in ((await self._pool.task(rollout_id)).metadata or {}):
            check_imported(missing, self._vocabulary)
            return RolloutSubmission(rollout_id, steps, imported=missing)
        for submitted in missing:
            raise RequestError(f"this step was not sampled here: {_difference(graph, submitted)}", status=409, code="not_sampled")
        return RolloutSubmission(rollout_id, steps)

    @property
    def _vocabulary(self) -> int:
        tokenizer: Any = self._pipeline.source.tokenizer
        return tokenizer.core.get_vocab_size()

    async def _import(self, submission: RolloutSubmission, channel: str | None) -> None:
        """Open the trajectory if need be, and append what was sampled elsewhere."""
        if not submission.imported:
            return
        if submission.unknown:
            prompt_uid = submission.steps[0].prompt_uid or DEFAULT_PROMPT
            opened = Registration(prompt_uid=prompt_uid, channel=channel, metadata={IMPORTED_KEY: True})
            await self._trajectories.register(submission.rollout_id, opened)
            await self._mark(Mark(rollout_id=submission.rollout_id, note=IMPORTED))
        self._pipeline.count("imported_steps")
        session = await self._sessions.get(submission.rollout_id)
        await import_steps(self._pool, session, submission.imported, self._pipeline.source.tokenizer)

    def _find(self, graph: TokenGraph, submitted: StepBody) -> MatchedStep:
        step = find_step(graph.steps, submitted)
        assert step is not None, "`_accept` refuses steps that are not recorded"
        for name in submitted.ignored():
            self._pipeline.count(f"ignored:{name}")
        logprobs = submitted.rollout_log_probs
        if logprobs is not None and not all(map(_close, logprobs, step.logprobs)):
            self._pipeline.count("replaced:rollout_log_probs")
        if submitted.policy_version not in (0, *step.versions):
            self._pipeline.count("replaced:policy_version")
        return MatchedStep(submitted, step)

    async def _store(self, rollout_id: str, found: MatchedStep) -> None:
        index, reward = found.recorded.index, found.submitted.reward
        if reward is None and not is_kept_out(found):
            await self._mark(Mark(rollout_id=rollout_id, step=index, note=SUBMITTED))
        elif reward is None:
            return
        else:
            await self._trajectories.grade(Grade(rollout_id=rollout_id, reward=reward, source=FLOW_SOURCE, step=index))

    async def _mark_others(self, rollout_id: str, graph: TokenGraph) -> None:
        """Exclude steps that were never submitted from training."""
        attempt = await self._pool.attempt(rollout_id, first_step=graph.next_step, first_node=graph.next_node)
        known = _submitted(attempt) | {mark.step for mark in attempt.marks}
        for index in sorted(graph.steps.keys() - known):
            await self._mark(Mark(rollout_id=rollout_id, step=index, trainable=False, note=NOT_SUBMITTED))

    async def _mark(self, mark: Mark) -> None:
        with pool_refusals(status=409, code="not_marked"):
            await self._pool.mark(mark)

    async def _check_repeated(self, rollout_id: str, steps: Sequence[StepBody], late: RequestError) -> None:
        """Accept a repeated submission to a rollout that has ended; raises `late` for anything new."""
        attempt = await self._pool.attempt(rollout_id)
        recorded, known = {step.index: step for step in attempt.steps}, _submitted(attempt)
        rewards = {grade.step: grade.reward for grade in attempt.grades if grade.source == FLOW_SOURCE and grade.step is not None}
        for submitted in steps:
            step = find_step(recorded, submitted)
            if step is None or step.index not in known or rewards.get(step.index) != submitted.reward:
                raise late


def is_kept_out(found: MatchedStep) -> bool:
    """Whether it was imported without log-probabilities: it has no answer's name, and its mark says why."""
    return not (found.recorded.answer or found.recorded.behaviour_known)


def find_step(steps: Mapping[int, Step], submitted: StepBody) -> Step | None:
    """The recorded step with exactly these tokens; of several, the one with the submitted index."""
    digest, reply_ids = context_digest([*submitted.prompt_ids, *submitted.response_ids]), tuple(submitted.response_ids)
    same = [step for step in steps.values() if step.context == digest and step.completion_ids == reply_ids]
    return next((step for step in same if step.index == submitted.step_index), same[0] if same else None)


def _submitted(attempt: Attempt) -> set[int]:
    graded = {grade.step for grade in attempt.grades if grade.source == FLOW_SOURCE and grade.step is not None}
    return graded | {mark.step for mark in attempt.marks if mark.note in (SUBMITTED, NO_LOGPROBS) and mark.step is not None}


def _close(submitted: float, recorded: float) -> bool:
    return math.isclose(submitted, recorded, abs_tol=1e-3)


def _difference(graph: TokenGraph, submitted: StepBody) -> str:
    """How the step differs from the most similar recorded one."""
    newest = sorted(graph.steps)[-MAX_COMPARED_STEPS:]
    if not newest:
        return "its rollout has no recorded call; generate through this gateway first"
    ids = [*submitted.prompt_ids, *submitted.response_ids]
    alike = {index: _alike(graph.context(index), ids) for index in newest}
    best = max(newest, key=lambda index: (alike[index], index))
    prompt, reply = len(graph.prompt(graph.steps[best].node)), len(graph.steps[best].completion_ids)
    at = alike[best]
    if at == prompt + reply == len(ids):
        return f"step {best} has these tokens, but {prompt} of them are its prompt, not {len(submitted.prompt_ids)}"
    which, index = ("prompt_ids", at) if at < prompt else ("response_ids", at - prompt)
    sizes = f"{prompt} and {reply} tokens were recorded, {len(submitted.prompt_ids)} and {len(submitted.response_ids)} given"
    return f"it differs from step {best} in {which}[{index}] ({sizes}); submit the ids that /generate answered, unchanged"


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
