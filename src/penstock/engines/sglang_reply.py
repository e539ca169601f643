"""What is asked of SGLang's `/generate`, and how its events are read."""

from typing import Any

from penstock.engines.reply import ReplyReader
from penstock.engines.wire import Fault
from penstock.records import Sampling


def request_body(prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
    """What SGLang is asked for. Nothing is left to the server's own defaults."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {"rid": key, "input_ids": prompt, "sampling_params": params, "stream": True, "return_logprob": True}


class SglangReader(ReplyReader):
    """Reads the events of one reply. Each holds all tokens so far, or, as the server was started, those since the last one."""

    def __init__(self, prompt: list[int], sampling: Sampling, *, version: int, label: str | None) -> None:
        super().__init__(prompt, sampling, version=version)
        self._label = label
        """What the server must call its weights; None where it was never given any."""
        self._count = 0

    def read(self, event: dict[str, Any]) -> None:
        """See `ReplyReader.read`."""
        meta: dict[str, Any] = event["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise Fault(f"broke the reply off ({reason.get('message', 'abort')})", kind="broken")
        if self._label is not None and meta["weight_version"] != self._label:
            raise Fault(
                f"sampled with weights that it calls {meta['weight_version']!r}, not with those it was given", kind="broken"
            )
        if meta["prompt_tokens"] != len(self._prompt):
            raise Fault("sampled after another prompt than it was given; is something between that rewrites it?", kind="garbled")
        total: int = meta["completion_tokens"]
        scored: list[tuple[float, int, Any]] = meta["output_token_logprobs"]
        fresh = total - self._count
        if fresh < 0 or len(scored) not in (total, fresh):
            raise Fault(f"sent {len(scored)} log-probabilities with {total} tokens, {fresh} of them new", kind="garbled")
        self._count = total
        scored = scored[len(scored) - fresh :]
        self.add([one[1] for one in scored], [one[0] for one in scored], None if reason is None else reason["type"])
