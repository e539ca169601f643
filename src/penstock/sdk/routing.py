"""Threads that code of a rollout starts belong to that rollout: its context goes with the work, into pools and new threads alike.

asyncio hands its context to tasks and to `to_thread`, but Python hands none to `threading.Thread`, `ThreadPoolExecutor.submit` or
`run_in_executor`. A call made there would lose its rollout, or, in a pooled thread, be taken for another's.
"""

import contextvars
import re
import reprlib
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from penstock.errors import ConfigError
from penstock.records import Sampling
from penstock.sdk.samples import RolloutSample

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from penstock.sdk.clients import Clients


def propagate_contexts_to_threads() -> None:
    """From now on, threads and thread pools of this process run their work in the context of whoever asked for it."""
    if threading.Thread.start.__module__ != __name__:
        setattr(threading.Thread, "start", _carrying_start(threading.Thread.start))  # noqa: B010
        setattr(ThreadPoolExecutor, "submit", _carrying_submit(ThreadPoolExecutor.submit))  # noqa: B010


def _carrying_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def carrying(self: threading.Thread) -> None:
        run, context = self.run, copy_context()

        def inside() -> None:
            vars(self).pop("run", None)  # what is put over the class's own below, so that the thread does not hold itself
            context.run(run)

        self.run = inside
        start(self)

    return carrying


def _carrying_submit(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def carrying(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # The pool's own threads, which outlive this work, start in an empty context: they belong to nobody.
        return Context().run(submit, self, copy_context().run, fn, *args, **kwargs)

    return carrying


MAIN = "main"
"""The transcript of an agent that names none."""
NAME = re.compile(r"[!-~]([ -~]{0,198}[!-~])?")
"""Of a transcript: it must come through a header as it is."""

_active: contextvars.ContextVar["RolloutContext | None"] = contextvars.ContextVar("penstock_rollout", default=None)


class SampleSource(Protocol):
    """An agent or session that can tell its conversation, in its framework's own form."""

    async def get_sample(self, name: str) -> RolloutSample:
        """What was said so far; `name` is what it was registered as."""
        ...


@dataclass(kw_only=True)
class RolloutContext:
    """A context manager: inside it, model calls belong to this rollout, in child tasks and in threads too. Contexts nest."""

    base_url: str
    """Of the gateway's OpenAI routes, ending in `/v1`."""
    api_key: str = field(repr=False)
    """The rollout's model token: opens model routes, nothing else."""
    rollout_id: str = ""
    group_id: str = ""
    """Of all attempts at the same task."""
    channel: str = "train"
    flow_token: str = field(default="", repr=False)
    """Lets a flow submit, grade and complete this rollout; empty for agents that may not."""
    sampling: Sampling | None = None
    """What holds for calls that do not say otherwise; None where it is not known here."""
    sample_sources: dict[str, SampleSource] = field(default_factory=dict[str, SampleSource])
    """By transcript, in the order in which they were registered."""
    direct_calls: set[str] = field(default_factory=set[str])
    """Providers that were called directly, past the gateway."""
    clients: "Clients | None" = field(default=None, repr=False)
    """Connections shared with other rollouts; None opens new ones."""
    _tokens: list[contextvars.Token["RolloutContext | None"]] = field(default_factory=list[Any], repr=False)

    def __enter__(self) -> Self:
        pass

        propagate_contexts_to_threads()
        watch_direct_calls()
        self._tokens.append(_active.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _active.reset(self._tokens.pop())

    def headers(self, transcript: str = MAIN) -> dict[str, str]:
        """Headers that say which transcript of which rollout a call belongs to."""
        if not NAME.fullmatch(transcript):
            what = f"{reprlib.repr(transcript)} cannot name a transcript"
            raise ValueError(f"{what}; use up to 200 printable ASCII characters, no space around them")
        return {"x-rollout-id": self.rollout_id, "x-sample-id": transcript}

    def openai(self, transcript: str = MAIN) -> "AsyncOpenAI":
        """An `openai` client whose calls are recorded in this rollout, as `transcript`."""
        from penstock.sdk.clients import openai_client

        return openai_client(self, transcript)

    def anthropic(self, transcript: str = MAIN) -> "AsyncAnthropic":
        """An `anthropic` client whose calls are recorded in this rollout, as `transcript`."""
        from penstock.sdk.clients import anthropic_client

        return anthropic_client(self, transcript)

    def register_sample_source(self, name: str, source: SampleSource) -> None:
        """Let `source` tell transcript `name` to the grader; a name can be used once."""
        if name in self.sample_sources:
            raise ValueError(f"sample {name!r} is registered already; give each agent or session of a rollout a name of its own")
        self.sample_sources[name] = source

    def set_sample_source(self, source: SampleSource) -> None:
        """The same for a rollout that holds one conversation."""
        self.register_sample_source(MAIN, source)

    async def get_samples(self) -> dict[str, RolloutSample]:
        """What each source tells, in the order in which they were registered."""
        return {name: await source.get_sample(name) for name, source in self.sample_sources.items()}


def get_rollout_context() -> RolloutContext | None:
    """The context of the rollout that this code runs in; None outside of one."""
    return _active.get()


@contextmanager
def outside_rollouts() -> Generator[None]:
    """Inside it, no rollout is running: for a grader, which must not hold the agent's key."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def running_rollout(what: str) -> RolloutContext:
    """The context of the running rollout; ConfigError says that `what` needs one."""
    context = get_rollout_context()
    if context is None:
        raise ConfigError(f"{what} works inside a rollout only; run the workflow with `penstock train`")
    return context


PROVIDERS = (
    "anthropic.com",
    "cohere.com",
    "deepseek.com",
    "fireworks.ai",
    "generativelanguage.googleapis.com",
    "groq.com",
    "mistral.ai",
    "openai.azure.com",
    "openai.com",
    "openrouter.ai",
    "perplexity.ai",
    "together.xyz",
    "x.ai",
)
"""Whose hosts, or subdomains, serve models; Amazon's are told by `bedrock` in the name."""


@cache
def watch_direct_calls() -> None:
    """Note on the running rollout's context each provider whose address is looked up. Python offers no way to stop watching."""
    sys.addaudithook(_noticed)


def is_provider(host: str) -> bool:
    """Whether models are served there."""
    name = host.lower().rstrip(".")
    amazon = name.startswith("bedrock") and name.endswith(".amazonaws.com")
    return amazon or any(name == known or name.endswith(f".{known}") for known in PROVIDERS)


def _noticed(event: str, args: tuple[Any, ...]) -> None:
    if event != "socket.getaddrinfo":
        return
    host: str = args[0].decode("ascii", "replace") if isinstance(args[0], bytes) else str(args[0])
    context = get_rollout_context()
    if context is not None and is_provider(host):
        context.direct_calls.add(host)
