"""The bodies of the rollout server's protocol, in both directions. The names are the Osmosis protocol's own.

    controller ── POST /rollout: RolloutInitRequest ─────────────▶ server      accepted, then run
    controller ◀─ POST completion_callback_url: RolloutCompleteRequest ─ server  the workflow has ended
               ── CompletionReply: what was recorded ────────────▶
    controller ◀─ POST grader_callback_url: GraderCompleteRequest ─ server       the grader has ended

Fields marked *ours* are extensions. They are sent only when set, and a peer that does not know them can ignore them.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from penstock.records import End
from penstock.sdk.context import MAX_COMPONENTS

LONGEST_ID = 256


class RolloutStatus(StrEnum):
    """The state of a workflow."""

    PENDING = "pending"
    SUCCESS = "success"
    FAILURE = "failure"


class GraderStatus(StrEnum):
    PENDING = "pending"
    SUCCESS = "success"
    FAILURE = "failure"


class RolloutErrorCategory(StrEnum):
    """The cause of a failure: a deadline, invalid input, the policy's endpoint, or the author's code."""

    TIMEOUT = "timeout"
    VALIDATION_ERROR = "validation_error"
    HTTP_ERROR = "http_error"
    AGENT_ERROR = "agent_error"


class RolloutState(StrEnum):
    """The state of a rollout on a server; `unknown`: the server does not know it, or no longer."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADING = "grading"
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


def path_segment(name: str) -> str:
    """Returns `name` if it can be one segment of a path; ValueError says why not."""
    if not name or len(name) > LONGEST_ID:
        raise ValueError(f"has {len(name)} characters; use 1 to {LONGEST_ID}")
    if name in (".", "..") or any(letter in name for letter in "/\\\0"):
        raise ValueError("must be one path segment: not '.' or '..', without '/', '\\' and NUL")
    return name


Segment = Annotated[str, AfterValidator(path_segment)]
Seconds = Annotated[FiniteFloat, Field(gt=0)]


def _object(value: Any) -> Any:
    return {} if value is None else value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_object)]
"""Null is an empty one: the upstream SDK sends null for what it does not have."""


class ProtocolBody(BaseModel):
    """Unknown fields are ignored: a later version of the protocol may send more."""

    model_config = ConfigDict(extra="ignore")


class RolloutInitRequest(ProtocolBody):
    rollout_id: Segment
    initial_messages: list[dict[str, Any]] = Field(max_length=10_000, fail_fast=True)
    chat_completions_url: str
    """The base URL of the policy: clients append `/chat/completions`."""
    completion_callback_url: str
    label: str | None = None
    metadata: dict[str, Any] | None = None
    controller_api_key: str | None = None
    """For the callbacks, and for the policy where `llm_api_key` is absent."""
    llm_api_key: str | None = None
    grader_callback_url: str | None = None
    """None: the rollout is not graded."""
    agent_timeout_sec: Seconds | None = None
    grader_timeout_sec: Seconds | None = None
    extra_fields: JsonObject = Field(default_factory=dict[str, Any])
    records: bool = False
    """*Ours*: the reply to the completion holds what was recorded; without it nothing is graded."""


class RolloutInitResponse(ProtocolBody):
    pass


class RolloutCompleteRequest(ProtocolBody):
    """The workflow has ended; sent before grading."""

    rollout_id: str
    status: RolloutStatus
    extra_fields: JsonObject = Field(default_factory=dict[str, Any])
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    strays: list[str] | None = Field(default=None, max_length=10_000, fail_fast=True)
    """*Ours*: providers that the workflow called directly."""
    end: End | None = None
    """*Ours*: how a failed rollout ends. It separates our deadline from a TimeoutError of the author's code, and a failing engine
    from a request that it refused."""


class RecordedTranscript(ProtocolBody):
    """*Ours*: what the controller's gateway recorded of one agent's conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    steps: list[int] = Field(default_factory=list[int])
    replies: list[dict[str, Any]] | None = None
    """What the policy said, call by call."""


class CompletionReply(ProtocolBody):
    """The controller's reply to a completion."""

    trajectory: dict[str, Any] | None = None
    transcripts: dict[str, RecordedTranscript] = Field(default_factory=dict[str, RecordedTranscript])
    """*Ours*: what was recorded, which is what the grader sees."""


class SampleBody(ProtocolBody):
    """One sample, as a grader left it."""

    id: str
    messages: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    label: str | None = None
    reward: FiniteFloat | None = None
    remove_sample: bool = False
    metrics: JsonObject = Field(default_factory=dict[str, Any])
    extra_fields: JsonObject = Field(default_factory=dict[str, Any])


class GraderCompleteRequest(ProtocolBody):
    """The grader has ended."""

    rollout_id: str
    status: GraderStatus
    samples: Annotated[dict[str, SampleBody], BeforeValidator(_object)] = Field(default_factory=dict[str, SampleBody])
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    reward: FiniteFloat | None = None
    """*Ours*: of the whole rollout."""
    step_rewards: dict[int, FiniteFloat] | None = None
    """*Ours*: by the index of the call."""
    components: dict[str, FiniteFloat] | None = Field(default=None, max_length=MAX_COMPONENTS)
    """*Ours*: named parts of `reward`."""
    filled: list[str] | None = Field(default=None, max_length=10_000, fail_fast=True)
    """*Ours*: samples without a reward of their own; they carry the rollout's, for peers that only read samples' rewards."""
    misreported: list[str] | None = None
    """*Ours*: samples whose agents reported another conversation than was sampled."""
    end: End | None = None
    """*Ours*: as in RolloutCompleteRequest."""
