"""What is asked of vLLM's `/v1/completions`, and how the events of its reply become tokens."""

from typing import Any, Literal, NotRequired, TypedDict

import orjson

from penstock.engines.base import Sampled
from penstock.engines.wire import Fault, Kind
from penstock.records import Finish, Sampling

LOWEST, HIGHEST = -9999.0, 1e-3
"""A log-probability is between these: the first is vLLM's word for minus infinity, the second leaves room for rounding."""


class Scores(TypedDict):
    """Of a choice's tokens, among much else."""

    token_logprobs: list[float]


class Choice(TypedDict, total=False):
    """What one event adds to the reply."""

    token_ids: list[int] | None
    logprobs: Scores | None
    prompt_token_ids: list[int] | None
    """In the first event: the prompt as the server saw it."""
    finish_reason: Literal["stop", "length"] | None


class ErrorBody(TypedDict, total=False):
    """An error that came after the reply had begun."""

    message: str
    code: int | None


class Chunk(TypedDict):
    """One event."""

    choices: list[Choice]
    error: NotRequired[ErrorBody | str]


def request_body(model: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """What vLLM is asked for. Nothing is left to the server's own defaults, which come from the model's generation config."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "logprobs": 0,
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
    }
    return body if sampling.seed is None else body | {"seed": sampling.seed}


def is_plain(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the plain softmax."""
    return sampling.temperature == 1.0 and not sampling.truncated


class ReplyReader:
    """Reads the events of one reply; every column of a chunk is as long as its ids, or the reply is not believed."""

    def __init__(self, prompt: list[int], sampling: Sampling, *, processed: bool, version: int) -> None:
        self.done = False
        self._prompt = prompt
        self._greedy, self._plain = sampling.temperature == 0.0, is_plain(sampling)
        self._processed = processed
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
            chunk: Chunk = orjson.loads(event)
            if "error" in chunk:
                raise _reported(chunk["error"])
            for choice in chunk["choices"]:
                self._add(choice)
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

    def _add(self, choice: Choice) -> None:
        if "token_ids" not in choice:
            raise Fault("sent no token ids; its vLLM must know `return_token_ids`", kind="garbled")
        if choice.get("prompt_token_ids") not in (None, self._prompt):
            raise Fault("sampled after another prompt than it was given; is something between that rewrites it?", kind="garbled")
        ids = choice["token_ids"] or []
        scores = choice.get("logprobs")
        logprobs = scores["token_logprobs"] if scores else []
        if len(ids) != len(logprobs):
            raise Fault(f"sent {len(ids)} token ids with {len(logprobs)} log-probabilities", kind="garbled")
        if not all(type(i) is int and i >= 0 for i in ids):
            raise Fault(f"sent token ids that are none: {ids}", kind="garbled")
        if not all(LOWEST < x <= HIGHEST for x in logprobs):
            raise Fault(f"sent log-probabilities that are none ({logprobs}); see its --logprobs-mode", kind="garbled")
        reason = choice.get("finish_reason")
        if reason not in (None, "stop", "length"):
            raise Fault(f"broke the reply off ({reason})", kind="broken")
        self._ids += ids
        self._logprobs += logprobs
        self._finish, self.done = reason, reason is not None


def _reported(error: ErrorBody | str) -> Fault:
    """The fault that an error event within a stream stands for."""
    if isinstance(error, str):
        return Fault(f"reported an error: {error}", kind="broken")
    code = error.get("code") or 500
    kind: Kind = "busy" if code in (429, 503) else "refused" if 400 <= code < 500 else "broken"
    return Fault(f"reported an error: {error.get('message')}", kind=kind)
