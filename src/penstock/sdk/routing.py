"""The context of the running rollout: where its model calls go, in its tasks and threads, and which calls bypassed the gateway.

asyncio passes its context on to tasks and to `to_thread`, but Python passes none to `threading.Thread`,
`ThreadPoolExecutor.submit` or `run_in_executor`. A call made there would lose its rollout or, in a pooled thread, be recorded in
another one. So both are patched when the first rollout is entered.
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
from penstock.system.sandbox import Confinement

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from penstock.sdk.clients import Clients


PLACEHOLDER_MODEL = "openai/osmosis-rollout"
"""The policy's name in integrations, as Osmosis has it: whichever model the run samples with or trains."""
REQUEST_MODEL = PLACEHOLDER_MODEL.removeprefix("openai/")
"""The same in requests: the prefix names the kind of client, and is not sent."""
PLACEHOLDER_NAMES = (PLACEHOLDER_MODEL, REQUEST_MODEL)
MAIN = "main"
"""The transcript of an agent that names none."""
NAME = re.compile(r"[!-~]([ -~]{0,198}[!-~])?")
"""What may name a transcript: the name is sent as a header."""

_active: contextvars.ContextVar["RolloutContext | None"] = contextvars.ContextVar("penstock_rollout", default=None)


class SampleSource(Protocol):
    """An agent or session that can report its conversation, in its framework's own form."""

    async def get_sample(self, name: str) -> RolloutSample:
        """Returns the conversation so far; `name` is the name that it was registered under."""
        ...


@dataclass(kw_only=True)
class RolloutContext:
    """A context manager: inside it, model calls belong to this rollout, in child tasks and in threads too. Contexts nest."""

    base_url: str
    """The address of the gateway's OpenAI routes, ending in `/v1`."""
    api_key: str = field(repr=False)
    """The rollout's model token: opens model routes, nothing else."""
    rollout_id: str = ""
    group_id: str = ""
    """Shared by all attempts at the same task."""
    channel: str = "train"
    flow_token: str = field(default="", repr=False)
    """Lets a flow submit, grade and complete this rollout; empty for untrusted agents."""
    sampling: Sampling | None = None
    """The defaults of calls that set no sampling of their own; None if unknown here."""
    sample_sources: dict[str, SampleSource] = field(default_factory=dict[str, SampleSource])
    """By transcript, in the order in which they were registered."""
    direct_calls: set[str] = field(default_factory=set[str])
    """Hosts of model providers that were called directly, past the gateway."""
    clients: "Clients | None" = field(default=None, repr=False)
    """Connections shared with other rollouts; None opens new ones."""
    confinement: Confinement | None = field(default=None, repr=False)
    """The sandbox for programs that are started for this rollout; None starts them without one."""
    _tokens: list[contextvars.Token["RolloutContext | None"]] = field(default_factory=list[Any], repr=False)

    def __enter__(self) -> Self:
        propagate_contexts_to_threads()
        watch_direct_calls()
        self._tokens.append(_active.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _active.reset(self._tokens.pop())

    def headers(self, transcript: str = MAIN) -> dict[str, str]:
        """Returns the headers that assign a call to a transcript of this rollout."""
        if not NAME.fullmatch(transcript):
            problem = f"{reprlib.repr(transcript)} cannot name a transcript"
            raise ValueError(f"{problem}; use up to 200 printable ASCII characters, no space around them")
        return {"x-rollout-id": self.rollout_id, "x-sample-id": transcript}

    def openai(self, transcript: str = MAIN) -> "AsyncOpenAI":
        """Returns an `openai` client whose calls are recorded as `transcript` of this rollout."""
        from penstock.sdk.clients import openai_client

        return openai_client(self, transcript)

    def anthropic(self, transcript: str = MAIN) -> "AsyncAnthropic":
        """Returns an `anthropic` client whose calls are recorded as `transcript` of this rollout."""
        from penstock.sdk.clients import anthropic_client

        return anthropic_client(self, transcript)

    def register_sample_source(self, name: str, source: SampleSource) -> None:
        """Makes `source` report transcript `name` to the grader; a name can be used once."""
        if name in self.sample_sources:
            raise ValueError(f"sample {name!r} is registered already; give each agent or session of a rollout its own name")
        self.sample_sources[name] = source

    def set_sample_source(self, source: SampleSource) -> None:
        """As `register_sample_source`, for a rollout with one conversation."""
        self.register_sample_source(MAIN, source)

    async def get_samples(self) -> dict[str, RolloutSample]:
        """Returns the sample of each source, in the order in which they were registered."""
        return {name: await source.get_sample(name) for name, source in self.sample_sources.items()}


def get_rollout_context() -> RolloutContext | None:
    """Returns the context of the rollout that this code runs in, or None."""
    return _active.get()


@contextmanager
def outside_rollouts() -> Generator[None]:
    """Hides the running rollout inside it: a grader must not have the agent's key."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def running_rollout(what: str) -> RolloutContext:
    """Returns the context of the running rollout; ConfigError says that `what` needs one."""
    context = get_rollout_context()
    if context is None:
        raise ConfigError(f"{what} works inside a rollout only; run the workflow with `penstock train`")
    return context


# Detection of direct calls

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
"""Hosts that serve models, with their subdomains; see `is_provider` for Amazon's."""


@cache
def watch_direct_calls() -> None:
    """Adds each model provider whose address is looked up to the running rollout's `direct_calls`."""
    sys.addaudithook(_audit_hook)  # cannot be removed again; hence the cache


def is_provider(host: str) -> bool:
    """Returns whether `host` serves models of a known provider."""
    name = host.lower().rstrip(".")
    amazon = name.startswith("bedrock") and name.endswith(".amazonaws.com")
    return amazon or any(name == known or name.endswith(f".{known}") for known in PROVIDERS)


def _audit_hook(event: str, args: tuple[Any, ...]) -> None:
    if event != "socket.getaddrinfo":
        return
    host: str = args[0].decode("ascii", "replace") if isinstance(args[0], bytes) else str(args[0])
    context = get_rollout_context()
    if context is not None and is_provider(host):
        context.direct_calls.add(host)


# Context propagation to threads


def propagate_contexts_to_threads() -> None:
    """Patches threads and thread pools of this process to run their work in the context of the code that started it."""
    if threading.Thread.start.__module__ != __name__:
        setattr(threading.Thread, "start", _start_in_context(threading.Thread.start))  # noqa: B010
        setattr(ThreadPoolExecutor, "submit", _submit_in_context(ThreadPoolExecutor.submit))  # noqa: B010


def _start_in_context(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def patched(self: threading.Thread) -> None:
        run, context = self.run, copy_context()

        def run_in_context() -> None:
            vars(self).pop("run", None)  # set below; removed so that the thread does not reference itself
            context.run(run)

        self.run = run_in_context
        start(self)

    return patched


def _submit_in_context(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def patched(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # `submit` may start a thread of the pool, which outlives this work: it starts in an empty context, not in this rollout's.
        return Context().run(submit, self, copy_context().run, fn, *args, **kwargs)

    return patched
