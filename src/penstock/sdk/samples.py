"""RolloutSample: one conversation of a rollout, as the gateway recorded it and as its agent reported it."""

import base64
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, cast

import orjson
from pydantic import TypeAdapter

from penstock.records import Message


@dataclass(kw_only=True)
class RolloutSample:
    """One transcript of a rollout, as its grader sees it."""

    id: str
    messages: list[Message] = field(default_factory=list[Message])
    """As recorded: the last call's messages and its reply. In the form of the agent's framework if that reported a conversation in
    which the policy says only what it sampled. Empty if the gateway saw no call of it."""
    transcript: list[Message] = field(default_factory=list[Message])
    """As recorded, always in the OpenAI form, system prompt included."""
    replies: list[Message] = field(default_factory=list[Message])
    """The assistant messages of `transcript` that the policy sampled, without those that a request brought along."""
    reported_messages: list[Message] = field(default_factory=list[Message])
    """What the agent says: its framework's conversation, or what its workflow returned. Nothing of it needs to be true."""
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Schemas of the tools in its last call."""
    steps: tuple[int, ...] = ()
    """Indices of its calls, for `GraderContext.set_step_reward`."""
    label: str | None = None
    reward: float | None = None
    remove_sample: bool = False
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def text(self) -> str:
        """The policy's last reply; empty if there is none."""
        content = self.replies[-1].get("content") if self.replies else None
        return content if isinstance(content, str) else ""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """As pydantic's `model_dump`, with its options."""
        return cast("dict[str, Any]", _adapter(type(self)).dump_python(self, **options))

    def model_dump_json(self, **options: Any) -> str:
        """As pydantic's `model_dump_json`, with its options."""
        return _adapter(type(self)).dump_json(self, **options).decode()


@cache
def _adapter(cls: type[RolloutSample]) -> TypeAdapter[RolloutSample]:
    return TypeAdapter(cls)


def fast_copy(value: Any) -> Any:
    """Returns a deep copy, at a fraction of `deepcopy`'s cost for JSON values."""
    kind = value.__class__
    if kind is dict:
        return {key: fast_copy(item) for key, item in value.items()}
    if kind is list:
        return [fast_copy(item) for item in value]
    return value if kind in _IMMUTABLE else deepcopy(value)


_IMMUTABLE = frozenset({str, int, float, bool, type(None)})


def to_json_values(messages: Any) -> list[Message]:
    """Converts messages to JSON values, whatever objects a framework put in: the grader sees the same from every executor."""
    option = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS
    try:
        return cast("list[Message]", orjson.loads(orjson.dumps(messages, default=_json_value, option=option)))
    except orjson.JSONEncodeError:  # integers beyond 64 bits or lone surrogates, which only Python's own writer takes
        return cast("list[Message]", deepcopy(messages))


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return list(cast("set[Any]", value)) if isinstance(value, set | frozenset | tuple) else str(value)


def policy_messages(sample: RolloutSample) -> list[Message]:
    """Returns what the policy sampled; of a sample made by hand, its messages."""
    return sample.replies or sample.transcript or sample.messages


def assistant_text(messages: Iterable[Message]) -> str:
    """Returns all text of the policy, in order: an answer may come before or after a tool call."""
    return "\n".join(filter(None, (_text(message.get("content")) for message in messages if message.get("role") == "assistant")))


def _text(content: Any) -> str:
    """Returns a message's text, or that of its parts."""
    if not isinstance(content, list):
        return str(content or "")
    parts = [cast("Mapping[str, Any]", part) for part in cast("list[Any]", content) if isinstance(part, Mapping)]
    return "\n".join(str(part["text"]) for part in parts if "text" in part)
