"""Chat templates: messages to text, and canonical digests by which the gateway recognizes a message."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.chat.media import PICTURE, parts_of, pictures_of, placeholder, text_part
from penstock.errors import ModelError, RenderError, boundary
from penstock.records import Message

Tool = dict[str, Any]
"""One tool in the OpenAI form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class ChatTemplate:
    """A compiled chat template. It runs in a sandbox, because it comes with the model and cannot be trusted."""

    def __init__(self, source: str, named: Mapping[str, Any]) -> None:
        """`named` are variables that every rendering gets."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        own = {"raise_exception": _raise, "strftime_now": _strftime_now}
        with boundary(ModelError, "the model's chat template cannot be compiled"):
            self._template = environment.from_string(source, globals=own)
        self._named = dict(named)
        self.source = source
        self._takes_lists = self._shows_lists_only()
        """Whether it shows nothing of a content that is text: templates of some models of pictures read lists of parts alone."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool, now: datetime | None = None
    ) -> str:
        """The prompt's text; with `generate`, up to where the reply begins. RenderError if the template refuses.

        `now` is the time for templates that write the date; None is the current time.
        """
        clock = {} if now is None else {"strftime_now": now.strftime}
        with boundary(RenderError, "the chat template does not take these messages"):
            return self._template.render(
                messages=[self._listed(_for_template(message)) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generate,
                **self._named,
                **clock,
            )

    def _listed(self, message: Message) -> Message:
        if not self._takes_lists or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _shows_lists_only(self) -> bool:
        shown: list[bool] = []
        for content in (PROBE, [{"type": "text", "text": PROBE}]):
            try:
                probe = [{"role": "user", "content": content}]
                shown.append(PROBE in self._template.render(messages=probe, add_generation_prompt=True, **self._named))
            except Exception:  # a template raises what it likes; then nothing is known of it
                return False
        return shown == [False, True]


PROBE = "What is 6 times 7?"


class _Generation(Extension):
    """Accepts `{% generation %}` blocks, which mark the model's text for trainers, and renders their content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replaces jinja2's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _for_template(message: Message) -> Message:
    """The message as templates expect it: content as text, tool arguments as a value, reasoning under both of its names."""
    if isinstance(message.get("content"), str) and "tool_calls" not in message and "reasoning_content" not in message:
        return message
    plain: Message = {**message, "content": _content(message.get("content"))}
    if plain.get("reasoning_content"):
        plain["thinking"] = plain["reasoning_content"]
    calls: list[dict[str, Any]] = plain.pop("tool_calls", None) or []
    if calls:
        plain["tool_calls"] = [{**call, "function": _with_value(call["function"])} for call in calls]
    return plain


def _content(content: Any) -> Any:
    """Text; with pictures, the list of parts that templates of such models expect."""
    if not pictures_of([{"content": content}]):
        return flatten(content)
    return [{"type": "image"} if part["type"] == PICTURE else text_part(part) for part in parts_of({"content": content})]


def _with_value(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json_value(function["arguments"])}


def flatten(content: Any) -> str:
    """Message content as one string. None is empty; the parts of a list are joined by newlines, images as placeholders."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts: list[dict[str, Any]] = content
    return "\n".join(part["text"] if "text" in part else placeholder(part) for part in parts)


def has_reasoning(message: Message) -> bool:
    """Whether a reply has reasoning, parsed out of its text or still in it."""
    return bool(message.get("reasoning_content")) or "</think>" in flatten(message.get("content"))


def json_value(arguments: Any) -> Any:
    """Tool arguments as a value; text that is not JSON stays text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


# Canonical forms


EXACT = 2**53
"""Integers up to this are exact as doubles."""


def message_digest(message: Message) -> str:
    """Digest of role, text and tool calls with canonical arguments; equal for messages that mean the same.

    It ignores ids of tool calls, because agents make their own, and a reply's reasoning, surrounding white space and author
    name, because agents drop, strip or add them when they send the history back. The recorded tokens are used all the same.
    """
    role, text = message["role"], flatten(message.get("content"))
    if role == "assistant":
        calls = [
            [call["function"]["name"], canonical_json(call["function"]["arguments"])] for call in message.get("tool_calls") or ()
        ]
        plain = [role, text.strip(), calls]
    else:
        plain = [role, text, message.get("name")]
    return blake2b(orjson.dumps(plain), digest_size=16).hexdigest()


def tools_digest(tools: Sequence[Tool]) -> str:
    return blake2b(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def chain_digest(chain: str, digest: str) -> str:
    """The digest of a path after one more message."""
    return blake2b((chain + digest).encode(), digest_size=16).hexdigest()


def canonical_json(arguments: Any) -> str:
    """Tool arguments (JSON text, or the value itself) with sorted keys and no spaces; text that is not JSON is unchanged.

    Numbers are normalized as JavaScript clients do: 6.0 is 6, and integers beyond 2^53 are doubles. Empty text is an empty object,
    as clients read it.
    """
    if arguments == "":
        return "{}"
    try:
        return json.dumps(_as_doubles(json_value(arguments)), sort_keys=True, separators=(",", ":"))
    except (ValueError, OverflowError, RecursionError):
        return str(arguments)


def _as_doubles(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < EXACT else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < EXACT else float(value)
    if isinstance(value, dict):
        return {key: _as_doubles(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return [_as_doubles(item) for item in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


# Conversations that a template refuses


def simpler_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Forms of the conversation that a strict template may accept: with one system message, then with none."""
    yield _join_same_role(_one_system(messages))
    yield _join_same_role([_as_user(message) for message in messages])


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Keep leading system messages; later ones become user messages."""
    head = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*messages[:head], *map(_as_user, messages[head:])]


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _join_same_role(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the system, and of the user."""
    joined: list[Message] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] and message["role"] in ("system", "user"):
            text = "\n\n".join([flatten(joined[-1].get("content")), flatten(message.get("content"))])
            joined[-1] = {**joined[-1], "content": text}
        else:
            joined.append(message)
    return joined
