"""What is asked of vLLM's `/v1/completions`, and how its events are read."""

from typing import Any, Literal, TypedDict

from penstock.engines.reply import ReplyReader
from penstock.engines.wire import Fault
from penstock.records import Sampling


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


class VllmReader(ReplyReader):
    """Reads the events of one completion."""

    def read(self, event: dict[str, Any]) -> None:
        """See `ReplyReader.read`."""
        choices: list[Choice] = event["choices"]
        for choice in choices:
            self._read(choice)

    def _read(self, choice: Choice) -> None:
        if "token_ids" not in choice:
            raise Fault("sent no token ids; its vLLM must know `return_token_ids`", kind="garbled")
        if choice.get("prompt_token_ids") not in (None, self._prompt):
            raise Fault("sampled after another prompt than it was given; is something between that rewrites it?", kind="garbled")
        scores = choice.get("logprobs")
        self.add(choice["token_ids"] or [], scores["token_logprobs"] if scores else [], choice.get("finish_reason"))
