"""vLLM in a process of its own, asked over its standard input: as a program, `python -m bench.gpu.vllm_peer FOLDER`.

It works offline, without a server: the fastest way that vLLM has.
"""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from penstock.engines.embedded.decoder import DecoderShape

MEMORY_SHARE = 0.25
"""Of the GPU's memory, which must be free when vLLM starts."""
TIMEOUT_S = 240
CACHE_BYTES = 24 << 30
"""Of keys and values: more than enough for every row. Without it, vLLM would measure free memory, and fail if others free some."""


class VllmPeer:
    """The caller's side."""

    def __init__(self, child: "subprocess.Popen[str]", log: IO[str]) -> None:
        self._child, self._log, self._version = child, log, ""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Generator["VllmPeer | None"]:
        """Start vLLM with the model in `folder`, with random weights if it holds none; None where vLLM is not installed.

        It starts meanwhile: `wait` before use.
        """
        if importlib.util.find_spec("vllm") is None:
            print("vLLM is not installed here: no comparison", flush=True)
            yield None
            return
        command = [sys.executable, "-m", "bench.gpu.vllm_peer", str(folder)]
        with tempfile.TemporaryFile("w+") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
            try:
                yield cls(child, log)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # its own children hold the GPU's memory
                child.wait()

    def wait(self) -> str:
        """Wait until it has started; returns its version."""
        if not self._version:
            self._version = self._answer()
        return self._version

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, *, logprobs: bool = True) -> float:
        """Sample `tokens` per prompt; returns the seconds that it took there."""
        assert self._child.stdin is not None
        print(json.dumps([prompts, tokens, logprobs]), file=self._child.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        """Raises ValueError with the end of its log if there is none."""
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], TIMEOUT_S)
        if ready and (line := self._child.stdout.readline().strip()):
            return line
        self._log.seek(0)
        raise ValueError(f"vLLM {'ended' if ready else f'has not answered for {TIMEOUT_S} s'}:\n{self._log.read()[-3000:]}")


def write_config(folder: Path, shape: DecoderShape) -> None:
    """A model folder of Qwen3's kind without weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its log to both
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        load_format="auto" if list(folder.glob("*.safetensors")) else "dummy",
        gpu_memory_utilization=MEMORY_SHARE,
        kv_cache_memory_bytes=CACHE_BYTES,
        max_model_len=2048,
        max_num_seqs=1024,
    )
    print(vllm.__version__, file=answers, flush=True)
    for line in sys.stdin:
        prompts, tokens, logprobs = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0 if logprobs else None
        )
        started = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        spent = time.perf_counter() - started
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        print(spent, file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
