"""Bodies of flow routes, and their errors: `{"detail": …}`, with 422 if a body does not have the expected form."""

from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from starlette.requests import Request

from penstock.errors import RequestError
from penstock.gateway.app import BoundedReward, SamplingBody
from penstock.http.asgi import JsonBudget, check_size, read_body
from penstock.records import Message

T = TypeVar("T", bound=BaseModel)


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
