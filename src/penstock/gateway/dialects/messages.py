"""The Anthropic Messages dialect: `/v1/messages` and its `count_tokens`, message threads included."""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from penstock.chat.templates import Tool
from penstock.errors import RequestError
from penstock.gateway.calls import Call, Past
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import Answer, Spelling
from penstock.gateway.dialects.messages_blocks import Unit, read, split
from penstock.gateway.dialects.messages_events import MessagesEvents, content, event, head, stop, usage
from penstock.gateway.dialects.sampling import SAMPLING, refuse, sampling, unsupported
from penstock.records import Message, Sampling

HONOURED = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "stream", "thread", "thinking", "output_config"}
    | {"max_tokens", "stop_sequences", *SAMPLING - {"stop"}}
)
LABELS = frozenset(
    {"metadata", "service_tier", "speed", "inference_geo", "user_profile_id", "workspace_id", "diagnostics", "cache_control"}
    | {"betas", "anthropic_beta", "anthropic_version"}
)
"""Fields that say who asks, how to serve it, or for which version of the format; sampling does not depend on them."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "output_format": (),
    "compaction": (),
}
"""Fields that would change the answer in a way that is not offered, with the values that change nothing."""

LESS_THAN_ASKED = ("strict", "defer_loading", "input_examples", "allowed_callers")
"""What a tool may ask for besides being offered; it is offered without."""

KINDS = {
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
"""The vendor's names of errors. 503 has none: clients retry it longer than what they know as an overloaded vendor."""

NUMBER = re.compile(r"\d+")


class MessagesDialect:
    """See `Dialect`."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    ping = event("ping")

    def __init__(self, tokenizer: Spelling) -> None:
        self._tokenizer = tokenizer

    def parse(self, body: dict[str, Any], defaults: Sampling, past: Past) -> Call:
        """See `Dialect.parse`."""
        refuse(body, NEUTRAL)
        held = _held(body, past)
        spoken = split(body.get("system"), fields.entries(body.get("messages", [])) or _no_messages(body, held))
        messages = past.talk.messages([*held.messages, *spoken.units], _read)
        _refuse_prefill(messages, body)
        tools = held.tools or past.talk.tools(body.get("tools"), _tools)
        choice = _choice(body)
        model = body.get("model", "")
        return Call(
            model=model if isinstance(model, str) else "",
            messages=messages,
            sampling=replace(sampling(body, defaults, "max_tokens"), stop=fields.strings(body, "stop_sequences") or defaults.stop),
            tools=tools,
            reads_calls=bool(tools) and choice.get("type") != "none",
            forced=_forced(choice, tools),
            stream=fields.flag(body, "stream"),
            ignored=tuple(sorted({*_ignored(body, choice), *spoken.ignored})),
        )

    def whole(self, answer: Answer) -> bytes:
        """See `Dialect.whole`."""
        step = answer.steps[0]
        said = {"content": content(answer, step.message), **stop(step, self._tokenizer)}
        return orjson.dumps(head(answer) | said | {"usage": usage(answer, [step])})

    def events(self, answer: Answer) -> MessagesEvents:
        """See `Dialect.events`."""
        return MessagesEvents(answer, self._tokenizer)

    def count(self, tokens: int) -> dict[str, Any]:
        """See `Dialect.count`."""
        return {"input_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        """See `Dialect.error`."""
        kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        text = _too_long(str(error)) if error.code == "context_length_exceeded" else str(error)
        details = {"error_code": error.code, **({"param": error.param} if error.param else {})}
        return {"type": "error", "error": {"type": kind, "message": text, "details": details}}

    def broken(self, error: RequestError) -> bytes:
        """See `Dialect.broken`."""
        return event("error", error=self.error(error)["error"])


class Held(NamedTuple):
    """What the server holds of a message thread, so that the request need not say it again."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()


def _held(body: dict[str, Any], past: Past) -> Held:
    """Every answer can be gone on from, so a thread needs no creating; only its messages and tools are looked up."""
    thread = fields.entry(body.get("thread") or {"type": "create"}) or {}
    if thread.get("type") == "create":
        return Held()
    before = thread.get("previous_message_id")
    if thread.get("type") != "continue" or not isinstance(before, str):
        raise fields.wrong("thread", "must be of type create, or of type continue with a previous_message_id")
    for name in ("system", "tools"):
        if body.get(name) is not None:
            raise fields.wrong(name, "is that of the thread; leave it out, or start another thread")
    answer = before.removeprefix("msg_")
    messages, tools = past.messages(answer), past.tools(answer)
    if messages is None or tools is None:
        text = f"no answer here is called {before}; send the whole conversation"
        raise RequestError(text, status=404, code="thread_not_found", param="thread.previous_message_id")
    return Held(messages, tools)


def _no_messages(body: dict[str, Any], held: Held) -> list[Any]:
    if held.messages and body.get("messages") in (None, []):
        return []
    raise fields.wrong("messages", "must be a list with at least one message")


def _read(place: int, unit: Unit | Message) -> Message:
    return read(unit) if isinstance(unit, Unit) else unit


def _refuse_prefill(messages: tuple[Message, ...], body: dict[str, Any]) -> None:
    """A request without `max_tokens` only counts, and may end anywhere."""
    if messages[-1]["role"] == "assistant" and body.get("max_tokens") is not None:
        text = "messages must not end with an assistant message: a reply that the caller has begun cannot be gone on with"
        raise RequestError(text, code="unsupported_parameter", param="messages")


def _tools(value: Any) -> tuple[Tool, ...]:
    """The caller's own tools in the OpenAI form; those that the vendor would run are left out."""
    given = fields.entries([] if value is None else value)
    if given is None:
        raise fields.wrong("tools", "must be a list of tools")
    fields.check_depth(given, "tools")
    return tuple(_tool(fields.entry(each), f"tools[{place}]") for place, each in enumerate(given) if _hosted(each) is None)


def _tool(given: dict[str, Any] | None, name: str) -> Tool:
    schema = fields.entry((given or {}).get("input_schema"))
    if given is None or not isinstance(given.get("name"), str) or schema is None:
        raise fields.wrong(name, "must be a tool with a name and an input_schema")
    about = given.get("description")
    described = {"description": about} if isinstance(about, str) else {}
    return {"type": "function", "function": {"name": given["name"], **described, "parameters": schema}}


def _hosted(tool: Any) -> str | None:
    """The type of a tool whose schema only the vendor knows; None for the caller's own."""
    given = fields.entry(tool) or {}
    kind = given.get("type")
    return kind if isinstance(kind, str) and kind != "custom" and "input_schema" not in given else None


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    choice = fields.entry(body.get("tool_choice") or {"type": "auto"}) or {}
    if choice.get("type") not in ("auto", "any", "tool", "none"):
        text = f"must be an object of type auto, any, tool or none, not {fields.shown(body['tool_choice'])}"
        raise fields.wrong("tool_choice", text)
    return choice


def _forced(choice: dict[str, Any], tools: tuple[Tool, ...]) -> str | None:
    """See `Call.forced`."""
    if choice["type"] in ("auto", "none"):
        return None
    known = [tool["function"]["name"] for tool in tools]
    wanted = "" if choice["type"] == "any" else choice.get("name")
    if not isinstance(wanted, str) or not known or (wanted and wanted not in known):
        asked = fields.shown(wanted) if wanted else "a call"
        offered = ", ".join(known[:10]) or "none"
        raise fields.wrong("tool_choice", f"asks for {asked}, which no tool here can answer; those that can be called: {offered}")
    return wanted


def _ignored(body: dict[str, Any], choice: dict[str, Any]) -> set[str]:
    """What was asked for and is not done. A field that is null or empty asks for nothing."""
    names = {name for name in body.keys() - HONOURED - LABELS - NEUTRAL.keys() if body[name] not in (None, [], {})}
    thinking, output = fields.entry(body.get("thinking")) or {}, fields.entry(body.get("output_config")) or {}
    if output.get("format") is not None:
        raise unsupported("output_config.format", output["format"])
    if thinking.get("type", "disabled") != "disabled":
        names.add("thinking")
    names |= {f"output_config.{name}" for name, value in output.items() if value is not None}
    if fields.flag(choice, "disable_parallel_tool_use"):
        names.add("tool_choice.disable_parallel_tool_use")
    for tool in fields.entries(body.get("tools")) or ():
        given = fields.entry(tool) or {}
        names |= {f"tool:{kind}"} if (kind := _hosted(tool)) else {f"tool.{name}" for name in LESS_THAN_ASKED if given.get(name)}
    return names


def _too_long(text: str) -> str:
    """As agents of this dialect know that they must compact their history: by these words, and by the numbers after them."""
    match NUMBER.findall(text):
        case [tokens, limit]:
            return f"prompt is too long: {tokens} tokens > {limit} maximum"
        case _:
            return f"prompt is too long: {text}"
