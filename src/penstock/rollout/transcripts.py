"""Recorded steps to transcripts: each agent's conversation at the end of a rollout, and the samples that a grader sees.

A framework may report a conversation in its own form, with what the record lacks. A grader may read that form only if it says
nothing for the policy that was not sampled.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from penstock.records import Message, Rollout, Step
from penstock.sdk.routing import MAIN
from penstock.sdk.samples import RolloutSample, fast_copy


class Transcript(NamedTuple):
    """One agent's conversation, as the gateway recorded it."""

    messages: list[Message]
    """Up to and with its last reply."""
    tools: list[dict[str, Any]]
    """Schemas of the tools in its last call."""
    steps: tuple[int, ...]
    """Indices of its calls."""
    replies: list[Message] | None = None
    """What the policy said, call by call, on every branch; None if that is not known."""


def transcripts(attempt: Rollout) -> dict[str, Transcript]:
    """Returns the transcripts by name, in the order of their first calls.

    A transcript ends with its last complete call; a call that broke off counts only if there is no complete one.
    """
    last: dict[str, Step] = {}
    indices: dict[str, list[int]] = {}
    replies: dict[str, list[Message]] = {}
    for step in sorted(attempt.steps, key=lambda step: step.index):
        complete = step.finish in ("stop", "length")
        indices.setdefault(step.transcript, []).append(step.index)
        replies.setdefault(step.transcript, []).append(step.message)
        if complete or step.transcript not in last:
            last[step.transcript] = step
    return {name: _transcript(attempt, step, indices[name], replies[name]) for name, step in last.items()}


def make_samples(
    recorded: Mapping[str, Transcript], reported: Mapping[str, list[Message]], returned: list[Message] | None = None
) -> dict[str, RolloutSample]:
    """Returns the grader's samples: each transcript once, as recorded.

    A conversation that an agent's framework reported takes its place, in the framework's form, if all that it says for the policy
    was sampled. What a workflow `returned` never does. Both are `reported_messages`.
    """
    claims = {**reported, **({MAIN: returned} if returned and not reported else {})}
    samples: dict[str, RolloutSample] = {}
    for name in {**recorded, **claims}:
        known = recorded.get(name, Transcript([], [], ()))
        replies = known.messages if known.replies is None else known.replies
        proven = name in reported and was_sampled(reported[name], known.messages, replies)
        samples[name] = RolloutSample(
            id=name,
            messages=fast_copy(reported[name] if proven else known.messages),
            transcript=fast_copy(known.messages),
            replies=fast_copy(sampled_messages(known.messages, replies)),
            reported_messages=fast_copy(claims.get(name, [])),
            tools=fast_copy(known.tools),
            steps=known.steps,
        )
    return samples


def unrecorded_samples(claims: Mapping[str, list[Message]]) -> dict[str, RolloutSample]:
    """Returns samples of what agents reported, for a grader whose controller does not say what was recorded."""
    return {
        name: RolloutSample(id=name, messages=fast_copy(messages), reported_messages=fast_copy(messages))
        for name, messages in claims.items()
    }


def misreported(samples: Mapping[str, RolloutSample], reported: Iterable[str]) -> list[str]:
    """Returns the transcripts whose agents reported another conversation than was sampled."""
    return [name for name in reported if samples[name].messages != samples[name].reported_messages]


def _transcript(attempt: Rollout, step: Step, indices: list[int], replies: list[Message]) -> Transcript:
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in attempt.steps}
    node, messages = nodes[step.node], [*nodes[step.node].messages, step.message]
    while node.parent is not None:  # from the last call back to the first
        parent = steps[node.parent]
        node = nodes[parent.node]
        messages[:0] = [*node.messages, parent.message]
    return Transcript(messages, list(node.tools), tuple(indices), replies)


RESULTS = frozenset({"function_call_output"})
CALLS = frozenset({"function_call"})
OTHER_ROLES = frozenset({"system", "developer", "user", "tool"})
PLAIN_KEYS = frozenset({"role", "content"})
TEXT_KEYS = frozenset({"type", "text", "annotations", "logprobs"})
BLANK, NAMELESS = "[blank text]", "INVALID_TOOL_NAME"
"""What Strands keeps in place of an empty reply, and of an invalid tool name."""


class Utterance(NamedTuple):
    """A part of a reply: its text, its reasoning, or one tool call."""

    kind: str
    text: str
    """The text of a message, or the arguments of a call."""
    name: str = ""


class _UnknownFormError(Exception):
    pass


def was_sampled(reported: Sequence[Message], recorded: Sequence[Message], replies: Iterable[Message]) -> bool:
    """Returns whether all that `reported` says for the policy was sampled, in that order, up to the last recorded reply.

    Compared are texts, reasoning and tool calls. `recorded` is the recorded transcript, whose requests may hold assistant messages
    of the task, and `replies` are all replies in the order of the calls: a framework may have dropped some from either. After the
    last reply only results of tools may follow. Any form is understood that Strands, the OpenAI Agents SDK or Chat Completions has.
    """
    try:
        said, shown = list(_utterances(reported)), list(_utterances(recorded))
        ends_with_reply = _ends_with_reply(reported)
    except _UnknownFormError:
        return False
    if not ends_with_reply or bool(said) < bool(shown) or (said and not (shown and _same(said[-1], shown[-1]))):
        return False
    return _is_subsequence(said, shown) or _is_subsequence(said, list(_utterances(replies)))


def sampled_messages(messages: Iterable[Message], replies: Iterable[Message]) -> list[Message]:
    """Returns the assistant messages of a recorded transcript that the policy said; a request brought the others along.

    A reply may come back without its reasoning, or the spaces around its text.
    """
    said = {_spoken(reply) for reply in replies}
    return [message for message in messages if message.get("role") == "assistant" and _spoken(message) in said]


def _spoken(message: Message) -> tuple[Utterance, ...] | str:
    if message.keys() == PLAIN_KEYS and isinstance(message["content"], str):  # most are
        return tuple(_text(message["content"], "text"))
    try:
        return tuple(each for each in _utterances([message]) if each.kind != "thought")
    except _UnknownFormError:
        return json.dumps(message, sort_keys=True, default=str)


def _is_subsequence(said: Iterable[Utterance], known: Iterable[Utterance]) -> bool:
    rest = iter(known)
    return all(any(_same(each, other) for other in rest) for each in said)


def _same(said: Utterance, sampled: Utterance) -> bool:
    if said.kind != "call" or sampled.kind != "call":
        return said == sampled
    repaired = said.text == "{}" and not _is_json(sampled.text)  # Strands keeps `{}` for arguments that are no JSON
    return said.name in (sampled.name, NAMELESS) and (said.text == sampled.text or repaired)


def _ends_with_reply(messages: Sequence[Message]) -> bool:
    last = next((each for each in reversed(messages) if not _is_result(each)), None)
    return last is not None and _speaks(last)


def _is_result(message: Message) -> bool:
    content: Any = message.get("content")
    if message.get("role") == "tool" or message.get("type") in RESULTS:
        return True
    blocks = cast("list[Any]", content) if isinstance(content, list) else []
    return message.get("role") == "user" and bool(blocks) and all(isinstance(b, dict) and "toolResult" in b for b in blocks)


def _speaks(message: Message) -> bool:
    """Returns whether the message is the policy's."""
    kind, role = message.get("type", "message"), message.get("role")
    if role == "assistant" and kind == "message":
        return True
    if role is None and (kind in CALLS or kind == "reasoning"):
        return True
    if (role in OTHER_ROLES and kind == "message") or (role is None and kind in RESULTS):
        return False
    raise _UnknownFormError


def _utterances(messages: Iterable[Message]) -> Iterator[Utterance]:
    for message in messages:
        if not _speaks(message):
            continue
        if message.get("type") in CALLS:
            yield _call(message)
            continue
        for kind in ("reasoning_content", "summary", "content"):
            yield from _parts(message.get(kind), "thought" if kind != "content" or message.get("type") == "reasoning" else "text")
        for call in cast("list[dict[str, Any]]", message.get("tool_calls") or ()):
            yield _call(call.get("function") or {})


def _parts(content: Any, kind: str) -> Iterator[Utterance]:
    if content is None or isinstance(content, str):
        yield from _text(content or "", kind)
        return
    for block in cast("list[Any]", content) if isinstance(content, list) else [content]:
        if not isinstance(block, dict):
            raise _UnknownFormError
        part = cast("dict[str, Any]", block)
        if part.keys() == {"toolUse"}:
            yield _call({"name": part["toolUse"].get("name"), "arguments": part["toolUse"].get("input")})
        elif part.keys() == {"reasoningContent"}:
            yield from _text(part["reasoningContent"].get("reasoningText", {}).get("text", ""), "thought")
        elif "text" in part and part.keys() <= TEXT_KEYS:
            yield from _text(part["text"], kind)
        elif "refusal" in part and part.keys() <= {"type", "refusal"}:
            yield from _text(part["refusal"], kind)
        else:
            raise _UnknownFormError


def _text(text: Any, kind: str) -> Iterator[Utterance]:
    if not isinstance(text, str):
        raise _UnknownFormError
    if text.strip() not in ("", BLANK):
        yield Utterance(kind, text.strip())


def _call(function: dict[str, Any]) -> Utterance:
    arguments: Any = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return Utterance("call", json.dumps(json.loads(text), sort_keys=True) if _is_json(text) else text, str(function.get("name")))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
