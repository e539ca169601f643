"""The items of a Responses request as messages: what one reply came out as is one assistant message again.

reasoning, message, function_call, function_call     one reply      ──▶  assistant
function_call_output                                  one result    ──▶  tool
message                                               one turn      ──▶  user, system
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.chat.templates import flatten
from penstock.errors import RequestError
from penstock.gateway.calls import Past
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.responses_tools import freeform_arguments, joined
from penstock.records import Message

RESPONSE_ID = "resp_"
ITEM_ID = re.compile(r"(msg|rs|fc|ctc)_(.+)_(\d+)")
"""Our own items: kind, answer, and which of its kind it is in the answer."""

CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Parts that are text, and the key that holds it."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Group(NamedTuple):
    """Items that make one message."""

    start: int
    """Place of the first one in the input."""
    items: list[dict[str, Any]]


def messages(body: dict[str, Any], past: Past) -> tuple[Message, ...]:
    """All messages of a call: its instructions, what its `previous_response_id` stands for, its input."""
    raw: list[Any] = []
    if body.get("instructions") is not None:
        raw.append(fields.text(body["instructions"], "instructions"))
    raw += _carried(body.get("previous_response_id"), past)
    groups, before = _grouped(_items(body.get("input"), past)), len(raw)
    raw += [group.items for group in groups]
    if not raw:
        raise fields.wrong("input", "must be text or a list with at least one item")

    def read(place: int, each: Any) -> Message:
        if isinstance(each, str):
            return {"role": "system", "content": each, "instructions": True}
        return fields.entry(each) or _message(groups[place - before])

    return past.talk.messages(raw, read)


def _carried(response_id: Any, past: Past) -> list[Message]:
    """The conversation up to an earlier answer, without the instructions of that call: they do not carry over."""
    if response_id is None:
        return []
    given = fields.text(response_id, "previous_response_id")
    known = past.messages(given.removeprefix(RESPONSE_ID)) if given.startswith(RESPONSE_ID) else None
    if known is None:
        raise RequestError(
            f"previous_response_id {given!r} is not a response of this rollout; send the whole conversation as input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return [message for message in known if not message.get("instructions")]


def _items(value: Any, past: Past) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    listed = fields.entries([] if value is None else value)
    if listed is None:
        raise fields.wrong("input", f"must be text or a list of items, not {fields.shown(value)}")
    items: list[dict[str, Any]] = []
    for place, each in enumerate(listed):
        item = fields.entry(each)
        if item is None:
            raise fields.wrong(f"input[{place}]", f"must be an item, not {fields.shown(each)}")
        items.append(_resolved(item, f"input[{place}]", past) if _kind(item) == "item_reference" else item)
    return items


def _resolved(item: dict[str, Any], name: str, past: Past) -> dict[str, Any]:
    """The item of an earlier answer that a reference means."""
    item_id = fields.text(item.get("id"), f"{name}.id")
    ours = ITEM_ID.fullmatch(item_id)
    known = past.messages(ours[2]) if ours else None
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
        raise fields.wrong(name, f"refers to call {which} of an answer that made {len(calls)}")
    return {"type": "function_call", "call_id": calls[which]["id"], **calls[which]["function"]}


def _kind(item: dict[str, Any]) -> Any:
    kind = item.get("type")
    return kind if kind is not None else "message" if "role" in item else "item_reference"


def _grouped(items: Sequence[dict[str, Any]]) -> list[Group]:
    """Items that one reply came out as stand together; of two assistant messages in a row, each is a reply of its own."""
    groups: list[Group] = []
    before = ""
    for place, item in enumerate(items):
        kind = _kind(item)
        part = "said" if kind == "message" and item.get("role") == "assistant" else kind
        is_reply = part in ("said", "reasoning", *CALLS)
        if is_reply and before and not before == part == "said":
            groups[-1].items.append(item)
        else:
            groups.append(Group(place, [item]))
        before = part if is_reply else ""
    return [group for group in groups if not _is_silent(group)]


def _is_silent(group: Group) -> bool:
    """Whether there is nothing but reasoning that only its vendor can read."""
    return all(_kind(item) == "reasoning" and not _thought(item, "input") for item in group.items)


def _message(group: Group) -> Message:
    first, name = group.items[0], f"input[{group.start}]"
    fields.check_depth(group.items, name)
    kind = _kind(first)
    if kind in RESULTS:
        content = _content(first.get("output"), f"{name}.output")
        return {"role": "tool", "content": content, "tool_call_id": fields.text(first.get("call_id") or "", f"{name}.call_id")}
    if kind == "message" and first.get("role") != "assistant":
        role = first.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise fields.wrong(f"{name}.role", f"must be one of {', '.join(ROLES)}, not {fields.shown(role)}")
        return {"role": ROLES[role], "content": _content(first.get("content"), f"{name}.content")}
    if kind not in ("message", "reasoning", *CALLS):
        raise RequestError(f"{name} is of type {fields.shown(kind)}, which is not supported", code="unsupported_item", param=name)
    return _reply(group)


def _reply(group: Group) -> Message:
    said, thought, calls = "", "", list[dict[str, Any]]()
    for place, item in enumerate(group.items, group.start):
        name, kind = f"input[{place}]", _kind(item)
        if kind == "reasoning":
            thought += _thought(item, name)
        elif kind == "message":
            said += _content(item.get("content"), f"{name}.content")
        else:
            calls.append(_call(item, name))
    message: Message = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message |= {"content": said or None, "tool_calls": calls}
    return message


def _call(item: dict[str, Any], name: str) -> dict[str, Any]:
    flat = joined(fields.text(item.get("name"), f"{name}.name"), fields.text(item.get("namespace") or "", f"{name}.namespace"))
    if item["type"] == "custom_tool_call":
        arguments = freeform_arguments(fields.text(item.get("input"), f"{name}.input"))
    else:
        arguments = fields.text(item.get("arguments"), f"{name}.arguments")
    call_id = fields.text(item.get("call_id") or "", f"{name}.call_id")
    return {"id": call_id, "type": "function", "function": {"name": flat, "arguments": arguments}}


def _thought(item: dict[str, Any], name: str) -> str:
    """The reasoning itself; what is encrypted or a summary is none of the model's."""
    texts: list[str] = []
    for place, each in enumerate(fields.entries(item.get("content")) or ()):
        part = fields.entry(each) or {}
        if part.get("type") == "reasoning_text":
            texts.append(fields.text(part.get("text"), f"{name}.content[{place}].text"))
    return "".join(texts)


def _content(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    parts = fields.entries(value)
    if parts is None:
        raise fields.wrong(name, f"must be text or a list of text parts, not {fields.shown(value)}")
    return flatten([{"text": _part(fields.entry(part) or {}, f"{name}[{place}]")} for place, part in enumerate(parts)])


def _part(part: dict[str, Any], name: str) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXTS:
        raise fields.wrong(name, f"must be a text part; {fields.shown(kind)} is not supported")
    return fields.text(part.get(TEXTS[kind]), f"{name}.{TEXTS[kind]}")
