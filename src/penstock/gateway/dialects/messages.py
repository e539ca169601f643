"""The Anthropic messages dialect: `/v1/messages`, with `count_tokens` and message threads."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import orjson

from penstock.chat.media import decoded_text
from penstock.chat.parsers.base import Reasoning
from penstock.chat.templates import Tool, flatten
from penstock.errors import RequestError
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import DialectTokenizer, ModelAnswer, UnsentTokens
from penstock.gateway.dialects.fields import (
    HARMLESS,
    SAMPLING_FIELDS,
    ContentPart,
    check_harmless,
    read_sampling,
    refuse_unsupported,
)
from penstock.gateway.reply import CallDelta, Delta, deltas_of
from penstock.gateway.request import ConversationHistory, ModelCall
from penstock.http.asgi import JsonBudget
from penstock.records import Message, Sampling, Step

HONOURED = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "stream", "thread", "thinking", "output_config", "output_format"}
    | {"max_tokens", "stop_sequences", *SAMPLING_FIELDS - {"stop"}}
)
LABELS = frozenset(
    {"metadata", "service_tier", "speed", "inference_geo", "user_profile_id", "workspace_id", "diagnostics", "cache_control"}
    | {"betas", "anthropic_beta", "anthropic_version"}
)
"""Fields that do not affect sampling; ignored without a notice."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "compaction": (),
}
"""Fields that are not supported, with the values that have no effect and are accepted."""
CARRIED = frozenset({"model", "stream", "thread", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields that reach an endpoint in another form; all others are passed on as they are."""
CONVERSATION = frozenset({"messages", "system", "tools", "tool_choice"})
"""Of these, what a thread begins with; its later requests hold the rest only."""
IGNORED_TOOL_OPTIONS = ("input_examples", "allowed_callers")
"""Tool options that are not supported: the tool is offered without them."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The vendor's error types by status. 503 is left out on purpose: clients retry it longer than an `overloaded_error`."""
NUMBER = re.compile(r"\d+")


def sse_event(kind: str, **content: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **content}) + b"\n\n"


class MessagesDialect:
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    ping = sse_event("ping")

    def __init__(self, tokenizer: DialectTokenizer) -> None:
        self._tokenizer = tokenizer

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        if self._tokenizer.is_known:
            refuse_unsupported(body, NEUTRAL)
        held = _held(body, history)
        spoken = split_conversation(body.get("system"), fields.as_list(body.get("messages", [])) or _no_messages(body, held))
        budget, deferred = JsonBudget(fields.MAX_VALUES), _deferred(body.get("tools"))
        named = {tool["function"]["name"]: tool for tool in deferred}
        messages = history.last_request.messages([*held.messages, *spoken.units], lambda _, unit: _read(unit, budget, named))
        prefill = _prefill(messages, body)
        tools = held.tools or history.last_request.tools(body.get("tools"), _tools)
        choice = _choice(body)
        model = body.get("model", "")
        return ModelCall(
            model=model if isinstance(model, str) else "",
            messages=messages[:-1] if prefill else messages,
            prefill=prefill,
            sampling=replace(
                read_sampling(body, defaults, "max_tokens"), stop=fields.strings(body, "stop_sequences") or defaults.stop
            ),
            tools=tools,
            deferred=deferred,
            reads_calls=bool(tools or deferred) and choice.get("type") != "none",
            forced=_forced(choice, (*tools, *deferred), () if self._tokenizer.is_known else _hosted_names(body.get("tools"))),
            one_call=fields.flag(choice, "disable_parallel_tool_use"),
            dialect="messages",
            extra={name: body[name] for name in body.keys() - CARRIED - (CONVERSATION if held.messages else set())},
            strict=_strict(body.get("tools")),
            **_format(body),
            stream=fields.flag(body, "stream"),
            ignored=tuple(sorted({*_ignored(body, choice), *spoken.ignored, *fields.unsupported_names(body, NEUTRAL)})),
        )

    def json_body(self, answer: ModelAnswer) -> bytes:
        step = answer.steps[0]
        said = {"content": content(answer, answer.visible(step.message)), **stop_fields(step, self._tokenizer)}
        return orjson.dumps(message_head(answer) | said | {"usage": usage(answer, [step])})

    def events(self, answer: ModelAnswer) -> "MessagesEvents":
        return MessagesEvents(answer, self._tokenizer)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        text = _too_long(str(error)) if error.code == "context_length_exceeded" else str(error)
        details = {"error_code": error.code, **({"param": error.param} if error.param else {})}
        return {"type": "error", "error": {"type": kind, "message": text, "details": details}}

    def error_event(self, error: RequestError) -> bytes:
        return sse_event("error", error=self.error(error)["error"])


def _too_long(text: str) -> str:
    """Use the vendor's wording: agents match it to decide when to compact their history."""
    match NUMBER.findall(text):
        case [tokens, limit]:
            return f"prompt is too long: {tokens} tokens > {limit} maximum"
        case _:
            return f"prompt is too long: {text}"


# Reading requests


class ThreadHistory(NamedTuple):
    """Messages and tools of the continued thread; the request does not repeat them."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()


def _held(body: dict[str, Any], history: ConversationHistory) -> ThreadHistory:
    """Return the thread that the request continues. Creating a thread does nothing: any answer can be continued."""
    thread = fields.as_object(body.get("thread") or {"type": "create"}) or {}
    if thread.get("type") == "create":
        return ThreadHistory()
    before = thread.get("previous_message_id")
    if thread.get("type") != "continue" or not isinstance(before, str):
        raise fields.invalid("thread", "must be of type create, or of type continue with a previous_message_id")
    for name in ("system", "tools"):
        if body.get(name) is not None:
            raise fields.invalid(name, "is that of the thread; leave it out, or start another thread")
    answer = before.removeprefix("msg_")
    messages, tools = history.messages(answer), history.tools(answer)
    if messages is None or tools is None:
        text = f"no answer here is called {before}; send the whole conversation"
        raise RequestError(text, status=404, code="thread_not_found", param="thread.previous_message_id")
    return ThreadHistory(messages, tools)


def _no_messages(body: dict[str, Any], held: ThreadHistory) -> list[Any]:
    if held.messages and body.get("messages") in (None, []):
        return []
    raise fields.invalid("messages", "must be a list with at least one message")


def _prefill(messages: tuple[Message, ...], body: dict[str, Any]) -> str:
    """Return the beginning of the reply if the last message is one. A request without `max_tokens` only counts tokens."""
    last = messages[-1]
    if last["role"] != "assistant" or body.get("max_tokens") is None:
        return ""
    if last.get("tool_calls") or len(messages) == 1:
        raise fields.invalid("messages", "must not end with an assistant message that has tool calls, or begin with one")
    if (fields.as_object(body.get("output_config")) or {}).get("format") or body.get("output_format"):
        raise fields.invalid("messages", "must not end with an assistant message if the reply's format is given; leave one out")
    return flatten(last["content"])


def _tools(value: Any) -> tuple[Tool, ...]:
    """Return the caller's tools in the OpenAI form, without deferred ones and those that the vendor would run."""
    given = fields.as_list([] if value is None else value)
    if given is None:
        raise fields.invalid("tools", "must be a list of tools")
    fields.check_count(given, "tools", fields.MAX_TOOLS)
    JsonBudget(fields.MAX_VALUES).spend(given, "tools")
    searched = _searches_itself(given)
    offered = [(place, each) for place, each in enumerate(given) if _hosted(each) is None and not (searched and _is_deferred(each))]
    return tuple(tool_of(fields.as_object(each), f"tools[{place}]") for place, each in offered)


def _deferred(value: Any) -> tuple[Tool, ...]:
    """Return the tools that the model is shown only where a `tool_reference` names them."""
    given = fields.as_list(value) or []
    if not _searches_itself(given):
        return ()
    return tuple(tool_of(fields.as_object(each), f"tools[{place}]") for place, each in enumerate(given) if _is_deferred(each))


def _is_deferred(tool: Any) -> bool:
    return _hosted(tool) is None and (fields.as_object(tool) or {}).get("defer_loading") is True


def _searches_itself(tools: Sequence[Any]) -> bool:
    """Return whether the client finds deferred tools itself. The vendor's own search cannot be run: all tools are then offered."""
    return not any(str(_hosted(tool)).startswith("tool_search_tool") for tool in tools)


def _hosted(tool: Any) -> str | None:
    """Return the type of a tool whose schema only the vendor knows, or None for the caller's own tool."""
    given = fields.as_object(tool) or {}
    kind = given.get("type")
    return kind if isinstance(kind, str) and kind != "custom" and "input_schema" not in given else None


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    choice = fields.as_object(body.get("tool_choice") or {"type": "auto"}) or {}
    if choice.get("type") not in ("auto", "any", "tool", "none"):
        text = f"must be an object of type auto, any, tool or none, not {fields.preview(body['tool_choice'])}"
        raise fields.invalid("tool_choice", text)
    return choice


def _hosted_names(tools: Any) -> tuple[str, ...]:
    return tuple(str((fields.as_object(tool) or {}).get("name")) for tool in fields.as_list(tools) or () if _hosted(tool))


def _forced(choice: dict[str, Any], tools: tuple[Tool, ...], hosted: tuple[str, ...]) -> str | None:
    """Return the tool that must be called, empty for any; None for none, and for one of `hosted`, which the endpoint has."""
    if choice["type"] in ("auto", "none") or choice.get("name") in hosted or (hosted and not tools):
        return None
    known = [tool["function"]["name"] for tool in tools]
    wanted = "" if choice["type"] == "any" else choice.get("name")
    if not isinstance(wanted, str) or not known or (wanted and wanted not in known):
        asked = fields.preview(wanted) if wanted else "a call"
        offered = ", ".join(known[:10]) or "none"
        raise fields.invalid("tool_choice", f"asks for {asked}, which no tool here can answer; those that can be called: {offered}")
    return wanted


def _strict(tools: Any) -> frozenset[str]:
    """Return the names of the tools whose calls must follow their schemas."""
    given = [fields.as_object(tool) or {} for tool in fields.as_list(tools) or ()]
    return frozenset(tool["name"] for tool in given if tool.get("strict") is True and isinstance(tool.get("name"), str))


def _format(body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply's format and where it was given: `output_config.format`, or `output_format` of older clients."""
    field = "output_config.format" if body.get("output_format") is None else "output_format"
    value = fields.nested(body, "output_config").get("format") if body.get("output_format") is None else body["output_format"]
    return {"format": fields.reply_format(value, field), "format_field": field}


def _ignored(body: dict[str, Any], choice: dict[str, Any]) -> set[str]:
    """Return the names of requested features that are not supported. Null and empty fields do not count."""
    unknown = body.keys() - HONOURED - LABELS - NEUTRAL.keys() - HARMLESS.keys()
    names = {name for name in unknown if body[name] not in (None, [], {})} | {*check_harmless(body)}
    thinking, output = fields.as_object(body.get("thinking")) or {}, fields.as_object(body.get("output_config")) or {}
    if thinking.get("type", "disabled") != "disabled":
        names.add("thinking")
    names |= {f"output_config.{name}" for name, value in output.items() if name != "format" and value is not None}
    for tool in fields.as_list(body.get("tools")) or ():
        given = fields.as_object(tool) or {}
        names |= (
            {f"tool:{kind}"} if (kind := _hosted(tool)) else {f"tool.{name}" for name in IGNORED_TOOL_OPTIONS if given.get(name)}
        )
    return names


# Messages from content blocks

CLAUDE_CODE_UNPARSED = "__unparsedToolInput"
"""Key under which Claude Code returns arguments that are not JSON: `raw` is their beginning, `len` their length."""
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Start of a `system` block for the vendor, not the model. It is dropped, as it may change from call to call."""


class ContentBlock(NamedTuple):
    """A content block with its turn (None: `system`) and its index there."""

    turn: int | None
    place: int
    value: Any

    @property
    def name(self) -> str:
        """Path in the request, for error messages."""
        return f"system[{self.place}]" if self.turn is None else f"messages[{self.turn}].content[{self.place}]"


class MessageBlocks(NamedTuple):
    role: str
    blocks: tuple[ContentBlock, ...]


class SplitConversation(NamedTuple):
    """A conversation split into messages; their blocks are not parsed yet."""

    units: list[MessageBlocks]
    ignored: frozenset[str]
    """Names of dropped blocks."""


def split_conversation(system: Any, turns: Sequence[Any]) -> SplitConversation:
    """Group content blocks into messages. Consecutive turns of one role are joined, except `system`."""
    ignored: set[str] = set()
    units: list[MessageBlocks] = []
    given = [] if system is None else _placed(system, None, "system")
    kept = tuple(each for each in given if not _is_billing(each.value))
    if len(kept) < len(given):
        ignored.add("system:billing_header")
    if any((fields.as_object(each.value) or {}).get("text") != "" for each in kept):
        units.append(MessageBlocks("system", kept))
    fields.check_count(turns, "messages")
    side, run, blocks_in_all = "", list[ContentBlock](), 0
    for turn, value in enumerate(turns):
        role, blocks = _turn(value, turn)
        blocks_in_all += len(blocks)
        fields.check_count(range(blocks_in_all), "messages")
        if role != side or role == "system":
            units += _units(side, run)
            side, run = role, []
        run += blocks
    units += _units(side, run)
    kinds = {kind for unit in units for block in unit.blocks if isinstance(kind := _kind(block.value), str)}
    return SplitConversation(units, frozenset(ignored | {f"block:{kind}" for kind in kinds & DROPPED_BLOCKS}))


def _read(unit: MessageBlocks | Message, budget: JsonBudget, deferred: Mapping[str, Tool]) -> Message:
    return read_message(unit, budget, deferred) if isinstance(unit, MessageBlocks) else unit


def read_message(unit: MessageBlocks, budget: JsonBudget, deferred: Mapping[str, Tool] | None = None) -> Message:
    """Parse one message. The error for an unsupported block names its position. `deferred` are what references stand for."""
    for block in unit.blocks:
        budget.spend(block.value, block.name)
    if unit.role == "assistant":
        return _assistant(unit.blocks, deferred or {})
    if unit.role == "tool":
        return _result(unit.blocks[0], deferred or {})
    return {"role": unit.role, "content": _joined(unit.blocks, deferred or {})}


def _turn(value: Any, turn: int) -> tuple[str, list[ContentBlock]]:
    given = fields.as_object(value)
    if given is None:
        raise fields.invalid(f"messages[{turn}]", "must be an object")
    role = given.get("role")
    if role not in ("user", "assistant", "system"):
        raise fields.invalid(f"messages[{turn}].role", f"must be user, assistant or system, not {fields.preview(role)}")
    return role, _placed(given.get("content"), turn, f"messages[{turn}].content")


def _placed(content: Any, turn: int | None, name: str) -> list[ContentBlock]:
    """Return the blocks with their positions; a plain string is one text block."""
    if isinstance(content, str):
        return [ContentBlock(turn, 0, {"type": "text", "text": content})]
    blocks = fields.as_list(content)
    if blocks is None:
        raise fields.invalid(name, f"must be a string or a list of content blocks, not {fields.preview(content)}")
    fields.check_count(blocks, name)
    return [ContentBlock(turn, place, block) for place, block in enumerate(blocks)]


def _units(role: str, run: list[ContentBlock]) -> Iterable[MessageBlocks]:
    """Return the messages of joined turns. User turns give one message for each tool result, then one for the rest."""
    if role != "user":
        return [MessageBlocks(role, tuple(run))] if role else []
    results = [block for block in run if _kind(block.value) == "tool_result"]
    texts = tuple(block for block in run if _kind(block.value) != "tool_result")
    own = [MessageBlocks("user", texts)] if texts or not results else []
    return [*(MessageBlocks("tool", (block,)) for block in results), *own]


def _assistant(blocks: Sequence[ContentBlock], deferred: Mapping[str, Tool]) -> Message:
    said: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for placed in blocks:
        kind, block = _kind(placed.value), fields.as_object(placed.value) or {}
        if kind == "thinking":
            thought.append(fields.string(block.get("thinking"), f"{placed.name}.thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, placed.name))
        else:
            said += [flatten([part]) for part in content_parts(block, placed.name, deferred)]
    message: Message = {"role": "assistant", "content": "".join(said)}
    if any(thought):
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], name: str) -> dict[str, Any]:
    function = {"name": fields.string(block.get("name"), f"{name}.name"), "arguments": _arguments(block.get("input", {}))}
    return {"id": fields.string(block.get("id"), f"{name}.id"), "type": "function", "function": function}


def _arguments(given: Any) -> str:
    """Return a call's input as JSON text, or the sampled text if that was not JSON and the client returned all of it."""
    wrapped = fields.as_object(given) or {}
    raw = wrapped.get(INVALID_JSON)
    if len(wrapped) == 1 and (cut := fields.as_object(wrapped.get(CLAUDE_CODE_UNPARSED))) is not None:
        raw = cut.get("raw")  # may be cut; `len` counts UTF-16 units, as JavaScript does
        raw = raw if isinstance(raw, str) and len(raw.encode("utf-16-le")) // 2 == cut.get("len") else None
    return raw if isinstance(raw, str) else orjson.dumps(given).decode()


def _result(placed: ContentBlock, deferred: Mapping[str, Tool]) -> Message:
    """Return a tool's result. An error gets the prefix "Error:", unless its text has "error" near the start."""
    block = fields.as_object(placed.value) or {}
    given: Any = [] if block.get("content") is None else block["content"]
    content = given if isinstance(given, str) else _joined(_placed(given, None, f"{placed.name}.content"), deferred, placed.name)
    if fields.flag(block, "is_error") and "error" not in flatten(content)[:40].lower():
        content = f"Error: {content}" if isinstance(content, str) else [fields.text_part("Error:"), *content]
    tool_call_id = fields.string(block.get("tool_use_id"), f"{placed.name}.tool_use_id")
    return {"role": "tool", "content": content, "tool_call_id": tool_call_id}


def _joined(blocks: Sequence[ContentBlock], deferred: Mapping[str, Tool], within: str = "") -> str | list[fields.ContentPart]:
    """Return the blocks as one text, or as parts if some are not text. `within` is where they are, if not in a message."""
    names = [f"{within}.content[{block.place}]" if within else block.name for block in blocks]
    parts = [content_parts(block.value, name, deferred) for block, name in zip(blocks, names, strict=True)]
    return fields.joined([part for each in parts for part in each])


def _kind(value: Any) -> Any:
    return (fields.as_object(value) or {}).get("type")


def _is_billing(value: Any) -> bool:
    text = (fields.as_object(value) or {}).get("text")
    return isinstance(text, str) and text.startswith(BILLING_PREFIX) and "\n" not in text


# Writing responses

EMPTY_TEXT_BLOCK: dict[str, Any] = {"type": "text", "text": ""}
"""Content of an empty reply: clients read the first block without checking that there is one."""


class MessagesEvents:
    """See `EventWriter`. One block is open at a time; a delta of another block closes it."""

    def __init__(self, answer: ModelAnswer, tokenizer: DialectTokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._index = -1
        self._open = ""
        """Type of the open block; empty if none is open."""
        self._input = ToolInputStream()
        """Arguments of the open call."""
        self._signature = ""
        """Of the open block of thinking, if an endpoint gave one."""

    def start(self) -> bytes:
        return sse_event("message_start", message=message_head(self._answer) | {"usage": usage(self._answer, [])})

    def delta(self, choice: int, deltas: list[Delta], unsent: UnsentTokens) -> bytes:
        return b"".join([self._grow(delta) for delta in deltas])

    def finish_choice(self, choice: int, step: Step, unsent: UnsentTokens) -> bytes:
        begun = self._begin(EMPTY_TEXT_BLOCK) if self._index < 0 else b""
        reason, used = stop_fields(step, self._tokenizer), usage(self._answer, [step])
        return begun + self._close(cut=step.finish == "length") + sse_event("message_delta", delta=reason, usage=used)

    def finish(self, steps: list[Step]) -> bytes:
        return sse_event("message_stop")

    def _grow(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            begun = self._begin(_tool_use_block(delta, {})) if delta.begins else b""
            return begun + self._delta("input_json_delta", "partial_json", self._input.push(delta.arguments))
        if isinstance(delta, Reasoning):
            begun = b"" if self._open == "thinking" else self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._signature = delta.signature
            return begun + self._delta("thinking_delta", "thinking", delta.text) + (self._close() if delta.signature else b"")
        begun = b"" if self._open == "text" else self._begin(EMPTY_TEXT_BLOCK)
        return begun + self._delta("text_delta", "text", delta.text)

    def _begin(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._index += 1
        self._open = block["type"]
        self._input = ToolInputStream()
        return closed + sse_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, key: str, value: str) -> bytes:
        return sse_event("content_block_delta", index=self._index, delta={"type": kind, key: value}) if value else b""

    def _close(self, *, cut: bool = False) -> bytes:
        """Close the open block, if any. `cut`: the reply hit its length limit."""
        if not self._open:
            return b""
        rest = b""
        if self._open == "thinking":
            rest = self._delta("signature_delta", "signature", self._signature or signature(self._answer))
        elif self._open == "tool_use":
            rest = self._delta("input_json_delta", "partial_json", self._input.finish(cut=cut))
        self._open = ""
        return rest + sse_event("content_block_stop", index=self._index)


def message_head(answer: ModelAnswer) -> dict[str, Any]:
    """Return the message without content, which the response and the first event share."""
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def content(answer: ModelAnswer, message: Message) -> list[dict[str, Any]]:
    """Return a reply's blocks: thinking, text, calls."""
    blocks: list[dict[str, Any]] = []
    for delta in deltas_of(message):
        if isinstance(delta, CallDelta):
            blocks.append(_tool_use_block(delta, tool_input(delta.arguments)))
        elif isinstance(delta, Reasoning):
            ours = {"type": "thinking", "thinking": delta.text, "signature": signature(answer)}
            blocks += message.get("thinking_blocks") or [ours]
        else:
            blocks.append({"type": "text", "text": delta.text})
    return blocks or [EMPTY_TEXT_BLOCK]


def stop_fields(step: Step, tokenizer: DialectTokenizer) -> dict[str, str | None]:
    """Return why the reply ended. Calls outrank a stop string: the client must answer them."""
    if step.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if step.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    found = _stop_string(step, tokenizer)
    return {"stop_reason": "end_turn" if found is None else "stop_sequence", "stop_sequence": found}


def usage(answer: ModelAnswer, steps: Sequence[Step]) -> dict[str, int]:
    """Return token counts. What the engine had cached is not reported; those counts are 0."""
    used, cached = answer.usage(steps), {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": used.prompt_tokens, **cached, "output_tokens": used.completion_tokens}


def signature(answer: ModelAnswer) -> str:
    """Return a placeholder: clients drop thinking without a signature."""
    return f"penstock:{answer.id}"


def _tool_use_block(call: CallDelta, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _stop_string(step: Step, tokenizer: DialectTokenizer) -> str | None:
    """Return the stop string that ended the reply (in the sampled ids, not in the text), or None if the model ended it itself."""
    if not step.sampling.stop or (step.completion_ids and step.completion_ids[-1] in step.sampling.stop_ids):
        return None
    sampled = tokenizer.decode(step.completion_ids)
    found = [(place, each) for each in step.sampling.stop if (place := sampled.find(each)) >= 0]
    return min(found)[1] if found else None


# Tool input as JSON

INVALID_JSON = "INVALID_JSON"
"""Key that wraps arguments that are not a JSON object, in responses and in requests."""
SPACE = re.compile(r"[ \t\n\r]+")
INSIDE = re.compile(
    r"(?:[^\"\\\x00-\x1f]+|\\[\"\\/bfnrt]|\\u(?![dD][89a-fA-F])[\da-fA-F]{4}"
    r"|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})*"
)
"""The inside of a string, as far as its characters and escapes are valid and complete."""
CUT = re.compile(r"(?:\\(?:u(?:[\da-fA-F]{0,3}|[dD][89abAB][\da-fA-F]{2}(?:\\(?:u[\da-fA-F]{0,3})?)?))?)?\Z")
"""An incomplete escape at the end of the text, which the next part may complete."""
WORD = re.compile(r"[^\s,:{}\[\]\"]+")
SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
KEYS, VALUES = ("key", "first key"), ("value", "first value")


class ToolInputStream:
    """Streams tool arguments so that the output is always the beginning of a JSON object, and at the end a whole one.

    Text that cannot continue the object is held back; `finish` then adds all arguments under `INVALID_JSON`, next to the members
    already returned. The parser that feeds it only counts brackets: text between them may be anything, but none follows the last.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._rest = ""
        """Text that is not checked yet."""
        self._at = 0
        """End of the checked part of `_rest` during `push`; 0 between calls."""
        self._open: list[str] = []
        """Closing brackets of the open objects and lists, outermost first."""
        self._want = "object"
        """What must come next. "first ..." also allows the closing bracket, "end" also a comma; "nothing": the object is whole."""
        self._string = ""
        """Role of the open string, "key" or "value"; empty if none is open."""
        self._wrong = False

    def push(self, text: str) -> str:
        """Add `text`; return what can be sent now."""
        self._parts.append(text)
        self._rest += "" if self._wrong else text
        while not self._wrong and self._at < len(self._rest) and self._token():
            pass
        given, self._rest, self._at = self._rest[: self._at], self._rest[self._at :], 0
        return given

    def finish(self, *, cut: bool) -> str:
        """Return what makes the output a whole object. Valid JSON of a reply that was `cut` stays open, as clients expect."""
        if self._want == "nothing" or not any(self._parts) or (cut and not self._wrong):
            return ""
        member = f'"{INVALID_JSON}":{orjson.dumps("".join(self._parts)).decode()}}}'
        return "{" + member if self._want == "object" else self._closed() + member

    def _closed(self) -> str:
        """Return the text that ends the open member, with the comma before the next one."""
        text, want = ('"', {"key": "colon", "value": "end"}[self._string]) if self._string else ("", self._want)
        inner = "".join(reversed(self._open[1:]))
        missing = {"colon": ":null", "value": "null", "key": '"":null' if inner else ""}
        return text + missing.get(want, "") + inner + ("" if want in KEYS and not inner else ",")

    def _token(self) -> bool:
        """Check one more token; return False if it is incomplete or invalid."""
        if self._string:
            return self._in_string()
        if space := SPACE.match(self._rest, self._at):
            self._at = space.end()
            return True
        char, want = self._rest[self._at], self._want
        if char == '"' and want in KEYS + VALUES:
            self._string = "key" if want in KEYS else "value"
            return self._take(want)
        if (char == "{" and want in ("object", *VALUES)) or (char == "[" and want in VALUES):
            self._open.append("}" if char == "{" else "]")
            return self._take("first key" if char == "{" else "first value")
        if self._open and char == self._open[-1] and want in ("end", "first key" if char == "}" else "first value"):
            self._open.pop()
            return self._take("end" if self._open else "nothing")
        if char == "," and want == "end":
            return self._take("key" if self._open[-1] == "}" else "value")
        return self._take("value") if char == ":" and want == "colon" else self._scalar()

    def _take(self, want: str) -> bool:
        self._at, self._want = self._at + 1, want
        return True

    def _in_string(self) -> bool:
        run = INSIDE.match(self._rest, self._at)
        assert run is not None, "no character at all is a match too"
        self._at = run.end()
        if self._rest.startswith('"', self._at):
            kind, self._string = self._string, ""
            return self._take("colon" if kind == "key" else "end")
        self._wrong = CUT.match(self._rest, self._at) is None
        return False

    def _scalar(self) -> bool:
        """Check a number or word. It is complete only when another character follows it."""
        word = WORD.match(self._rest, self._at) if self._want in VALUES else None
        if word is not None and word.end() == len(self._rest):
            return False
        if word is None or not _is_scalar(word.group()):
            self._wrong = True
            return False
        self._at, self._want = word.end(), "end"
        return True


def _is_scalar(word: str) -> bool:
    """Return whether `word` is a JSON scalar that keeps its value when parsed; 1e999 becomes infinite."""
    return SCALAR.fullmatch(word) is not None and (word in ("true", "false", "null") or isfinite(float(word)))


def tool_input(arguments: str) -> Any:
    """Return complete arguments for output: verbatim if they are a JSON object, else wrapped under `INVALID_JSON`."""
    try:
        is_object = isinstance(orjson.loads(arguments or "{}"), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments or "{}") if is_object else {INVALID_JSON: arguments}


# Content blocks

DROPPED_BLOCKS = frozenset(
    {"redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"}
    | {"bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "advisor_tool_result", "container_upload"}
    | {"mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "fallback", "browser_state"}
)
"""Blocks of tools that the vendor's servers ran, or that only they can read. The model is not shown them; they are counted."""


def content_parts(value: Any, name: str, tools: Mapping[str, Tool]) -> list[ContentPart]:
    """The parts of a block. `tools` are the definitions that references stand for, by name."""
    block = fields.as_object(value) or {}
    match block.get("type"):
        case "text":
            return [fields.text_part(fields.string(block.get("text"), f"{name}.text"))]
        case "image":
            return [_image(fields.nested(block, "source", f"{name}.source"), f"{name}.source")]
        case "document":
            return _document(block, name, tools)
        case "search_result":
            head = "\n".join(str(block[key]) for key in ("title", "source") if block.get(key))
            return [fields.text_part(head), *_listed(block.get("content"), f"{name}.content", tools)]
        case "compaction":
            return [fields.text_part(block["content"])] if isinstance(block.get("content"), str) else []
        case "tool_reference":
            return [_definition(block.get("tool_name"), tools)]
        case "tool_search_tool_result":
            found = fields.nested(block, "content", f"{name}.content").get("tool_references")
            return [_definition((fields.as_object(each) or {}).get("tool_name"), tools) for each in fields.as_list(found) or ()]
        case "tool_addition" | "tool_removal" as change:
            return [_tool_change(change, fields.nested(block, "tool", f"{name}.tool"), f"{name}.tool", tools)]
        case kind if isinstance(kind, str) and kind in DROPPED_BLOCKS:
            return []
        case kind:
            known = "text, image, document, search_result or tool_reference"
            raise fields.invalid(name, f"must be a block of type {known} here; {fields.preview(kind)} is not supported")


def tool_of(given: dict[str, Any] | None, name: str) -> Tool:
    """A tool of the caller in the OpenAI form."""
    schema = fields.as_object((given or {}).get("input_schema"))
    if given is None or not isinstance(given.get("name"), str) or schema is None:
        raise fields.invalid(name, "must be a tool with a name and an input_schema")
    about = given.get("description")
    described = {"description": about} if isinstance(about, str) else {}
    return {"type": "function", "function": {"name": given["name"], **described, "parameters": schema}}


def _listed(value: Any, name: str, tools: Mapping[str, Tool]) -> list[ContentPart]:
    if isinstance(value, str):
        return [fields.text_part(value)]
    blocks = fields.as_list([] if value is None else value)
    if blocks is None:
        raise fields.invalid(name, f"must be a string or a list of content blocks, not {fields.preview(value)}")
    return [part for place, block in enumerate(blocks) for part in content_parts(block, f"{name}[{place}]", tools)]


def _image(source: dict[str, Any], name: str) -> ContentPart:
    match source.get("type"):
        case "base64":
            data, media_type = fields.string(source.get("data"), f"{name}.data"), source.get("media_type")
            return fields.image_part(f"data:{media_type};base64,{data}", name)
        case "url":
            return fields.image_part(source.get("url"), f"{name}.url")
        case "file":
            return fields.image_part(f"file:{source.get('file_id')}", name)
        case kind:
            raise fields.invalid(name, f"must be of type base64, url or file, not {fields.preview(kind)}")


def _document(block: dict[str, Any], name: str, tools: Mapping[str, Tool]) -> list[ContentPart]:
    source, title = fields.nested(block, "source", f"{name}.source"), block.get("title")
    head = [fields.text_part(block[key]) for key in ("title", "context") if isinstance(block.get(key), str) and block[key]]
    named = {"filename": title} if isinstance(title, str) and title else {}
    match source.get("type"):
        case "text":
            return [*head, fields.text_part(fields.string(source.get("data"), f"{name}.source.data"))]
        case "content":
            return [*head, *_listed(source.get("content"), f"{name}.source.content", tools)]
        case "base64":
            media_type, data = str(source.get("media_type")), fields.string(source.get("data"), f"{name}.source.data")
            if (text := decoded_text(media_type, data)) is not None:
                return [*head, fields.text_part(text)]
            return [{"type": "file", "file": {"file_data": f"data:{media_type};base64,{data}", **named}}]
        case "url" | "file":
            return [{"type": "file", "file": {"file_id": source.get("url") or source.get("file_id"), **named}}]
        case kind:
            raise fields.invalid(
                f"{name}.source", f"must be of type text, content, base64, url or file, not {fields.preview(kind)}"
            )


def _definition(tool_name: Any, tools: Mapping[str, Tool]) -> ContentPart:
    """A reference to a tool as its definition, in the form in which templates show the tools at the prompt's head."""
    tool = tools.get(tool_name) if isinstance(tool_name, str) else None
    shown = orjson.dumps(tool).decode() if tool else f"{tool_name} is not among the tools"
    return fields.text_part(f"<tools>\n{shown}\n</tools>")


def _tool_change(change: str, tool: dict[str, Any], name: str, tools: Mapping[str, Tool]) -> ContentPart:
    tool_name = tool.get("tool_name") or tool.get("name")
    if change == "tool_removal":
        return fields.text_part(f"The tool {tool_name} is no longer available.")
    definition = fields.as_object(tool.get("definition"))
    if definition is None:
        return _definition(tool_name, tools)
    inline = tool_of(definition, f"{name}.definition")
    return _definition(inline["function"]["name"], {inline["function"]["name"]: inline})
