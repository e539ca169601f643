"""Strands agents in a rollout: `RolloutAgent` is a `strands.Agent` whose calls the gateway serves and records.

agent = RolloutAgent(name="search", model=RolloutModel(params={"temperature": 1.0}), tools=[search], messages=ctx.prompt)
await agent.invoke_async()
"""

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar, cast
from uuid import uuid4

from openai.resources.chat.completions import AsyncCompletions
from pydantic import BaseModel
from strands import Agent
from strands.agent.agent_result import AgentResult
from strands.event_loop.streaming import process_stream
from strands.models.model import Model
from strands.models.openai import OpenAIModel
from strands.tools.structured_output.structured_output_utils import convert_pydantic_to_tool_spec
from strands.types.content import Messages
from strands.types.streaming import StreamEvent

from penstock.sdk.clients import refuse_to_block
from penstock.sdk.routing import PLACEHOLDER_MODEL, PLACEHOLDER_NAMES, REQUEST_MODEL, RolloutContext, get_rollout_context
from penstock.sdk.samples import RolloutSample, to_json_values

T = TypeVar("T", bound=BaseModel)

ROUTING = frozenset({"api_key", "api_base", "base_url", "extra_headers"})
"""Params that only the rollout sets, so that no setting can send its calls elsewhere."""


class RolloutModel(Model):
    """Placeholder for the policy. `RolloutAgent` replaces it with the rollout's model and sends `params` with each call.

    It holds only settings, so that a config with it can be copied for each rollout.
    """

    def __init__(self, params: Mapping[str, Any] | None = None, *, context_window_limit: int | None = None) -> None:
        if taken := sorted(ROUTING & (params or {}).keys()):
            raise ValueError(f"RolloutModel(params=…) has {taken}, which the rollout decides; leave them out")
        self.params = dict(params or {})
        self.context_window_tokens = context_window_limit

    def update_config(self, **model_config: Any) -> None:
        """Sets `params` for agents made afterwards."""
        if unknown := sorted(model_config.keys() - {"params"}):
            raise ValueError(f"RolloutModel has no setting {unknown}; it takes params")
        self.params = dict(model_config.get("params") or {})

    def get_config(self) -> dict[str, Any]:
        """Returns the settings under the names that Strands uses."""
        return {"model_id": PLACEHOLDER_MODEL, "params": dict(self.params), "context_window_limit": self.context_window_tokens}

    def stream(self, *_: Any, **__: Any) -> NoReturn:
        """Raises NotImplementedError: a placeholder cannot sample."""
        raise NotImplementedError(
            "RolloutModel only stands for the policy; give it to RolloutAgent(model=…) inside AgentWorkflow.run()"
        )

    def structured_output(self, *_: Any, **__: Any) -> NoReturn:
        self.stream()


class BoundModel(OpenAIModel):
    """Calls the policy for one agent of one rollout."""

    _supports_structured_output = True
    """Keeps all tools in the request: the gateway forces a required call, and a changed tool list would break the path."""

    def __init__(self, context: RolloutContext, transcript: str, config: Mapping[str, Any]) -> None:
        super().__init__(client=context.openai(transcript), **cast("Any", config))
        self.context = context
        self._calls: dict[str, dict[str, str]] = {}
        """Name and arguments of every tool call as the policy wrote them, by id."""

    async def stream(self, *args: Any, **options: Any) -> AsyncGenerator[StreamEvent, None]:
        written: dict[str, str] = {}
        async with aclosing(super().stream(*args, **options)) as events:
            async for event in events:
                block = cast("dict[str, Any]", event)
                if use := block.get("contentBlockStart", {}).get("start", {}).get("toolUse"):
                    written = self._calls[use["toolUseId"]] = {"name": use["name"], "arguments": ""}
                if use := block.get("contentBlockDelta", {}).get("delta", {}).get("toolUse"):
                    written["arguments"] += use["input"]
                yield event

    def format_request(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Sends faulty calls back as written, and moves parameters unknown to OpenAI, such as `top_k`, into `extra_body`."""
        request = super().format_request(*args, **kwargs)
        calls = [call for message in request["messages"] for call in message.get("tool_calls", ())]
        for call in calls:
            call["function"] = _as_written(call["function"], self._calls.get(call["id"]))
        if request["model"] in PLACEHOLDER_NAMES:
            request["model"] = REQUEST_MODEL
        own = {name: request.pop(name) for name in request.keys() - KNOWN}
        return request | {"extra_body": own | (request.get("extra_body") or {})} if own else request

    @classmethod
    def format_request_messages(cls, messages: Messages, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Sends an empty reply back as it was, not as the placeholder text or gap that Strands would put there."""
        return super().format_request_messages([_as_said(message) for message in messages], *args, **kwargs)

    async def structured_output(
        self, output_model: type[T], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Forces a call of a tool with the model's schema, which works with any policy; see `Model.structured_output`."""
        spec = convert_pydantic_to_tool_spec(output_model)
        forced: Any = {"tool": {"name": spec["name"]}}
        event: dict[str, Any] = {}
        async with aclosing(self.stream(prompt, [spec], system_prompt, tool_choice=forced, **kwargs)) as events:
            async for raw in process_stream(events):
                event = cast("dict[str, Any]", raw)
                yield event
        content: list[dict[str, Any]] = event["stop"][1]["content"]
        calls = [block["toolUse"] for block in content if "toolUse" in block]
        found = next((call["input"] for call in calls if call["name"] == spec["name"]), None)
        if found is None:
            raise ValueError(f"the policy gave no {output_model.__name__}; catch this, or give it more tokens")
        yield {"output": output_model(**found)}


class RolloutAgent(Agent):
    """A `strands.Agent` with the same arguments. With a `RolloutModel`, its calls are recorded under its `name` or `agent_id`;
    with any other model, it is a plain agent. Messages may have the OpenAI form, as in `ctx.prompt`.
    """

    def __init__(self, model: Any = None, messages: Any = None, *args: Any, **settings: Any) -> None:
        sample_id: str = settings.get("name") or settings.get("agent_id") or uuid4().hex
        model = _bound(model, sample_id, type(self).__name__)
        if "aux_model" in settings:
            settings["aux_model"] = _bound(settings["aux_model"], sample_id, type(self).__name__)
        super().__init__(model, None if messages is None else strands_messages(messages), *args, **settings)
        self.sample_id = sample_id
        """Name of the transcript that records its calls."""
        if isinstance(model, BoundModel):
            model.context.register_sample_source(sample_id, self)

    async def get_sample(self, name: str) -> RolloutSample:
        """Returns the messages so far, in the form of Strands."""
        return RolloutSample(id=name, messages=to_json_values(self.messages))

    def __call__(self, *args: Any, **kwargs: Any) -> AgentResult:
        """Refuses to block a running event loop, since the gateway may need that loop to answer; see `Agent.__call__`."""
        self._refuse_to_block()
        return super().__call__(*args, **kwargs)

    def structured_output(self, output_model: type[T], prompt: Any = None) -> T:
        """Refuses to block, as `__call__` does; see `Agent.structured_output`."""
        self._refuse_to_block()
        return super().structured_output(output_model, prompt)

    def stream_async(self, prompt: Any = None, **options: Any) -> AsyncIterator[Any]:
        """Also takes a list of messages in the OpenAI form; see `Agent.stream_async`."""
        given = _rows(prompt)
        return super().stream_async(strands_messages(given) if given else prompt, **options)

    def _refuse_to_block(self) -> None:
        if isinstance(self.model, BoundModel):
            refuse_to_block(f"{type(self).__name__} called without await", "`await agent.invoke_async(…)`")


def _bound(model: Any, sample_id: str, who: str) -> Any:
    """Returns a new model bound to the running rollout if `model` stands for the policy, else `model`."""
    if not isinstance(model, RolloutModel | BoundModel):
        return model
    context = get_rollout_context()
    if context is None:
        raise RuntimeError(f"{who} with a RolloutModel requires an active RolloutContext; make it inside AgentWorkflow.run()")
    return BoundModel(context, sample_id, model.get_config())


KNOWN = frozenset(inspect.signature(AsyncCompletions.create).parameters)
BLANK, NAMELESS = "[blank text]", "INVALID_TOOL_NAME"
"""What Strands sends in place of an empty reply, and of an invalid tool name."""


def _as_written(function: dict[str, str], written: dict[str, str] | None) -> dict[str, str]:
    """Returns the call as written if Strands replaced a faulty name or arguments. Keeps changes that an agent made."""
    repaired = written and (function["name"] == NAMELESS or (function["arguments"] == "{}" and not _is_json(written["arguments"])))
    return written if written and repaired else function


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _as_said(message: Any) -> Any:
    if message["role"] != "assistant":
        return message
    kept = [block for block in message["content"] if "reasoningContent" not in block]
    return {**message, "content": [{"text": ""}] if kept in ([], [{"text": BLANK}]) else kept}


def _rows(prompt: Any) -> list[Any] | None:
    rows = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    return rows if rows and all(isinstance(row, dict) and "role" in row for row in rows) else None


def strands_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Converts messages from the OpenAI form, or Strands' own. Pins system messages, so that Strands does not trim them."""
    made: list[dict[str, Any]] = []
    for place, row in enumerate(messages):
        message = _message(row, f"messages[{place}]")
        results = row["role"] == "tool" and made and place and messages[place - 1]["role"] == "tool"
        if results:
            made[-1]["content"] += message["content"]  # Strands keeps the results of all calls in one turn
        else:
            made.append(message)
    return cast("Messages", made)


OWN_KEYS = frozenset({"role", "content", "metadata", "tracking_id"})
OPENAI_KEYS = frozenset({"tool_calls", "tool_call_id", "reasoning_content"})
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "user"}


def _message(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    role = row.get("role")
    if role not in ROLES:
        raise ValueError(f"{name} has role {role!r}; use {', '.join(ROLES)}")
    if lost := sorted(key for key in row.keys() - OWN_KEYS - OPENAI_KEYS if row[key] and (role, key) != ("tool", "name")):
        raise ValueError(f"{name} has {lost}, which Strands cannot hold; leave them out")
    content = _content(row.get("content"), name)
    if role == "tool":
        content = [{"toolResult": {"toolUseId": row.get("tool_call_id", ""), "status": "success", "content": content}}]
    if thought := row.get("reasoning_content"):
        content.insert(0, {"reasoningContent": {"reasoningText": {"text": thought}}})
    content += [_tool_use(call, name) for call in row.get("tool_calls") or ()]
    kept = {key: row[key] for key in ("metadata", "tracking_id") if key in row}
    if role in ("system", "developer"):
        kept = {**kept, "metadata": {"custom": {"pinned": True}, **kept.get("metadata", {})}}
    return {"role": ROLES[role], "content": content, **kept}


def _content(content: Any, name: str) -> list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return [] if content is None else [{"text": content}]
    parts = cast("list[dict[str, Any]]", content)
    if strange := sorted({str(part["type"]) for part in parts if part.get("type", "text") != "text"}):
        raise ValueError(f"{name} has content of type {strange}; give text, or content blocks of Strands")
    return [{"text": part["text"]} if "type" in part else part for part in parts]


def _tool_use(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}") if isinstance(function["arguments"], str) else function["arguments"]
    except ValueError as cause:
        raise ValueError(f"{name} calls {function['name']!r} with arguments that are no JSON") from cause
    return {"toolUse": {"toolUseId": call.get("id", ""), "name": function["name"], "input": arguments}}
