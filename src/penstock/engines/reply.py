"""How the events of an engine's reply become tokens: every column as long as the ids, or the reply is not believed."""

from abc import ABC, abstractmethod
from typing import Any

import orjson

from penstock.engines.base import Sampled
from penstock.engines.wire import Fault, Kind
from penstock.records import Finish, Sampling

LOWEST, HIGHEST = -9999.0, 1e-3
"""A log-probability is between these: the first is vLLM's word for minus infinity, the second leaves room for rounding."""


def is_plain(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the plain softmax."""
    return sampling.temperature == 1.0 and not sampling.truncated


class ReplyReader(ABC):
    """Reads the events of one reply, all of it sampled under one policy version."""

    def __init__(self, prompt: list[int], sampling: Sampling, *, version: int) -> None:
        self.done = False
        self._prompt = prompt
        self._greedy, self._plain = sampling.temperature == 0.0, is_plain(sampling)
        self._version = version
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None

    def take(self, event: bytes) -> None:
        """Add an event; what follows the end of the reply is left out."""
        if self.done:
            return
        if event == b"[DONE]":
            raise Fault("ended without saying how the reply finished", kind="broken")
        try:
            parsed: dict[str, Any] = orjson.loads(event)
            if "error" in parsed:
                raise _reported(parsed["error"])
            self.read(parsed)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as cause:
            text = event[:100].decode("utf-8", "replace")
            raise Fault(f"sent an event that no reply has: {text}", kind="garbled") from cause

    def drain(self) -> Sampled | None:
        """All tokens since the last call."""
        if not self._ids and not self.done:
            return None
        ids, given, self._ids, self._logprobs = tuple(self._ids), tuple(self._logprobs), [], []
        return Sampled(
            ids=ids,
            logprobs=(0.0,) * len(ids) if self._greedy else given,
            full_logprobs=given if self._greedy or self._plain else (),
            versions=(self._version,) * len(ids),
            finish=self._finish,
        )

    @abstractmethod
    def read(self, event: dict[str, Any]) -> None:
        """Call `add` with what an event holds; a KeyError, TypeError or AttributeError says that it makes no sense."""

    def add(self, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        """Add tokens, and how the reply finished where `reason` says so."""
        if len(ids) != len(logprobs):
            raise Fault(f"sent {len(ids)} token ids with {len(logprobs)} log-probabilities", kind="garbled")
        if not all(type(i) is int and i >= 0 for i in ids):
            raise Fault(f"sent token ids that are none: {ids}", kind="garbled")
        if not all(LOWEST < x <= HIGHEST for x in logprobs):
            raise Fault(f"sent log-probabilities that are none ({logprobs}); see its --logprobs-mode", kind="garbled")
        if reason not in (None, "stop", "length"):
            raise Fault(f"broke the reply off ({reason})", kind="broken")
        self._ids += ids
        self._logprobs += logprobs
        self._finish, self.done = reason, reason is not None


def _reported(error: Any) -> Fault:
    """The fault that an error event within a stream stands for."""
    if isinstance(error, str):
        return Fault(f"reported an error: {error}", kind="broken")
    code = error.get("code") or 500
    kind: Kind = "busy" if code in (429, 503) else "refused" if 400 <= code < 500 else "broken"
    return Fault(f"reported an error: {error.get('message')}", kind=kind)
