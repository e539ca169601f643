"""The OpenAI Responses dialect: `/v1/responses`, with `previous_response_id`, item references, namespaces and freeform tools."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import orjson

from penstock.chat.parsers.base import Reasoning
from penstock.chat.templates import Tool, flatten
from penstock.errors import RequestError
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import DialectTokenizer, ModelAnswer, UnsentTokens
from penstock.gateway.dialects.chat import error_body, logprobs, step_logprobs
from penstock.gateway.dialects.fields import (
    HARMLESS,
    SAMPLING_FIELDS,
    FreeformReader,
    check_harmless,
    freeform_arguments,
    freeform_function,
    freeform_text,
    read_sampling,
    refuse_unsupported,
)
from penstock.gateway.reply import CallDelta, Delta
from penstock.gateway.request import ConversationHistory, ModelCall
from penstock.http.asgi import JsonBudget
from penstock.records import Finish, Message, Sampling, Step

HONOURED = SAMPLING_FIELDS | frozenset(
    {"model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "stream", "max_output_tokens"}
    | {"top_logprobs"}
    | {"include", "parallel_tool_calls", "reasoning", "text", "truncation"}
)
"""The fields in the last line are supported in part; `_unmet` reports the rest."""
LABELS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "client_metadata", "stream_options", "max_tool_calls"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)
"""Fields that do not affect sampling; ignored without a notice."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "n": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
"""Fields that are not supported, with the values that have no effect and are accepted."""
SHARED_WITH_CHAT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"parallel_tool_calls", "top_logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"}
)
"""Fields that Chat endpoints know under the same name."""
ECHOED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""Request fields that the response object repeats, with the value shown if the request omits them."""
LOGPROBS = "message.output_text.logprobs"


MAX_INCLUDED = 100
"""Names in `include`."""


class ResponsesDialect:
    path = "/v1/responses"
    count_path = "/v1/responses/input_tokens"
    ping = b": still sampling\n\n"

    def __init__(self, tokenizer: DialectTokenizer) -> None:
        self._tokenizer = tokenizer

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        if self._tokenizer.is_known:
            refuse_unsupported(body, NEUTRAL)
        tools, likely = history.last_request.tools(body.get("tools"), offered_tools), fields.top_logprobs(body)
        model = body.get("model", "")
        return ModelCall(
            model=model if isinstance(model, str) else "",
            messages=read_messages(body, history),
            sampling=read_sampling(body, defaults, "max_output_tokens", top_logprobs=likely),
            tools=tools,
            reads_calls=bool(tools) and body.get("tool_choice") != "none",
            forced=_forced(body.get("tool_choice"), tools),
            one_call=body.get("parallel_tool_calls") is not None and not fields.flag(body, "parallel_tool_calls"),
            extra=_extra(body),
            allowed=fields.allowed_tools(body.get("tool_choice"), tools),
            strict=_strict(body.get("tools")),
            format=fields.reply_format(fields.nested(body, "text").get("format"), "text.format"),
            format_field="text.format",
            stream=fields.flag(body, "stream"),
            logprobs=LOGPROBS in _included(body) or likely > 0,
            echo=tuple((name, body[name] if body.get(name) is not None else other) for name, other in ECHOED.items()),
            ignored=tuple(
                sorted(
                    {*_unmet(body), *fields.unmet_tool_choice(body.get("tool_choice"), tools)}
                    | {*fields.unsupported_names(body, NEUTRAL)}
                )
            ),
        )

    def json_body(self, answer: ModelAnswer) -> bytes:
        (step,) = answer.steps
        known = client_tool_names(dict(answer.call.echo).get("tools"))
        items = output_items(answer, step, known, self._tokenizer)
        return orjson.dumps(final_response(answer, step, items, self._tokenizer))

    def events(self, answer: ModelAnswer) -> "ResponseEvents":
        return ResponseEvents(answer, self._tokenizer)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: RequestError) -> bytes:
        """See `Dialect.error_event`. It holds the error twice: in the documented fields, and under `error`, where SDKs read it."""
        detail = error_body(error)["error"]
        body = {
            "type": "error",
            "code": detail["code"],
            "message": detail["message"],
            "param": detail["param"],
            "sequence_number": 0,
        }
        return b"event: error\ndata: " + orjson.dumps(body | {"error": detail}) + b"\n\n"


def _included(body: dict[str, Any]) -> list[str]:
    named = fields.as_list([] if body.get("include") is None else body["include"])
    fields.check_count(named or (), "include", MAX_INCLUDED)
    if named is None or not all(isinstance(each, str) for each in named):
        raise fields.invalid("include", "must be a list of names")
    return named


def _forced(choice: Any, tools: tuple[Tool, ...]) -> str | None:
    """Return the flat name of the tool that must be called, as `fields.forced_tool` does."""
    named = fields.as_object(choice) or {}
    if isinstance(named.get("namespace"), str) and isinstance(named.get("name"), str):
        choice = {"name": flat_name(named["name"], named["namespace"])}
    return fields.forced_tool(choice, tools)


def _extra(body: dict[str, Any]) -> dict[str, Any]:
    """Return what a Chat endpoint takes under another name, and the fields that no rule knows."""
    known = HONOURED | LABELS | NEUTRAL.keys() | HARMLESS.keys()
    extra = {name: value for name, value in body.items() if name not in known or name in SHARED_WITH_CHAT}
    reasoning, text = fields.nested(body, "reasoning"), fields.nested(body, "text")
    if reasoning.get("effort") is not None:
        extra["reasoning_effort"] = reasoning["effort"]
    if text.get("verbosity") is not None:
        extra["verbosity"] = text["verbosity"]
    return extra


def _unmet(body: dict[str, Any]) -> Iterator[str]:
    """Yield the names of requested features that are not supported."""
    given = {name for name, value in body.items() if value is not None}
    yield from given - HONOURED - LABELS - NEUTRAL.keys() - HARMLESS.keys()
    yield from check_harmless(body)
    yield from ignored_tool_options(body.get("tools"))
    yield from (f"include:{name}" for name in _included(body) if name != LOGPROBS)
    yield from (f"reasoning.{name}" for name, value in fields.nested(body, "reasoning").items() if value is not None)
    yield from (f"text.{name}" for name, value in fields.nested(body, "text").items() if name != "format" and value is not None)
    if body.get("truncation") not in (None, "disabled"):
        yield "truncation"
    yield from {f"item:{kind}" for item in fields.as_list(body.get("input")) or () if (kind := _dropped(item))}


# Tools: the model sees functions only; the client sees its own names and types


class ClientToolName(NamedTuple):
    """The client's name for a tool that the model knows by one flat name."""

    name: str
    namespace: str | None
    is_custom: bool


class _ToolEntry(NamedTuple):
    tool: dict[str, Any]
    namespace: str | None
    where: str
    """Path in the request, for error messages."""


def offered_tools(value: Any, name: str = "tools") -> tuple[Tool, ...]:
    """Return the tools for the model, all as functions with flat names. Tools that a vendor's servers run are left out."""
    JsonBudget(fields.MAX_VALUES).spend(value, name)
    known: dict[str, ClientToolName] = {}
    tools: list[Tool] = []
    for given in _given(value, name):
        if given.tool["type"] not in ("function", "custom"):
            continue
        flat, address = _address(given)
        if known.setdefault(flat, address) != address:
            raise fields.invalid(given.where, f"is offered to the model as {flat!r}, as is another tool; rename one of them")
        tools.append(_as_function(given, flat))
    return tuple(tools)


def ignored_tool_options(value: Any) -> Iterator[str]:
    """Yield the names of what is not supported: tools that a vendor's servers run, and grammars of freeform tools."""
    for tool, *_ in _given(value, "tools"):
        kind = tool["type"]
        if kind not in ("function", "custom"):
            yield f"tool:{kind}"
        elif (fields.as_object(tool.get("format")) or {}).get("type") == "grammar":
            yield "tools.format"


def _strict(value: Any) -> frozenset[str]:
    """Return the flat names of the tools whose calls must follow their schemas."""
    functions = [given for given in _given(value, "tools") if given.tool["type"] == "function"]
    return frozenset(_address(given)[0] for given in functions if given.tool.get("strict") is True)


def client_tool_names(value: Any) -> dict[str, ClientToolName]:
    """Map the flat name of each tool in `offered_tools` to the client's name."""
    return dict(_address(given) for given in _given(value, "tools") if given.tool["type"] in ("function", "custom"))


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name that the model knows the tool by.

    >>> flat_name("close", "agents")
    'agents__close'
    """
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def _given(value: Any, name: str) -> Iterator[_ToolEntry]:
    """Yield every tool, including those inside namespaces."""
    for place, tool in enumerate(_listed([] if value is None else value, name)):
        where = f"{name}[{place}]"
        if tool["type"] != "namespace":
            yield _ToolEntry(tool, None, where)
            continue
        namespace = fields.string(tool.get("name"), f"{where}.name")
        for inner, each in enumerate(_listed(tool.get("tools"), f"{where}.tools")):
            yield _ToolEntry(each, namespace, f"{where}.tools[{inner}]")


def _listed(value: Any, name: str) -> list[dict[str, Any]]:
    listed = fields.as_list(value)
    if listed is None:
        raise fields.invalid(name, "must be a list of tools")
    fields.check_count(listed, name, fields.MAX_TOOLS)
    tools = [fields.as_object(each) or {} for each in listed]
    for place, tool in enumerate(tools):
        fields.string(tool.get("type"), f"{name}[{place}].type")
    return tools


def _address(given: _ToolEntry) -> tuple[str, ClientToolName]:
    if fields.as_object(given.tool.get("function")):
        raise fields.invalid(given.where, "has its name inside `function`, as chat tools do; here `name` stands next to `type`")
    name = fields.string(given.tool.get("name"), f"{given.where}.name")
    return flat_name(name, given.namespace), ClientToolName(name, given.namespace, given.tool["type"] == "custom")


def _as_function(given: _ToolEntry, flat: str) -> Tool:
    tool, function = given.tool, dict[str, Any](name=flat)
    description = fields.string(tool.get("description") or "", f"{given.where}.description")
    if tool["type"] == "custom":
        shape = fields.as_object(tool.get("format")) or {}
        grammar = shape if shape.get("type") == "grammar" else {}
        return {"type": "function", "function": freeform_function({**tool, "name": flat}, grammar)}
    parameters = tool.get("parameters")
    if description:
        function["description"] = description
    if parameters is not None and fields.as_object(parameters) is None:
        raise fields.invalid(f"{given.where}.parameters", f"must be a JSON schema, not {fields.preview(parameters)}")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


# Messages from input items

RESPONSE_ID = "resp_"
MAX_REFERENCES = 256
"""Item references in one request; each is looked up in the whole conversation."""
ITEM_ID = re.compile(r"(msg|rs|fc|ctc)_(.+)_([0-9]{1,9})")
"""Ids of our own items: kind, answer id, and index among the answer's items of that kind."""
CALLS = ("function_call", "custom_tool_call")
DROPPED_ITEMS = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"}
    | {"computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"}
    | {"apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"}
    | {"tool_search_call", "tool_search_output", "additional_tools", "configuration_update", "compaction_trigger"}
    | {"program", "program_output", "compaction", "compaction_summary"}
)
"""Items of tools that the vendor's servers run, or that only they can read. The model is not shown them; they are counted."""
RESULTS = ("function_call_output", "custom_tool_call_output")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content parts that hold text, with the key of the text."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ItemGroup(NamedTuple):
    """Items that make one message."""

    start: int
    """Index of the first item in the input."""
    items: list[dict[str, Any]]


def read_messages(body: dict[str, Any], history: ConversationHistory) -> tuple[Message, ...]:
    """Return all messages of a call: its instructions, the conversation of `previous_response_id`, its input."""
    raw: list[Any] = []
    if body.get("instructions") is not None:
        raw.append(fields.string(body["instructions"], "instructions"))
    raw += _carried(body.get("previous_response_id"), history)
    groups, before = _grouped(_items(body.get("input"), history)), len(raw)
    raw += [group.items for group in groups]
    if not raw:
        raise fields.invalid("input", "must be text or a list with at least one item")
    budget = JsonBudget(fields.MAX_VALUES)

    def read(place: int, each: Any) -> Message:
        if isinstance(each, str):
            return {"role": "system", "content": each, "instructions": True}
        return fields.as_object(each) or _message(groups[place - before], budget)

    return history.last_request.messages(raw, read)


def _carried(response_id: Any, history: ConversationHistory) -> list[Message]:
    """Return the conversation up to an earlier answer, without the instructions of that call, which do not carry over."""
    if response_id is None:
        return []
    given = fields.string(response_id, "previous_response_id")
    known = history.messages(given.removeprefix(RESPONSE_ID)) if given.startswith(RESPONSE_ID) else None
    if known is None:
        raise RequestError(
            f"previous_response_id {given!r} is not a response of this rollout; send the whole conversation as input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return [message for message in known if not message.get("instructions")]


def _items(value: Any, history: ConversationHistory) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    listed = fields.as_list([] if value is None else value)
    if listed is None:
        raise fields.invalid("input", f"must be text or a list of items, not {fields.preview(value)}")
    fields.check_count(listed, "input")
    items: list[dict[str, Any]] = []
    references = 0
    for place, each in enumerate(listed):
        item = fields.as_object(each)
        if item is None:
            raise fields.invalid(f"input[{place}]", f"must be an item, not {fields.preview(each)}")
        references += _kind(item) == "item_reference"
        if references > MAX_REFERENCES:
            raise fields.invalid(f"input[{place}]", f"is item reference {references}; send at most {MAX_REFERENCES}")
        if _dropped(item):
            continue
        items.append(_resolved(item, f"input[{place}]", history) if _kind(item) == "item_reference" else item)
    return items


def _resolved(item: dict[str, Any], name: str, history: ConversationHistory) -> dict[str, Any]:
    """Return the item of an earlier answer that a reference names."""
    item_id = fields.string(item.get("id"), f"{name}.id")
    ours = ITEM_ID.fullmatch(item_id)
    known = history.messages(ours[2]) if ours else None
    if ours is None or not known:
        message = f"{name} refers to item {item_id!r}, which is none of this rollout; send the item itself"
        raise RequestError(message, code="item_not_found", param=name)
    reply, which = known[-1], int(ours[3])
    calls = reply.get("tool_calls") or ()
    if ours[1] == "msg":
        return {"type": "message", "role": "assistant", "content": "" if which else flatten(reply.get("content"))}
    if ours[1] == "rs":
        text = "" if which else reply.get("reasoning_content") or ""
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
    if which >= len(calls):
        raise fields.invalid(name, f"refers to call {which} of an answer that made {len(calls)}")
    return {"type": "function_call", "call_id": calls[which]["id"], **calls[which]["function"]}


def _dropped(item: Any) -> str:
    """Return the type of an item that the model is not shown, else an empty string."""
    kind = (fields.as_object(item) or {}).get("type")
    return kind if isinstance(kind, str) and kind in DROPPED_ITEMS else ""


def _kind(item: dict[str, Any]) -> Any:
    kind = item.get("type")
    return kind if kind is not None else "message" if "role" in item else "item_reference"


def _grouped(items: Sequence[dict[str, Any]]) -> list[ItemGroup]:
    """Group the items of each reply. Two assistant messages in a row are two replies. Lone reasoning without text is dropped."""
    groups: list[ItemGroup] = []
    before = ""
    for place, item in enumerate(items):
        kind = _kind(item)
        part = "said" if kind == "message" and item.get("role") == "assistant" else kind
        is_reply = part in ("said", "reasoning", *CALLS)
        if is_reply and before and not before == part == "said":
            groups[-1].items.append(item)
        else:
            groups.append(ItemGroup(place, [item]))
        before = part if is_reply else ""
    return [group for group in groups if not _is_silent(group)]


def _is_silent(group: ItemGroup) -> bool:
    """Return whether the group holds only reasoning without readable text, such as encrypted reasoning of a vendor."""
    return all(_kind(item) == "reasoning" and not _thought(item, "input") for item in group.items)


def _message(group: ItemGroup, budget: JsonBudget) -> Message:
    first, name = group.items[0], f"input[{group.start}]"
    budget.spend(group.items, name)
    kind = _kind(first)
    if kind in RESULTS:
        content = _content(first.get("output"), f"{name}.output")
        return {"role": "tool", "content": content, "tool_call_id": fields.string(first.get("call_id") or "", f"{name}.call_id")}
    if kind == "message" and first.get("role") != "assistant":
        role = first.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise fields.invalid(f"{name}.role", f"must be one of {', '.join(ROLES)}, not {fields.preview(role)}")
        return {"role": ROLES[role], "content": _content(first.get("content"), f"{name}.content")}
    if kind not in ("message", "reasoning", *CALLS):
        raise RequestError(f"{name} is of type {fields.preview(kind)}, which is not supported", code="unsupported_item", param=name)
    return _reply(group)


def _reply(group: ItemGroup) -> Message:
    said, thought, calls = "", "", list[dict[str, Any]]()
    for place, item in enumerate(group.items, group.start):
        name, kind = f"input[{place}]", _kind(item)
        if kind == "reasoning":
            thought += _thought(item, name)
        elif kind == "message":
            said += flatten(_content(item.get("content"), f"{name}.content"))
        else:
            calls.append(_call(item, name))
    message: Message = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message |= {"content": said or None, "tool_calls": calls}
    return message


def _call(item: dict[str, Any], name: str) -> dict[str, Any]:
    flat = flat_name(
        fields.string(item.get("name"), f"{name}.name"), fields.string(item.get("namespace") or "", f"{name}.namespace")
    )
    if item["type"] == "custom_tool_call":
        arguments = freeform_arguments(fields.string(item.get("input"), f"{name}.input"))
    else:
        arguments = fields.string(item.get("arguments"), f"{name}.arguments")
    call_id = fields.string(item.get("call_id") or "", f"{name}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": flat, "arguments": arguments}}


def _thought(item: dict[str, Any], name: str) -> str:
    """Return the reasoning text. Encrypted reasoning and summaries are skipped: the model did not write them."""
    texts: list[str] = []
    for place, each in enumerate(fields.as_list(item.get("content")) or ()):
        part = fields.as_object(each) or {}
        if part.get("type") == "reasoning_text":
            texts.append(fields.string(part.get("text"), f"{name}.content[{place}].text"))
    return "".join(texts)


def _content(value: Any, name: str) -> str | list[fields.ContentPart]:
    if isinstance(value, str):
        return value
    parts = fields.as_list(value)
    if parts is None:
        raise fields.invalid(name, f"must be text or a list of content parts, not {fields.preview(value)}")
    return fields.joined([_part(fields.as_object(part) or {}, f"{name}[{place}]") for place, part in enumerate(parts)])


def _part(part: dict[str, Any], name: str) -> fields.ContentPart:
    kind = part.get("type")
    if kind == "input_image":
        url = f"file:{part.get('file_id')}" if part.get("image_url") is None else part["image_url"]
        return fields.image_part(url, f"{name}.image_url")
    if kind == "input_file":
        given = {key: part[key] for key in ("file_data", "file_id", "filename") if part.get(key) is not None}
        return fields.file_part(given | ({"file_id": part["file_url"]} if part.get("file_url") else {}))
    if kind == "input_audio":
        return {"type": kind, kind: fields.nested(part, kind, f"{name}.{kind}")}
    if not isinstance(kind, str) or kind not in TEXTS:
        known = ", ".join([*TEXTS, "input_image", "input_file", "input_audio"])
        raise fields.invalid(name, f"must be of type {known}, not {fields.preview(kind)}")
    return fields.text_part(fields.string(part.get(TEXTS[kind]), f"{name}.{TEXTS[kind]}"))


# Output items

Status = Literal["in_progress", "completed", "incomplete", "failed"]
STATUS: dict[Finish, Status] = {"stop": "completed", "length": "incomplete", "cancelled": "failed", "error": "failed"}


def response_object(answer: ModelAnswer, status: Status, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The response object, without usage."""
    sampling = answer.call.sampling
    return {
        "id": RESPONSE_ID + answer.id,
        "object": "response",
        "created_at": int(answer.created),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer.model,
        "output": list(output),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "service_tier": "default",
        "usage": None,
        **dict(answer.call.echo),
    }


def final_response(
    answer: ModelAnswer, step: Step, output: Sequence[dict[str, Any]], tokenizer: DialectTokenizer
) -> dict[str, Any]:
    """Return the response object of a finished answer."""
    status = STATUS[step.finish]
    whole = response_object(answer, status, output) | {"usage": usage(answer, step, tokenizer)}
    if status == "completed":
        whole["completed_at"] = int(answer.created + step.seconds)
    return whole


def usage(answer: ModelAnswer, step: Step, tokenizer: DialectTokenizer) -> dict[str, Any]:
    """Return token counts. Reasoning tokens are counted by tokenizing the text again; cached tokens are not reported (0)."""
    used = answer.usage([step])
    prompt, sampled = used.prompt_tokens, used.completion_tokens
    thought = min(len(tokenizer.encode(tokenizer.shield(step.message.get("reasoning_content") or ""))), sampled)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + sampled,
    }


def output_items(
    answer: ModelAnswer, step: Step, tools: Mapping[str, ClientToolName], tokenizer: DialectTokenizer
) -> list[dict[str, Any]]:
    """Return a reply's items: reasoning, message, calls. Without calls there is always a message, for clients to send back."""
    reply, items = step.message, list[dict[str, Any]]()
    calls = reply.get("tool_calls") or ()
    if reply.get("reasoning_content"):
        items.append(reasoning_item(answer, 0, reply["reasoning_content"]))
    if reply.get("content") or not calls:
        spelt = reply_logprobs(step, tokenizer) if answer.call.logprobs else ()
        items.append(message_item(answer, 0, reply.get("content") or "", spelt))
    for place, call in enumerate(calls):
        named = call["function"]
        items.append(call_item(answer, place, call["id"], tools.get(named["name"]), named["name"], named["arguments"]))
    items[-1] |= ending_status(step)
    return items


def reply_logprobs(step: Step, tokenizer: DialectTokenizer) -> list[dict[str, Any]]:
    return step_logprobs(tokenizer, step)["content"]


def ending_status(step: Step) -> dict[str, Any]:
    """Return the status of a reply's last item."""
    return {"status": "completed" if step.finish == "stop" else "incomplete"}


def reasoning_item(answer: ModelAnswer, place: int, text: str | None) -> dict[str, Any]:
    """`text` is None for an item that has not begun."""
    content = [] if text is None else [reasoning_part(text)]
    head = {"id": f"rs_{answer.id}_{place}", "type": "reasoning", "summary": list[Any](), "content": content}
    return head | {"encrypted_content": None, "status": _status(text)}


def message_item(answer: ModelAnswer, place: int, text: str | None, spelt: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`text` is None for an item that has not begun; `spelt` holds log-probabilities."""
    content = [] if text is None else [text_part(text, spelt)]
    return {
        "id": f"msg_{answer.id}_{place}",
        "type": "message",
        "role": "assistant",
        "status": _status(text),
        "content": content,
    }


def call_item(
    answer: ModelAnswer, place: int, call_id: str, address: ClientToolName | None, name: str, arguments: str | None
) -> dict[str, Any]:
    """`address` is None for a tool that the client does not know: it keeps `name`. `arguments` is None if they have not begun."""
    head: dict[str, Any] = {"call_id": call_id, "name": address.name if address else name, "status": _status(arguments)}
    if address and address.namespace:
        head["namespace"] = address.namespace
    if address and address.is_custom:
        text = freeform_text(arguments or "")
        return {"id": f"ctc_{answer.id}_{place}", "type": "custom_tool_call", "input": text, **head}
    return {"id": f"fc_{answer.id}_{place}", "type": "function_call", "arguments": arguments or "", **head}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, spelt: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`spelt` holds log-probabilities."""
    return {"type": "output_text", "text": text, "annotations": list[Any](), "logprobs": list(spelt)}


def _status(begun: str | None) -> Status:
    return "in_progress" if begun is None else "completed"


# Events

DELTA_EVENTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""By item type: the name used in its delta and done events, and the key of the full text in the done event."""
ITEMS_WITH_PARTS = ("message", "reasoning")
"""Types of items whose text is in a content part."""
MakeItem = Callable[[str | None], dict[str, Any]]
"""Builds an item from the text written so far; None if it has not begun."""


@dataclass(slots=True)
class _OpenItem:
    make: MakeItem
    id: str
    kind: str
    delta_head: bytes
    written: list[str] = field(default_factory=list[str])
    sent_logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Log-probabilities that its delta events have sent."""
    reader: FreeformReader | None = None
    """Extracts the input from a freeform call's JSON arguments; None for other items."""


class ResponseEvents:
    def __init__(self, answer: ModelAnswer, tokenizer: DialectTokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._tools = client_tool_names(dict(answer.call.echo).get("tools"))
        self._open: _OpenItem | None = None
        self._done: list[dict[str, Any]] = []
        self._sent = 0

    def start(self) -> bytes:
        begun = response_object(self._answer, "in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, choice: int, deltas: list[Delta], unsent: UnsentTokens) -> bytes:
        unsent_logprobs: list[dict[str, Any]] = logprobs(self._tokenizer, *unsent)["content"] if self._answer.call.logprobs else []
        parts: list[bytes] = []
        for delta in deltas:
            written = delta.arguments if isinstance(delta, CallDelta) else delta.text
            if written or isinstance(delta, CallDelta):
                parts += self._turn_to(delta)
                parts += self._grow(written, unsent_logprobs)
                unsent_logprobs = []
        return b"".join(parts)

    def finish_choice(self, choice: int, step: Step, unsent: UnsentTokens) -> bytes:
        kinds = {item["type"] for item in self._done} | {self._open.kind if self._open else "reasoning"}
        parts = self._start(self._message()) if kinds == {"reasoning"} else []
        return b"".join([*parts, *self._finish(ending_status(step))])

    def finish(self, steps: list[Step]) -> bytes:
        (step,) = steps
        spoken = next((item for item in self._done if item["type"] == "message"), None)
        if spoken and self._answer.call.logprobs:
            spoken["content"][0]["logprobs"] = reply_logprobs(step, self._tokenizer)
        whole = final_response(self._answer, step, self._done, self._tokenizer)
        return self._event(f"response.{whole['status']}", response=whole)

    def _turn_to(self, delta: Delta) -> list[bytes]:
        """Start the item that `delta` belongs to, unless it is already open."""
        kind = self._open.kind if self._open else None
        if isinstance(delta, CallDelta):
            return self._start(self._call(delta)) if delta.begins else []
        if isinstance(delta, Reasoning):
            return [] if kind == "reasoning" else self._start(self._reasoning())
        return [] if kind == "message" else self._start(self._message())

    def _message(self) -> MakeItem:
        return partial(message_item, self._answer, self._count("message"))

    def _reasoning(self) -> MakeItem:
        return partial(reasoning_item, self._answer, self._count("reasoning"))

    def _call(self, delta: CallDelta) -> MakeItem:
        return partial(call_item, self._answer, delta.ordinal, delta.id, self._tools.get(delta.name), delta.name)

    def _count(self, kind: str) -> int:
        return sum(item["type"] == kind for item in self._done)

    def _start(self, make: MakeItem) -> list[bytes]:
        parts, begun = self._finish({}), make(None)
        reader = FreeformReader() if begun["type"] == "custom_tool_call" else None
        self._open = _OpenItem(make, begun["id"], begun["type"], self._delta_head(begun), reader=reader)
        parts.append(self._event("response.output_item.added", output_index=len(self._done), item=begun))
        if begun["type"] in ITEMS_WITH_PARTS:
            parts.append(self._part_event("response.content_part.added", make("")))
        return parts

    def _delta_head(self, item: dict[str, Any]) -> bytes:
        """Return the constant start of the item's delta events: all but the sequence number and the text."""
        event, kind = f"response.{DELTA_EVENTS[item['type']][0]}.delta", item["type"]
        body = {"type": event, "item_id": item["id"], "output_index": len(self._done), **_place_in(kind)}
        if kind == "message":
            body["logprobs"] = []
        return b"event: " + event.encode() + b"\ndata: " + orjson.dumps(body).removesuffix(b"}")

    def _grow(self, written: str, logprobs: list[dict[str, Any]]) -> list[bytes]:
        item = self._open
        if item is None or not written:
            return []
        item.written.append(written)
        item.sent_logprobs += logprobs
        shown = item.reader.push(written) if item.reader else written
        return [self._delta(item, shown, logprobs)] if shown else []

    def _delta(self, item: _OpenItem, shown: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Format a delta event. One is sent every few tokens, so without log-probabilities its constant start is reused."""
        if logprobs and item.kind == "message":
            return self._item_event(item, "delta", **_place_in(item.kind), logprobs=logprobs, delta=shown)
        number, self._sent = self._sent, self._sent + 1
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (item.delta_head, number, orjson.dumps(shown))

    def _finish(self, status: dict[str, Any]) -> list[bytes]:
        """Finish the open item, if there is one."""
        item, parts = self._open, list[bytes]()
        if item is None:
            return parts
        if item.reader and (rest := item.reader.finish()):
            parts.append(self._delta(item, rest, []))
        made = item.make("".join(item.written)) | status
        extra = _place_in(item.kind)
        if item.kind == "message":
            made["content"][0]["logprobs"] = extra["logprobs"] = item.sent_logprobs
        key = DELTA_EVENTS[item.kind][1]
        parts.append(
            self._item_event(
                item, "done", **{key: made["content"][0][key] if item.kind in ITEMS_WITH_PARTS else made[key]}, **extra
            )
        )
        if item.kind in ITEMS_WITH_PARTS:
            parts.append(self._part_event("response.content_part.done", made))
        parts.append(self._event("response.output_item.done", output_index=len(self._done), item=made))
        self._done.append(made)
        self._open = None
        return parts

    def _item_event(self, item: _OpenItem, event: str, **extra: Any) -> bytes:
        return self._event(f"response.{DELTA_EVENTS[item.kind][0]}.{event}", item_id=item.id, output_index=len(self._done), **extra)

    def _part_event(self, event: str, item: dict[str, Any]) -> bytes:
        place = {"item_id": item["id"], "output_index": len(self._done), "content_index": 0}
        return self._event(event, **place, part=item["content"][0])

    def _event(self, event: str, **content: Any) -> bytes:
        body = {"type": event, "sequence_number": self._sent, **content}
        self._sent += 1
        return b"event: " + event.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


def _place_in(kind: str) -> dict[str, Any]:
    """Return the index of the content part that holds the text, if there is one."""
    return {"content_index": 0} if kind in ITEMS_WITH_PARTS else {}
