"""Random conversations through the real gateway, and an independent record of what every prompt must be.

An agent, perhaps with a sub-agent, continues, repeats a call, branches, edits, compacts, is retried by its SDK, changes gateways.
The record does not use the gateway's graph: it maps messages, by meaning, to the exact ids that the engine saw and sampled.
"""

import asyncio
import json
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import orjson
from random_replies import ReplySampler, Sample

from penstock.gateway import Gateway
from penstock.gateway.graph import TEMPLATE_REWRITES, prompts
from penstock.records import RolloutRef, Sampling, Task, make_rollout
from penstock.testing import ScriptedEngine, ScriptedReply
from penstock.train.sequences import exactness

TOOL = {
    "type": "function",
    "function": {"name": "multiply", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
STRICT = ("gemma", "mistral v3")
"""Families that take users and assistants in turns only."""


@dataclass(frozen=True)
class KnownPath:
    """A recorded path of messages that ends with a reply."""

    ids: tuple[int, ...]
    last_id: int | None
    messages: list[dict[str, Any]]
    """With the reasoning that was sampled, whatever the agent sends back."""
    canonical: bool


@dataclass
class Agent:
    """One conversation of the rollout: the history as its agent sends it."""

    name: str
    tools: bool
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    last: bytes = b""
    """The last request."""


@dataclass
class GatewayPair:
    """Two gateways over one pool, with a scripted engine."""

    name: str
    gateways: tuple[Gateway, Gateway]
    engine: ScriptedEngine
    script: deque[Sample]
    pool: Any
    counts: Counter[str]
    rollouts: int = 0


class RandomConversation:
    """One rollout of random calls; every prompt is checked."""

    def __init__(self, pair: GatewayPair, random: Random) -> None:
        self.pair = pair
        self.random = random
        self.writer = ReplySampler(pair.name, random)
        self.renderer = self.writer.renderer
        self.known: dict[str, KnownPath] = {}
        self.nodes: set[str] = set()
        """Keys of the messages of every prompt."""
        self.replies: set[str] = set()
        self.prompts: list[tuple[int, ...]] = []
        self.gateway = pair.gateways[0]
        self.seen = 0
        """Steps recorded so far."""
        self.edits = 0
        self.answers: dict[tuple[str, bytes], tuple[bytes, Gateway]] = {}
        """By transcript and request: the last answer, and who gave it."""

    async def run(self) -> None:
        self.rollout, self.token = await _open(self.pair)
        agents = [self._agent(0), self._agent(1)] if self.random.random() < 0.4 else [self._agent(0)]
        for _ in range(self.random.randint(3, 9)):
            await self._move(self.random.choice(agents), agents)
        attempt = await self.pair.pool.rollout(self.rollout.id)
        exact = exactness(attempt)
        assert (exact.exact_tokens, exact.unhashed_tokens) == (exact.sampled_tokens, 0), exact
        assert list(prompts(attempt).values()) == self.prompts
        self.pair.counts["conversations"] += 1
        self.pair.counts["sampled tokens"] += exact.sampled_tokens

    def _agent(self, place: int) -> Agent:
        return Agent(f"agent-{place}", tools=self.random.random() < 0.6)

    async def _move(self, agent: Agent, agents: list[Agent]) -> None:
        luck = self.random.random()
        spoken = [place for place, message in enumerate(agent.history) if message["role"] == "assistant"]
        if luck < 0.08 and agent.last:
            return await self._retry(agent)
        if luck < 0.16 and agent.last:
            return await self._call(agent, orjson.loads(agent.last))
        if luck < 0.24 and spoken:
            agents.append(Agent(agent.name, agent.tools, agent.history[: self.random.choice(spoken) + 1]))
            agent = agents[-1]
        elif luck < 0.32 and spoken:
            self._edit(agent, self.random.choice(spoken))
        elif luck < 0.40 and spoken:
            self._compact(agent)
        elif luck < 0.43:
            self.gateway = self.pair.gateways[1]
        elif luck < 0.45 and spoken and agent.history[-1]["role"] == "assistant" and not agent.history[-1].get("tool_calls"):
            agent.tools = not agent.tools
        return await self._call(agent, self._body(agent))

    def _edit(self, agent: Agent, place: int) -> None:
        """Change what a reply said; where it called, with what."""
        self.edits += 1
        message = agent.history[place]
        if message.get("tool_calls"):
            calls = [dict(call) for call in message["tool_calls"]]
            calls[0]["function"] = {"name": "multiply", "arguments": json.dumps({"a": f"edited {self.edits}"})}
            agent.history[place] = message | {"tool_calls": calls}
        else:
            agent.history[place] = message | {"content": f"What the agent says it said, {self.edits}."}

    def _compact(self, agent: Agent) -> None:
        """Replace the history by a summary, perhaps with the last reply after it."""
        self.edits += 1
        last = agent.history[-1]
        head = [message for message in agent.history[:1] if message["role"] == "system"]
        keeps = last["role"] == "assistant" and not last.get("tool_calls") and self.random.random() < 0.5
        agent.history = [*head, {"role": "user", "content": f"Summary {self.edits}: all is well."}, *([last] if keeps else [])]
        if not keeps:
            agent.history = agent.history[:-1]
            agent.history.append({"role": "user", "content": f"Summary {self.edits}: go on from here."})

    def _body(self, agent: Agent) -> dict[str, Any]:
        history, new = agent.history, self._new(agent)
        choices = 2 if self.random.random() < 0.07 else 1
        body: dict[str, Any] = {"model": "any", "messages": self._as_sent([*history, *new]), "stream": self.random.random() < 0.3}
        return body | ({"tools": [TOOL]} if agent.tools else {}) | ({"n": 2} if choices == 2 else {})

    def _new(self, agent: Agent) -> list[dict[str, Any]]:
        """What the agent says next."""
        history, user = agent.history, {"role": "user", "content": self.writer.text()}
        if not history:
            system = {"role": "system", "content": self.writer.text()}
            opening = [user] if self.random.random() < 0.9 else [user, {"role": "user", "content": "And mind this."}]
            return [system, *opening] if self.random.random() < 0.4 else opening
        if history[-1]["role"] == "user":
            return []
        strict = self.pair.name in STRICT
        calls = history[-1].get("tool_calls")
        if calls:
            results = [{"role": "tool", "tool_call_id": call["id"], "content": self.writer.text()} for call in calls]
            return [*results, user] if not strict and self.random.random() < 0.2 else results
        if not strict and self.random.random() < 0.1:
            return [{"role": "system", "content": "Mind the time."}, user]
        return [user]

    def _as_sent(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The history as agents send it: the same in meaning, not in form."""
        form = self.random.choice(HISTORY_FORMS)
        return [form(message) for message in messages]

    async def _retry(self, agent: Agent) -> None:
        """What an SDK sends that did not get its answer: the same again, with a mark."""
        before, (reported, teller) = len(self.pair.engine.prompts), self.answers[agent.name, agent.last]
        status, answer = await _post(self.gateway, self.token, agent.last, agent.name, retry=True)
        assert status == 200
        assert len(self.pair.engine.prompts) == before
        if self.gateway is teller:
            assert answer == reported
        else:  # it has the replies from the pool, not how they were cut into events
            stream = orjson.loads(agent.last)["stream"]
            assert _messages(answer, stream=stream) == _messages(reported, stream=stream)
        self.pair.counts["retries"] += 1

    async def _call(self, agent: Agent, body: dict[str, Any]) -> None:
        samples = [self.writer.sample(tools=agent.tools) for _ in range(body.get("n", 1))]
        if "stop" not in body and "max_tokens" not in body:
            body |= self._limits(samples)
        self.pair.script.extend(samples)
        content = orjson.dumps(body)
        status, answer = await _post(self.gateway, self.token, content, agent.name)
        assert status == 200, (answer, body)
        made = self.pair.engine.prompts[-len(samples) :]
        self.prompts += made
        replies = _messages(answer, stream=body["stream"])
        steps = await self._steps(len(samples))
        may_cut, choices = bool({"stop", "max_tokens"} & body.keys()), list(range(len(samples)))
        for step, prompt in zip(steps, made, strict=True):
            self._check(body["messages"], agent.tools, prompt, step.node)
            size = len(step.completion_ids) if may_cut else None
            fits = [each for each in choices if step.completion_ids == samples[each].ids[:size]]
            choice = next(each for each in fits if _plain(replies[each]) == _plain(step.message))
            choices.remove(choice)
            sample = samples[choice]
            canonical = sample.canonical and step.completion_ids == sample.ids
            self._learn(body["messages"], agent.tools, prompt, step, canonical=canonical)
        agent.history = [*body["messages"], replies[self.random.randrange(len(replies))]]
        agent.last = content
        self.answers[agent.name, content] = (answer, self.gateway)

    def _limits(self, samples: list[Sample]) -> dict[str, Any]:
        """Now and then a stop string that some token completes in its midst, or a limit."""
        luck = self.random.random()
        text = self.writer.tokenizer.decode(samples[0].ids)
        if luck < 0.1 and text.strip():
            start = self.random.randrange(len(text))
            return {"stop": [text[start : start + self.random.randint(1, 4)]]}
        return {"max_tokens": self.random.randint(1, 20)} if luck < 0.15 else {}

    async def _steps(self, count: int) -> list[Any]:
        attempt = await self.pair.pool.rollout(self.rollout.id)
        steps = sorted(attempt.steps, key=lambda step: step.index)[self.seen :]
        self.nodes_by_id = {node.id: node for node in attempt.nodes}
        assert len(steps) == count
        self.seen += count
        self.pair.counts["steps"] += count
        return steps

    def _check(self, sent: list[dict[str, Any]], tools: bool, prompt: tuple[int, ...], node_id: int) -> None:
        """Compare a prompt with the record."""
        node, counts = self.nodes_by_id[node_id], self.pair.counts
        offered = [TOOL] if tools else []
        sizes = [size for size in range(len(sent), 0, -1) if key(sent[:size], tools) in self.known]
        foreign = [key([message], False) for message in sent[sizes[0] if sizes else 0 :] if message["role"] == "assistant"]
        if not sizes:
            assert node.parent is None
            assert prompt == self.renderer.root(sent, offered)
            returns = any(each in self.replies for each in foreign)
            replaces = any(key(sent[:size], tools) in self.nodes for size in range(1, len(sent)))
            assert (node.reason is not None) == (returns or replaces), node.reason
            counts[f"root: {node.reason or 'a conversation of its own'}"] += 1
        elif node.parent is None:
            assert prompt == self.renderer.root(sent, offered)
            assert node.reason == TEMPLATE_REWRITES or (foreign and node.reason), node.reason
            counts[f"root: {node.reason}"] += 1
        else:
            self._check_glue(self.known[key(sent[: sizes[0]], tools)], sent[sizes[0] :], offered, prompt)
            assert (node.reason is not None) == bool(foreign)
            counts[f"bridged: {node.reason or 'nothing broke'}"] += 1

    def _check_glue(self, path: KnownPath, new: list[dict[str, Any]], tools: list[Any], prompt: tuple[int, ...]) -> None:
        """The path's ids come first; the rest is what the whole conversation, rendered from scratch, ends with after the reply."""
        assert prompt[: len(path.ids)] == path.ids
        glue, whole = prompt[len(path.ids) :], self.renderer.root([*path.messages, *new], tools)
        end = self.writer.turn_end(calls=bool(path.messages[-1].get("tool_calls")))
        assert glue == whole[len(whole) - len(glue) :]
        if path.last_id == end:
            assert whole[-len(glue) - 1] == end != whole[-len(glue) - 2]
        else:
            assert glue[0] == end
        if path.canonical:
            self.pair.counts["bridged and equal to the whole rendering"] += 1
            assert prompt == whole

    def _learn(self, sent: list[dict[str, Any]], tools: bool, prompt: tuple[int, ...], step: Any, *, canonical: bool) -> None:
        node = self.nodes_by_id[step.node]
        size = next((n for n in range(len(sent), 0, -1) if key(sent[:n], tools) in self.known), 0) if node.parent is not None else 0
        before = self.known[key(sent[:size], tools)] if size else None
        messages = [*(before.messages if before else []), *sent[size:], step.message]
        self.known[key([*sent, step.message], tools)] = KnownPath(
            prompt + step.completion_ids,
            step.completion_ids[-1] if step.completion_ids else None,
            messages,
            canonical and (before is None or before.canonical) and "reasoning_content" not in str(sent),
        )
        self.nodes.add(key(sent, tools))
        self.replies.add(key([step.message], False))


def key(messages: list[dict[str, Any]], tools: bool) -> str:
    """What messages say: ids of calls, reasoning, and white space around replies do not count."""
    plain: list[Any] = [tools]
    for message in messages:
        calls = [[call["function"]["name"], _value(call["function"]["arguments"])] for call in message.get("tool_calls") or ()]
        content = message["content"] or ""
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        plain.append([message["role"], text.strip() if message["role"] == "assistant" else text, calls])
    return json.dumps(plain, sort_keys=True)


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _same(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _spoken(change: Any) -> Any:
    return lambda message: message | change(message) if message["role"] == "assistant" else message


def _new_ids(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("tool_call_id"):
        return message | {"tool_call_id": f"mine-{message['tool_call_id']}"}
    calls = message.get("tool_calls")
    return message | {"tool_calls": [call | {"id": f"mine-{call['id']}"} for call in calls]} if calls else message


def _reordered(message: dict[str, Any]) -> dict[str, Any]:
    def again(call: dict[str, Any]) -> dict[str, Any]:
        value = _value(call["function"]["arguments"])
        text = value if isinstance(value, str) else json.dumps(dict(reversed(value.items())), indent=1)
        return call | {"function": {**call["function"], "arguments": text}}

    calls = message.get("tool_calls")
    return message | {"tool_calls": [again(call) for call in calls]} if calls else message


HISTORY_FORMS = [
    _same,
    _spoken(
        lambda message: {
            "content": (message["content"] or "").strip() if isinstance(message["content"], str | None) else message["content"]
        }
    ),
    _spoken(
        lambda message: {"content": [{"type": "text", "text": message["content"]}]} if isinstance(message["content"], str) else {}
    ),
    _spoken(lambda message: {"name": "planner"}),
    lambda message: {name: value for name, value in message.items() if name != "reasoning_content"},
    _new_ids,
    _reordered,
]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value or name == "role"}


def _messages(answer: bytes, *, stream: bool) -> list[dict[str, Any]]:
    """The replies of an answer, by choice."""
    if not stream:
        return [choice["message"] for choice in orjson.loads(answer)["choices"]]
    found: dict[int, dict[str, Any]] = {}
    for line in answer.split(b"\n\n"):
        event = line.removeprefix(b"data: ")
        for choice in orjson.loads(event)["choices"] if event.startswith(b"{") else ():
            _add_delta(found.setdefault(choice["index"], {"role": "assistant", "content": ""}), choice["delta"])
    return [found[place] for place in sorted(found)]


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    if delta.get("reasoning_content"):
        message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
    for part in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}})
        calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


async def _open(pair: GatewayPair) -> tuple[RolloutRef, str]:
    task = Task(id=f"task-{pair.rollouts}", prompt=({"role": "user", "content": "?"},))
    rollout = make_rollout(f"train-{pair.rollouts}", task.id, 0)
    await pair.pool.open_group(task, [rollout], seq=pair.rollouts)
    pair.rollouts += 1
    return rollout, pair.gateways[0].open(rollout, Sampling(max_tokens=1024)).token


async def _post(gateway: Gateway, token: str, body: bytes, transcript: str, *, retry: bool = False) -> tuple[int, bytes]:
    """One call over ASGI, without a socket or a client library."""
    asked, done = asyncio.Event(), asyncio.Event()
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        if asked.is_set():
            await done.wait()
            return {"type": "http.disconnect"}
        asked.set()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = {
        "authorization": f"Bearer {token}",
        "host": "127.0.0.1",
        "content-type": "application/json",
        "x-sample-id": transcript,
    }
    headers |= {"x-stainless-retry-count": "1"} if retry else {}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await gateway.app(scope, receive, send)
    done.set()
    return status, b"".join(parts)


def scripted(sample: Sample) -> ScriptedReply:
    """For the engine."""
    return ScriptedReply(ids=sample.ids, finish=sample.finish)  # pyright: ignore[reportArgumentType]
