"""Reading request fields: each has its type and range, or is refused by name."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, cast

import orjson

from penstock.chat.media import MEDIA, text_of_url
from penstock.chat.templates import Tool, flatten
from penstock.errors import RequestError
from penstock.gateway.request import LastRequest
from penstock.http.asgi import JsonBudget
from penstock.records import MAX_TOP_LOGPROBS, Message, ReplyFormat, Sampling

ContentPart = dict[str, Any]
"""A part of a message's content in the OpenAI form."""
MAX_ENTRIES, MAX_TOOLS = 10_000, 2000
"""Messages, items or content blocks, and tools or calls, in one list."""
MAX_VALUES = 200_000
"""JSON values in the tools, and in the messages that the last request did not have."""
MAX_CHOICES = 128
"""`n`."""
TEMPLATE_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
"""What a chat template is given already."""
MAX_TEMPLATE_VALUES = 100
"""JSON values in `chat_template_kwargs`."""
MAX_STOP_CHARACTERS, MAX_STOP_IDS, MAX_BIASES = 1000, 1000, 1024


def as_object(value: Any) -> dict[str, Any] | None:
    """`value` if it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: Any) -> list[Any] | None:
    """`value` if it is a JSON list, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def invalid(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}", code="invalid_value", param=name)


def number(body: dict[str, Any], name: str, default: float, *, low: float, high: float = float("inf")) -> float:
    """A number from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(name, f"must be a number from {low:g} to {high:g}, not {preview(value)}")
    return float(value)


def integer(body: dict[str, Any], name: str, default: int, *, low: int, high: int = 2**53) -> int:
    """A whole number from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(name, f"must be a whole number from {low} to {high}, not {preview(value)}")
    return value


def flag(body: dict[str, Any], name: str) -> bool:
    """True or false; absent is false."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"must be true or false, not {preview(value)}")
    return bool(value)


def strings(body: dict[str, Any], name: str, *, most: int = 16) -> tuple[str, ...]:
    """A string or a list of them, none of them empty."""
    values = _several(body.get(name))
    if len(values) > most or not all(isinstance(each, str) and 0 < len(each) <= MAX_STOP_CHARACTERS for each in values):
        raise invalid(name, f"must be a string or up to {most} strings, each of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(values)


def integers(body: dict[str, Any], name: str, *, most: int | None = None) -> tuple[int, ...]:
    """A list of token ids."""
    values = _several(body.get(name))
    if most is not None:
        check_count(values, name, most)
    if values and not (set(map(type, values)) == {int} and 0 <= min(values) <= max(values) < 2**31):
        raise invalid(name, "must be a list of token ids")
    return tuple(values)


def messages(value: Any, last_request: LastRequest, name: str = "messages") -> tuple[Message, ...]:
    """Chat messages in the OpenAI form, reduced to text content and the fields that templates and digests read."""
    given = as_list(value)
    if not given:
        raise invalid(name, "must be a list with at least one message")
    check_count(given, name)
    budget = JsonBudget(MAX_VALUES)
    return last_request.messages(given, lambda index, each: _message(each, f"{name}[{index}]", budget))


def tools(value: Any, last_request: LastRequest, name: str = "tools") -> tuple[Tool, ...]:
    """Tools as functions: freeform ones have one text. Tools that a vendor's servers run are left out."""
    return last_request.tools(value, lambda given: _tools(given, name))


def forced_tool(value: Any, tools: tuple[Tool, ...], name: str = "tool_choice") -> str | None:
    """The tool that must be called, empty for any; None if the model may choose (`auto`, or absent)."""
    if value in (None, "auto", "none"):
        return None
    named = as_object(value) or {}
    if named.get("type") == "allowed_tools":
        return _forced_of_several(named, tools, name)
    wanted = "" if value == "required" else _name_in(named)
    known = {tool["function"]["name"] for tool in tools}
    if not isinstance(wanted, str) or (wanted and wanted not in known) or not known:
        raise invalid(name, f"must be 'auto', 'none', 'required' or one of the tools given, not {preview(value)}")
    return wanted


def _forced_of_several(value: dict[str, Any], tools: tuple[Tool, ...], name: str) -> str | None:
    """The tool that `allowed_tools` forces: one if it is the only one. The Chat form nests mode and tools in an object."""
    allowed = as_object(value.get("allowed_tools")) or value
    wanted = _listed(allowed)
    if allowed.get("mode") not in ("auto", "required") or not wanted:
        raise invalid(name, f"must have a mode, auto or required, and tools; not {preview(value)}")
    if allowed["mode"] == "auto":
        return None
    return forced_tool({"name": wanted[0]} if len(wanted) == 1 else "required", tools, name)


def allowed_tools(value: Any, tools: tuple[Tool, ...]) -> frozenset[str]:
    """The tools that `allowed_tools` lists, of those that the model is offered; empty if the choice sets no bound."""
    choice = as_object(value) or {}
    if choice.get("type") != "allowed_tools":
        return frozenset()
    listed = _listed(as_object(choice.get("allowed_tools")) or choice)
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"]["name"] in listed)


def _listed(allowed: dict[str, Any]) -> list[Any]:
    named = [as_object(each) or {} for each in as_list(allowed.get("tools")) or ()]
    return [_name_in(each) for each in named]


def _name_in(tool: dict[str, Any]) -> Any:
    """Returns the name of a tool, which stands next to its type, or inside an object as in the chat dialect."""
    return (as_object(tool.get("function")) or as_object(tool.get("custom")) or tool).get("name")


def unmet_tool_choice(value: Any, tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """What cannot be done of a tool choice: `allowed_tools` that lists none of the tools that the model is offered."""
    bound = (as_object(value) or {}).get("type") == "allowed_tools"
    return ("tool_choice.allowed_tools",) if bound and not allowed_tools(value, tools) else ()


def template_options(value: Any, name: str) -> str:
    """Variables for the chat template as canonical JSON; empty if there are none."""
    given = as_object({} if value is None else value)
    if given is None:
        raise invalid(name, f"must be an object, not {preview(value)}")
    if own := given.keys() & TEMPLATE_VARIABLES:
        raise invalid(name, f"must not set {min(own)}, which the gateway does")
    JsonBudget(MAX_TEMPLATE_VALUES).spend(given, name)
    return orjson.dumps(given, option=orjson.OPT_SORT_KEYS).decode() if given else ""


def reply_format(value: Any, name: str) -> ReplyFormat | None:
    """The JSON that the reply must be; None for text. A schema stands next to `type`, or in an object as in the chat dialect."""
    given = as_object({"type": "text"} if value is None else value) or {}
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(name, f"must be of type text, json_object or json_schema, not {preview(value)}")
    if kind == "text":
        return None
    details = nested(given, "json_schema", f"{name}.json_schema") or given
    schema = as_object(details.get("schema"))
    if schema is None and (kind == "json_schema" or details.get("schema") is not None):
        raise invalid(f"{name}.schema", "must be a JSON schema")
    JsonBudget(MAX_VALUES).spend(schema, f"{name}.schema")
    label, about = details.get("name"), details.get("description")
    return ReplyFormat(
        schema=schema,
        name=label if isinstance(label, str) and label else "reply",
        description=about if isinstance(about, str) else "",
        strict=flag(details, "strict"),
    )


def strict_tools(tools: tuple[Tool, ...]) -> frozenset[str]:
    """The names of the tools with `strict`."""
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True)


def nested(body: dict[str, Any], name: str, full_name: str = "") -> dict[str, Any]:
    """An object; absent is empty. `full_name` is for the error."""
    value = as_object({} if body.get(name) is None else body[name])
    if value is None:
        raise invalid(full_name or name, "must be an object")
    return value


def check_vocabulary(ids: Sequence[int], name: str, size: int) -> None:
    if max(ids) >= size:
        raise invalid(name, f"holds token {max(ids)}; this model has {size} of them, counted from 0")


def check_count(entries: Sized, name: str, most: int = MAX_ENTRIES) -> None:
    if len(entries) > most:
        raise invalid(name, f"has {len(entries)} entries; send at most {most}")


def preview(value: Any) -> str:
    """The value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}


def _several(value: Any) -> list[Any]:
    return [] if value is None else [value] if as_list(value) is None else value


def _tools(value: Any, name: str) -> tuple[Tool, ...]:
    given = as_list([] if value is None else value)
    if given is None:
        raise invalid(name, "must be a list of tools")
    check_count(given, name, MAX_TOOLS)
    JsonBudget(MAX_VALUES).spend(given, name)
    return tuple(tool for index, each in enumerate(given) if (tool := _function_tool(as_object(each) or {}, f"{name}[{index}]")))


def _function_tool(tool: dict[str, Any], name: str) -> Tool | None:
    """The tool as a function; None if a vendor's servers run it."""
    kind = string(tool.get("type"), f"{name}.type")
    if kind not in ("function", "custom"):
        return None
    named = as_object(tool.get(kind)) or {}
    if not isinstance(named.get("name"), str):
        raise invalid(name, "must have a name")
    if kind == "function":
        return tool
    string(named.get("description") or "", f"{name}.custom.description")
    return {"type": "function", "function": freeform_function(named, _freeform_grammar(named))}


def _freeform_grammar(named: dict[str, Any]) -> dict[str, Any]:
    shape = as_object(named.get("format")) or {}
    return as_object(shape.get("grammar")) or {} if shape.get("type") == "grammar" else {}


def freeform_tools(value: Any) -> frozenset[str]:
    """The names of the freeform tools among chat tools that `tools` takes."""
    return frozenset(tool["custom"]["name"] for tool in as_list(value) or () if tool["type"] == "custom")


def vendor_tools(value: Any) -> list[dict[str, Any]]:
    """Those of the tools that `tools` leaves out."""
    return [tool for tool in as_list(value) or () if tool["type"] not in ("function", "custom")]


def ignored_tool_options(value: Any) -> Iterator[str]:
    """Yield what is not done of chat tools that `tools` takes: those of a vendor's servers, grammars of freeform ones."""
    yield from (f"tool:{tool['type']}" for tool in vendor_tools(value))
    if any(_freeform_grammar(tool["custom"]) for tool in as_list(value) or () if tool["type"] == "custom"):
        yield "tools.format"


def _message(value: Any, name: str, budget: JsonBudget) -> Message:
    given = as_object(value)
    if given is None:
        raise invalid(name, "must be an object")
    budget.spend(given, name)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{name}.role", f"must be one of {', '.join(ROLES)}, not {preview(role)}")
    message: Message = {"role": ROLES[role], "content": _content(given.get("content"), f"{name}.content")}
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], f"{name}.tool_calls")
    elif role == "assistant" and given.get("function_call"):
        message["tool_calls"] = _calls([{"function": given["function_call"]}], f"{name}.function_call")
    if role == "assistant" and given.get("audio"):
        raise invalid(name, "has audio, which is not supported; send its transcript as content")
    reasoning = (given.get("reasoning_content") or given.get("reasoning")) if role == "assistant" else None
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if given.get(key) is not None:
            message[key] = string(given[key], f"{name}.{key}")
    return message


def joined(parts: Sequence[ContentPart]) -> str | list[ContentPart]:
    """Content parts as one text, or as they are if one of them is not text."""
    return flatten(parts) if all("text" in part for part in parts) else list(parts)


def text_part(text: str) -> ContentPart:
    return {"type": "text", "text": text}


def image_part(url: Any, name: str) -> ContentPart:
    """An image by its URL, which may hold its bytes."""
    return {"type": "image_url", "image_url": {"url": string(url, name)}}


def file_part(file: dict[str, Any]) -> ContentPart:
    """A document, as text if it is plain text. `file` has the fields of the OpenAI form: `file_data`, `file_id`, `filename`."""
    data = file.get("file_data")
    text = text_of_url(data) if isinstance(data, str) else None
    return {"type": "file", "file": file} if text is None else text_part(text)


def _content(value: Any, name: str) -> str | list[ContentPart]:
    if value is None or isinstance(value, str):
        return value or ""
    parts = as_list(value)
    if parts is None:
        raise invalid(name, f"must be a string or a list of content parts, not {preview(value)}")
    check_count(parts, name)
    return joined([_part(as_object(part) or {}, f"{name}[{index}]") for index, part in enumerate(parts)])


def _part(part: dict[str, Any], name: str) -> ContentPart:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return text_part(string(part.get(kind), f"{name}.{kind}"))
    if kind == "file":
        return file_part(nested(part, "file", f"{name}.file"))
    if kind not in MEDIA:
        raise invalid(name, f"must be of type text, refusal or {', '.join(MEDIA)}, not {preview(kind)}")
    return {"type": kind, kind: nested(part, kind, f"{name}.{kind}")}


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    check_count(as_list(value) or (), name, MAX_TOOLS)
    for index, each in enumerate(as_list(value) or [None]):
        call = as_object(each) or {}
        function, where = as_object(call.get("function")), f"{name}[{index}]"
        if custom := as_object(call.get("custom")):
            function = {**custom, "arguments": freeform_arguments(string(custom.get("input"), f"{where}.custom.input"))}
        if function is None:
            raise invalid(where, "must be a function call")
        arguments: Any = function.get("arguments", "{}")
        if not isinstance(arguments, str | dict):
            raise invalid(f"{where}.function.arguments", "must be JSON text")
        named: dict[str, Any] = {"name": string(function.get("name"), f"{where}.function.name"), "arguments": arguments}
        calls.append({"id": string(call.get("id") or "", f"{where}.id"), "type": "function", "function": named})
    return calls


def string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(name, f"must be a string, not {preview(value)}")
    return value


SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed"})
"""The fields that `read_sampling` reads, besides the limit."""


def read_sampling(body: dict[str, Any], defaults: Sampling, limit: str, *, top_logprobs: int = 0) -> Sampling:
    """The sampling of a request, with `defaults` for absent fields; `limit` names the field with the maximum of tokens."""
    if body.get(limit) is None and not body.keys() & SAMPLING_FIELDS and not top_logprobs:
        return defaults
    seed = body.get("seed")
    return replace(
        defaults,
        max_tokens=integer(body, limit, defaults.max_tokens, low=1),
        temperature=number(body, "temperature", defaults.temperature, low=0, high=100),
        top_p=number(body, "top_p", defaults.top_p, low=1e-6, high=1),
        top_k=max(integer(body, "top_k", defaults.top_k, low=-1), 0),
        min_p=number(body, "min_p", defaults.min_p, low=0, high=1),
        stop=strings(body, "stop") or defaults.stop,
        stop_ids=(*defaults.stop_ids, *integers(body, "stop_token_ids", most=MAX_STOP_IDS)),
        seed=defaults.seed if seed is None else integer(body, "seed", 0, low=-(2**53)),
        top_logprobs=top_logprobs,
    )


def read_bias(body: dict[str, Any], sampling: Sampling) -> Sampling:
    """The sampling without the tokens that `logit_bias` bans (-100), or with none but those that it chooses (100).

    Values between are refused: a trainer knows which tokens were left out, not by how much others were made likelier.
    """
    if not (biases := nested(body, "logit_bias")):
        return sampling
    check_count(biases, "logit_bias", MAX_BIASES)
    if not all(key.isdecimal() and len(key) < 10 and value in (-100, 0, 100) for key, value in biases.items()):
        text = (
            f"logit_bias={preview(biases)} is not supported: give token ids -100 (never) or 100 (none but these), or leave it out"
        )
        raise RequestError(text, code="unsupported_parameter", param="logit_bias")
    banned, only = (tuple(sorted(int(key) for key, value in biases.items() if value == bias)) for bias in (-100, 100))
    return replace(sampling, banned_ids=banned, only_ids=only) if banned or only else sampling


def top_logprobs(body: dict[str, Any], name: str = "top_logprobs") -> int:
    return integer(body, name, 0, low=0, high=MAX_TOP_LOGPROBS)


def refuse_unsupported(body: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse the first unsupported field whose value is not in `neutral`."""
    for name in unsupported_names(body, neutral):
        raise unsupported(name, body[name])


def unsupported_names(body: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """The unsupported fields whose value is not in `neutral`; only endpoints of text get them."""
    return (name for name, values in neutral.items() if body.get(name) is not None and body[name] not in values)


HARMLESS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "prediction": (),
    "web_search_options": (),
}
"""Fields whose wish is not met and only counted, as replies are right without it; with the values that have no effect."""


def check_harmless(body: dict[str, Any]) -> tuple[str, ...]:
    """The names of the `HARMLESS` fields that would have an effect; RequestError for a value of the wrong type or range."""
    number(body, "frequency_penalty", 0, low=-2, high=2)
    number(body, "presence_penalty", 0, low=-2, high=2)
    number(body, "repetition_penalty", 1, low=0)
    return tuple(name for name, neutral in HARMLESS.items() if body.get(name) is not None and body[name] not in neutral)


def unsupported(name: str, value: Any) -> RequestError:
    return RequestError(f"{name}={preview(value)} is not supported; leave it out", code="unsupported_parameter", param=name)


# Freeform tools

FREEFORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a freeform tool as the model sees it: models not trained on such tools write JSON arguments anyway."""


def freeform_function(tool: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The function that the model sees. `shape` is the grammar of the input, if there is one: it is shown, not enforced."""
    parts = [tool.get("description") or ""]
    if shape:
        parts.append(f"The input follows this {shape.get('syntax')} grammar:\n{shape.get('definition')}")
    text = "\n\n".join(part for part in parts if part)
    return {"name": tool["name"], **({"description": text} if text else {}), "parameters": FREEFORM}


def freeform_arguments(text: str) -> str:
    """Return the JSON arguments of a freeform call, as the model would have written them."""
    return json.dumps({"input": text}, ensure_ascii=False)


def freeform_text(arguments: str) -> str:
    """Return the input of a freeform call that the model wrote as JSON arguments."""
    reader = FreeformReader()
    return reader.push(arguments) + reader.finish()


class FreeformReader:
    """Extracts the value of `input` from JSON arguments as they stream in. Arguments of any other form are the input themselves.

    The output does not depend on how the arguments are split: an incomplete escape sequence is held back.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def push(self, text: str) -> str:
        """Add `text`; return the input that is now certain."""
        self._held += text
        if self._state == "before":
            self._find_value()
        if self._state == "inside":
            return self._read_value()
        ready, self._held = ("", self._held) if self._state == "before" else (self._held, "")
        return ready if self._state == "other" else ""

    def finish(self) -> str:
        """Return what was held back: empty unless the arguments ended before their form was known."""
        return self._held if self._state == "before" else ""

    def _find_value(self) -> None:
        found = _OPENING.match(self._held)
        if found:
            self._held, self._state = self._held[found.end() :], "inside"
        elif not '{"input":"'.startswith("".join(self._held.split())):
            self._state = "other"

    def _read_value(self) -> str:
        parts: list[str] = []
        place = 0
        while (unit := _UNIT.match(self._held, place)) and not _is_half(unit):
            parts.append(_spelt(unit.group()))
            place = unit.end()
        self._held = self._held[place:]
        if self._held.startswith('"'):
            self._held, self._state = "", "after"
        return "".join(parts)


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_UNIT = re.compile(r'[^"\\]+|\\u[dD][89abAB]..\\u.{4}|\\u.{4}|\\[^u]', re.DOTALL)
"""Plain characters or one escape sequence; a high surrogate is matched together with the escape after it."""


def _is_half(unit: re.Match[str]) -> bool:
    """Return whether `unit` is a high surrogate whose other half may still come."""
    is_first = len(unit.group()) == 6 and re.match(r"\\u[dD][89abAB]", unit.group()) is not None
    return is_first and r"\u".startswith(unit.string[unit.end() : unit.end() + 2])


def _spelt(unit: str) -> str:
    if not unit.startswith("\\"):
        return unit
    try:
        text: str = json.loads(f'"{unit}"')
    except ValueError:
        return unit
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
