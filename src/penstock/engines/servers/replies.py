"""Replies of servers that take token ids, read event by event."""

from abc import ABC, abstractmethod
from typing import Any

import orjson

from penstock.engines.base import SampledChunk
from penstock.http.client import ErrorKind, UpstreamError
from penstock.records import Finish, Sampling, TokenLogprobs

MIN_LOGPROB, MAX_LOGPROB = -9999.0, 1e-3
"""Bounds of a valid log-probability: vLLM sends -9999 for minus infinity, and rounding may lift 0 a little."""


def is_plain(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the plain softmax."""
    return sampling.temperature == 1.0 and not sampling.truncated and not sampling.biased


class ReplyReader(ABC):
    """Reads the events of one reply, all of it sampled under one policy version; see `EventReader`.

    A reply is refused as garbled unless every token has an id and a valid log-probability.
    """

    def __init__(self, prompt: list[int], sampling: Sampling, *, version: int, behaviour_known: bool = True) -> None:
        self.done = False
        self._prompt = prompt
        self._greedy, self._plain = sampling.temperature == 0.0, is_plain(sampling)
        self._behaviour_known = behaviour_known
        self._tells_plain = self._greedy or self._plain or not behaviour_known
        """Whether the server's log-probabilities are of the plain softmax."""
        self.wanted = sampling.top_logprobs if self._tells_plain else 0
        """How many of the most likely tokens are read with each."""
        self._likely: list[TokenLogprobs] = []
        self.version = version
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None

    def feed(self, event: bytes) -> None:
        """Add an event. Events after the end of the reply are ignored."""
        if self.done:
            return
        if event == b"[DONE]":
            raise UpstreamError("ended without saying how the reply finished", kind="broken")
        try:
            parsed: dict[str, Any] = orjson.loads(event)
            if "error" in parsed:
                raise _reported_error(parsed["error"])
            self.read(parsed)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as cause:
            text = event[:100].decode("utf-8", "replace")
            raise UpstreamError(f"sent an event that no reply has: {text}", kind="garbled") from cause

    def take_chunk(self) -> SampledChunk | None:
        """Return all tokens since the last call."""
        if not self._ids and not self.done:
            return None
        ids, logprobs, self._ids, self._logprobs = tuple(self._ids), tuple(self._logprobs), [], []
        likely, self._likely = tuple(self._likely), []
        return SampledChunk(
            ids=ids,
            # A greedy token had no alternative; what the server sent for it is under the plain softmax.
            logprobs=(0.0,) * len(ids) if self._greedy else logprobs,
            full_logprobs=logprobs if self._tells_plain else (),
            versions=(self.version,) * len(ids),
            finish=self._finish,
            behaviour_known=self._behaviour_known,
            most_likely=likely,
        )

    @abstractmethod
    def read(self, event: dict[str, Any]) -> None:
        """Call `add` with what an event holds. A KeyError, TypeError or AttributeError marks the event as garbled."""

    def add(self, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        """Add tokens, and the finish reason if the reply has ended."""
        if len(ids) != len(logprobs):
            raise UpstreamError(f"sent {len(ids)} token ids with {len(logprobs)} log-probabilities", kind="garbled")
        if not all(type(i) is int and i >= 0 for i in ids):
            raise UpstreamError(f"sent token ids that are none: {ids}", kind="garbled")
        if not all(MIN_LOGPROB < x <= MAX_LOGPROB for x in logprobs):
            raise UpstreamError(f"sent log-probabilities that are none ({logprobs}); see its --logprobs-mode", kind="garbled")
        if reason not in (None, "stop", "length"):
            raise UpstreamError(f"broke the reply off ({reason})", kind="broken")
        self._ids += ids
        self._logprobs += logprobs
        self._finish, self.done = reason, reason is not None

    def add_likely(self, places: list[list[tuple[int, float]]]) -> None:
        """Add the most likely tokens in the place of each of the last ones."""
        ranked = [sorted(each, key=lambda token: token[1], reverse=True) for each in places]
        self._likely += [tuple(each[: self.wanted]) for each in ranked]
        if len(self._likely) != len(self._ids):
            raise UpstreamError(f"sent the most likely tokens of {len(places)} places of others", kind="garbled")


def _reported_error(error: Any) -> UpstreamError:
    """The error that an error event in a stream stands for."""
    if isinstance(error, str):
        return UpstreamError(f"reported an error: {error}", kind="broken")
    code = error.get("code") or 500
    kind: ErrorKind = "busy" if code in (429, 503) else "refused" if 400 <= code < 500 else "broken"
    return UpstreamError(f"reported an error: {error.get('message')}", kind=kind, status=code if type(code) is int else 0)
