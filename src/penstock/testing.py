"""Test doubles for users and for our own tests: a scripted engine, a small tokenizer, a gateway without a socket, made-up records.

engine = ScriptedEngine(["Hello!", ScriptedReply("never said", busy=True)], renderer.tokenizer)
async with workbench(engine, renderer) as bench:
    session = await bench.rollout()
    client = bench.openai(session)
    answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])
    attempt = await bench.attempt(session)  # every step, as it was recorded

group = make_group(make_rollout_record(0, reward=1.0), make_rollout_record(1, reward=0.0))  # for a test of an advantage
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from penstock.chat.renderer import Renderer
from penstock.chat.tokenizer import BYTE_OF, Tokenizer
from penstock.engines.base import SampledChunk
from penstock.errors import ConfigError, EngineBusy, EngineError
from penstock.gateway import Gateway, GatewayLimits, ServedPolicy, Session
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.rows import PictureStore
from penstock.records import End, Finish, Grade, Group, Node, Rollout, RolloutRef, Sampling, Step, Task, make_rollout
from penstock.records import Sequence as TrainingSequence

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from openai import AsyncOpenAI

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template without tools, as small instruct models have it."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """One reply of a ScriptedEngine: its tokens, and how it fails."""

    text: str = ""
    """Encoded, and ended with the tokenizer's first end-of-text id; unused if `ids` is given."""
    ids: Sequence[int] | None = None
    """Sampled as they are. A stop id among them ends the reply."""
    finish: Finish = "stop"
    """The finish reason after the last token, unless a stop id or `max_tokens` came first."""
    busy: bool = False
    """Raise EngineBusy."""
    fail_after: int | None = None
    """Raise EngineError after this many tokens."""
    stall_after: int | None = None
    """Wait for `engine.release` after this many tokens; `engine.stalled` is set meanwhile."""
    cut_after: int | None = None
    """End without a finish reason after this many tokens."""


Reply = ScriptedReply | str | Sequence[int]
Script = Iterable[Reply] | Callable[[tuple[int, ...]], Reply]
"""Replies in the order of requests, or a function of the prompt's ids."""


@dataclass
class ScriptedEngine:
    """An `Engine` with scripted replies. Log-probabilities are made up, equal for the same token at the same position."""

    script: Script
    tokenizer: Tokenizer
    model: str = "scripted"
    context_length: int = 1 << 20
    version: int = 0
    chunk: int = 1
    """Tokens in one chunk."""
    prompts: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """The prompt ids of every request, in order."""
    samplings: list[Sampling] = field(default_factory=list[Sampling])
    """The sampling settings of every request, in order."""
    running: int = 0
    cancelled: int = 0
    """Requests that were closed before their end."""
    stalling: int = 0
    """Requests that wait for `release`."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request runs."""
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while some request waits for `release`."""

    def __post_init__(self) -> None:
        self._next = self.script if callable(self.script) else _in_order(self.script)
        self._released = asyncio.Event()
        self._changed = asyncio.Event()
        self._count()

    def release(self) -> None:
        """Let stalled requests continue, and stall none from now on."""
        self._released.set()

    async def until_stalling(self, count: int) -> None:
        """Wait until this many requests wait for `release`."""
        while self.stalling != count:
            self._changed.clear()
            await self._changed.wait()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        prompt = tuple(prompt_ids)
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        reply = self._reply(self._next(prompt))
        if reply.busy:
            raise EngineBusy("the scripted engine is busy")
        if len(prompt) >= self.context_length:
            raise EngineError(f"a prompt of {len(prompt)} tokens does not fit into {self.context_length}")
        self._count(running=1)
        finished = False
        try:
            async for chunk in self._sample(reply, sampling):
                finished = chunk.finish is not None
                yield chunk
        finally:
            self.cancelled += not finished
            self._count(running=-1)

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        change()
        self.version = version

    async def load(self, version: int, folder: Path) -> None:
        self.version = version

    async def close(self) -> None: ...

    def _reply(self, reply: Reply) -> ScriptedReply:
        scripted = (
            reply
            if isinstance(reply, ScriptedReply)
            else ScriptedReply(reply)
            if isinstance(reply, str)
            else ScriptedReply(ids=reply)
        )
        if scripted.ids is not None:
            return scripted
        ids = [*self.tokenizer.encode(scripted.text), *self.tokenizer.eos_ids[:1]]
        return replace(scripted, ids=ids)

    async def _sample(self, reply: ScriptedReply, sampling: Sampling) -> AsyncGenerator[SampledChunk, None]:
        ids, finish = _limit(reply.ids or (), sampling, reply.finish)
        tempered = sampling.temperature != 1.0 or sampling.truncated
        for start in range(0, max(len(ids), 1), self.chunk):
            tokens: list[tuple[int, float, float, int]] = []
            for index, token_id in enumerate(ids[start : start + self.chunk], start):
                await self._stall_or_fail(reply, index)
                if reply.cut_after == index:
                    return
                full = -((token_id * 7919 + index * 104_729) % 4096 + 1) / 1024
                tokens.append((token_id, full / 2 if tempered else full, full, self.version))
            is_last = start + self.chunk >= len(ids)
            columns = [tuple(column) for column in zip(*tokens, strict=True)] or [()] * 4
            yield SampledChunk(*columns, finish=finish if is_last else None)  # pyright: ignore[reportArgumentType]
            await asyncio.sleep(0)
        await self._stall_or_fail(reply, len(ids))

    async def _stall_or_fail(self, reply: ScriptedReply, index: int) -> None:
        if reply.stall_after == index:
            self._count(stalling=1)
            try:
                await self._released.wait()
            finally:
                self._count(stalling=-1)
        if reply.fail_after == index:
            raise EngineError(f"the scripted engine failed after {index} tokens")

    def _count(self, *, running: int = 0, stalling: int = 0) -> None:
        self.running += running
        self.stalling += stalling
        self._changed.set()
        for event, is_set in ((self.idle, self.running == 0), (self.stalled, self.stalling > 0)):
            event.set() if is_set else event.clear()


@dataclass(frozen=True, slots=True)
class GatewayFixture:
    """A gateway with a pool, and clients for it."""

    gateway: Gateway
    pool: Pool
    serves: bool
    _clients: AsyncExitStack

    async def rollout(self, name: str = "train-0", *, sampling: Sampling | None = None) -> Session:
        """A new rollout in its own group, opened on the gateway."""
        task = Task(id=f"task-{name}", prompt=({"role": "user", "content": "?"},))
        rollout = make_rollout(name, task.id, 0)
        await self.pool.open_group(task, [rollout], seq=0)
        return self.reopen(rollout, sampling=sampling)

    def reopen(self, rollout: RolloutRef, *, sampling: Sampling | None = None) -> Session:
        """A session for a rollout that is in the pool."""
        return self.gateway.open(rollout, sampling or Sampling(max_tokens=1024))

    async def attempt(self, session: Session) -> Rollout:
        """Everything recorded for the rollout."""
        return await self.pool.rollout(session.rollout_id)

    def http(self, token: str = "") -> "AsyncClient":
        """A plain HTTP client with this token, closed with the workbench; without a socket, answers arrive whole."""
        try:
            from httpx2 import ASGITransport, AsyncClient
        except ImportError as cause:
            raise ConfigError("the workbench needs the `httpx2` package: pip install httpx2") from cause
        transport = None if self.serves else ASGITransport(app=self.gateway.app)  # pyright: ignore[reportArgumentType]
        headers = {"authorization": f"Bearer {token}"} if token else {}
        base_url = self.gateway.base_url.removesuffix("/v1")
        client = AsyncClient(transport=transport, base_url=base_url, headers=headers, timeout=60, trust_env=False)
        self._clients.push_async_callback(client.aclose)
        return client

    def openai(self, session: Session, transcript: str = "main") -> "AsyncOpenAI":
        """An `openai` client whose calls are recorded in this rollout."""
        from openai import AsyncOpenAI

        headers = {"x-sample-id": transcript}
        return AsyncOpenAI(
            api_key=session.token, base_url=session.base_url, http_client=self.http(), default_headers=headers, max_retries=0
        )


# Names that users' tests imported before the classes were renamed.
Scripted, Workbench = ScriptedReply, GatewayFixture


@asynccontextmanager
async def workbench(
    engine: Any,
    renderer: Renderer | None,
    *,
    pool: Pool | None = None,
    serves: bool = False,
    sampling: dict[str, Sampling] | None = None,
    limits: GatewayLimits | None = None,
    secrets: Sequence[str] = (),
    is_open: bool = False,
    sessions: bool = False,
    policies: Mapping[str, ServedPolicy] | None = None,
    pictures: Path | None = None,
) -> AsyncGenerator[GatewayFixture, None]:
    """A gateway in front of `engine`: over ASGI alone, or on a free port with `serves`. By default the pool is a new one in memory.

    With `is_open` it requires no tokens, with `sessions` the session key works. A text endpoint needs no renderer. Pictures that
    the engine's model sees are kept in the folder `pictures`.
    """
    async with AsyncExitStack() as stack:
        if pool is None:
            pool = memory_pool()
            stack.push_async_callback(pool.close)
        secret = b"a secret for tests only"
        gateway = Gateway(
            engine,
            renderer,
            pool,
            secret=secret,
            sampling=sampling,
            limits=limits,
            secrets=secrets,
            is_open=is_open,
            sessions=sessions,
            policies=policies,
            pictures=pictures and PictureStore(pictures),
        )
        if serves:
            await stack.enter_async_context(gateway)
        clients = await stack.enter_async_context(AsyncExitStack())
        yield GatewayFixture(gateway, pool, serves, clients)


# Records


def make_task(content: str = "?", **fields: Any) -> Task:
    """A task with one user message."""
    plain: dict[str, Any] = {"id": "t", "prompt": ({"role": "user", "content": content},)}
    return Task(**{**plain, **fields})


def make_node(rollout_id: str = "train-0.0.1", number: int = 0, ids: Iterable[int] = (1,), **fields: Any) -> Node:
    """A node that adds the token ids `ids`; without a `parent` it is a root."""
    plain: dict[str, Any] = {"parent": None, "token_ids": tuple(ids), "messages_digest": f"n{number}", "messages": ()}
    return Node(rollout_id=rollout_id, id=number, **{**plain, **fields})


def make_step(
    rollout_id: str = "train-0.0.1", index: int = 0, ids: Iterable[int] = (1,), *, version: int = 0, **fields: Any
) -> Step:
    """A step that sampled `ids` under one policy version, on the node of the same number."""
    sampled = tuple(ids)
    plain: dict[str, Any] = {
        "node": index,
        "transcript": "main",
        "completion_ids": sampled,
        "logprobs": (-0.5,) * len(sampled),
        "versions": (version,) * len(sampled),
        "sampling": Sampling(),
        "finish": "stop",
        "message": {"role": "assistant", "content": ""},
        "messages_digest": f"s{index}",
    }
    return Step(rollout_id=rollout_id, index=index, **{**plain, **fields})


def make_rollout_record(
    place: int = 0,
    *,
    reward: float | None = 1.0,
    group_id: str = "train-0",
    nodes: Iterable[Node] = (),
    steps: Iterable[Step] = (),
    **fields: Any,
) -> Rollout:
    """A completed rollout with this reward; without a reward it failed with an agent error."""
    ref = make_rollout(group_id, "t", place)
    grades = () if reward is None else (Grade(rollout_id=ref.id, reward=reward, source="test"),)
    plain: dict[str, Any] = {"ref": ref, "end": End.AGENT_ERROR if reward is None else End.COMPLETED, "grades": grades}
    plain |= {"nodes": tuple(nodes), "steps": tuple(steps)}
    return Rollout(**{**plain, **fields})


def make_group(*rollouts: Rollout, **fields: Any) -> Group:
    """A group of these rollouts."""
    plain: dict[str, Any] = {"id": "train-0", "seq": 0, "task": Task(id="t", prompt=()), "channel": "train", "rollouts": rollouts}
    return Group(**{**plain, **fields})


def make_sequence(ids: Sequence[int], trained: int = 1, *, advantage: float = 1.0, **fields: Any) -> TrainingSequence:
    """A training sequence whose last `trained` tokens are trained; the log-probability of a token is minus its position."""
    flags = tuple(place >= len(ids) - trained for place in range(len(ids)))
    plain: dict[str, Any] = {
        "rollout_id": "r",
        "group_id": "g",
        "token_ids": tuple(ids),
        "trained": flags,
        "logprobs": tuple(-float(place) if flag else 0.0 for place, flag in enumerate(flags)),
        "temperatures": (1.0,) * len(ids),
        "advantages": tuple(advantage if flag else 0.0 for flag in flags),
        "weight": 0.5,
    }
    return TrainingSequence(**{**plain, **fields})


# Files

AGENT = """from penstock import AgentWorkflow, Grader


class Short(AgentWorkflow):
    async def run(self, ctx):
        print("an agent may print")
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=4)


class Even(Grader):
    async def grade(self, ctx):
        return float(len(ctx.sample.messages[-1]["content"] or "") % 2)
"""
"""An agent that makes one short call, and its grader."""


def write_project(
    folder: Path,
    *,
    agent: str = AGENT,
    tasks: int | Iterable[Mapping[str, Any]] = 4,
    config: str = 'dataset.train = "tasks.jsonl"\n',
    name: str = "train.toml",
) -> Path:
    """Write `agent.py`, `tasks.jsonl` and a config file; `tasks` are rows, or how many to make up."""
    rows = [{"prompt": f"{n} times 3?", "metadata": {"n": n}} for n in range(tasks)] if isinstance(tasks, int) else tasks
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(agent)
    (folder / "tasks.jsonl").write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    (folder / name).write_text(config)
    return folder


def memory_pool() -> Pool:
    """A new, empty pool in memory."""
    return POOLS.load("memory")(Path())


def write_tokenizer(folder: Path, *, corpus: Iterable[str] = (), vocab_size: int = 512, template: str = CHATML) -> Path:
    """Write a byte-level tokenizer and a chat template into `folder`; with a corpus, merges are trained on it.

    Without merges every byte is a token, so any text has one tokenization; with them most texts have many.
    """
    core = HfTokenizer(models.BPE({char: index for index, char in enumerate(sorted(BYTE_OF))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if corpus:
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=sorted(BYTE_OF), show_progress=False)
        core.train_from_iterator(corpus, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    return folder


def _in_order(replies: Iterable[Reply]) -> Callable[[tuple[int, ...]], Reply]:
    rest = iter(replies)

    def next_reply(_: tuple[int, ...]) -> Reply:
        try:
            return next(rest)
        except StopIteration:
            raise EngineError("the script has no more replies; write one for each request") from None

    return next_reply


def _limit(ids: Sequence[int], sampling: Sampling, finish: Finish) -> tuple[Sequence[int], Finish]:
    """The part of `ids` that may be sampled, and the finish reason."""
    end = next((index + 1 for index, token_id in enumerate(ids) if token_id in sampling.stop_ids), None)
    if end is not None and end <= sampling.max_tokens:
        return ids[:end], "stop"
    return (ids[: sampling.max_tokens], "length") if len(ids) >= sampling.max_tokens else (ids, finish)
