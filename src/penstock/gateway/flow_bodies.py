"""What flow routes are sent, and how they refuse: `{"detail": …}`, with 422 where a body is not of the form that is asked for."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from starlette.requests import Request

from penstock.errors import RequestError
from penstock.gateway.control import SamplingBody
from penstock.http.asgi import read_body
from penstock.records import Message

T = TypeVar("T", bound=BaseModel)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SchemaError(RequestError):
    """A body, query or path that is not of the form asked for."""

    def __init__(self, detail: list[dict[str, Any]]) -> None:
        where = ".".join(map(str, detail[0]["loc"]))
        super().__init__(f"{where}: {detail[0]['msg']}", status=422, code="invalid_value", param=where)
        self.detail = detail


def detail_body(error: RequestError) -> dict[str, Any]:
    """The body of a refusal."""
    return {"detail": error.detail if isinstance(error, SchemaError) else str(error), "code": error.code}


def wrong(message: str, *where: str | int) -> SchemaError:
    """One thing that is wrong, and where."""
    return SchemaError([{"type": "value_error", "loc": list(where), "msg": message}])


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    def ignored(self) -> list[str]:
        """Names of what was sent and is not known."""
        return sorted(self.model_extra or {})


class StepBody(_Body):
    """One step as a flow tells it; what was sampled is known here already."""

    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    reward: FiniteFloat | None = None
    rollout_log_probs: list[FiniteFloat] | None = None
    trajectory_uid: str = ""
    prompt_uid: str = ""
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
        """See `_Body.ignored`."""
        unused = [name for name in ("multi_modal_data", "routed_experts", "metadata") if getattr(self, name)]
        return [*super().ignored(), *unused]


class StepsBody(_Body):
    """`POST /submit_steps`"""

    steps: list[StepBody]


class RewardBody(_Body):
    """`POST /compute_reward`: messages, or the tokens of one reply."""

    trajectory_uid: str = ""
    messages: list[Message] | None = None
    dataset_fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    prompt_ids: list[TokenId] | None = None
    response_ids: list[TokenId] | None = None
    num_turns: int = 2
    extra_fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    multi_modal_data: Any = None

    @model_validator(mode="after")
    def _one_form(self) -> "RewardBody":
        if self.messages is None and (self.prompt_ids is None or self.response_ids is None):
            raise ValueError("give messages, or prompt_ids and response_ids")
        return self


class RegisterBody(_Body):
    """`POST …/register_trajectory`"""

    channel: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$")
    metadata: dict[str, Any] | None = None
    sampling: SamplingBody | None = None


class CompleteBody(_Body):
    """`POST …/complete_trajectory`"""

    reward: FiniteFloat | None = None
    channel: str | None = None


class InitBody(_Body):
    """`POST /init_trajectory`"""


async def read(request: Request, kind: type[T], limit: int) -> T:
    """The request's body; an empty one says nothing. SchemaError 422 where it is not a `kind`."""
    body = await read_body(request.receive, limit)
    if body is None:
        raise RequestError("the caller hung up before its request was whole", code="incomplete_request")
    return parse(kind, body.strip() or b"{}")


def parse(kind: type[T], body: bytes, *where: str) -> T:
    """`body` as a `kind`; SchemaError 422 where it is none."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[:20]
        where = where or ("body",)
        raise SchemaError([{"type": each["type"], "loc": [*where, *each["loc"]], "msg": each["msg"]} for each in found]) from error
