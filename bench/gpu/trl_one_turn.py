# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
"""TRL's GRPO on the task of `one_turn.py`, with vLLM in the same process: `trl_one_turn.py MODEL_FOLDER TASKS STEPS SEED BESIDE`.

BESIDE is 1 if other programs use the GPU meanwhile, else 0. Prints a line of JSON: when training began, and for each step its
reward and end, in seconds since 1970.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset  # pyright: ignore
from transformers import TrainerCallback  # pyright: ignore
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.one_turn import EXAMPLES, SYSTEM, is_call

CACHE_BYTES = 6 << 30


class StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())


def fix_cache_size() -> None:
    """vLLM would measure free memory, and fail if another program frees some meanwhile."""
    import vllm

    plain = vllm.LLM.__init__

    def opened(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{"kv_cache_memory_bytes": CACHE_BYTES, **options})

    vllm.LLM.__init__ = opened


def main(folder: str, tasks: str, steps: str, seed: str, beside: str) -> None:
    if int(beside):
        fix_cache_size()
    rows: list[dict[str, Any]] = []
    for line in Path(tasks).read_text().splitlines():
        question = json.loads(line)["user_prompt"]
        a, b = map(int, re.findall(r"\d+", question))
        rows.append({"prompt": [SYSTEM, *EXAMPLES, {"role": "user", "content": question}], "a": a, "b": b})

    def reward(completions: list[Any], a: list[int], b: list[int], **_: Any) -> list[float]:
        return [is_call(one[0]["content"], x, y) for one, x, y in zip(completions, a, b, strict=True)]

    settings: Any = GRPOConfig(
        output_dir=f"/tmp/trl-one-turn-{seed}",
        seed=int(seed),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=48,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        max_steps=int(steps),
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=True,
        gradient_checkpointing=False,
        loss_type="dapo",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1 if int(beside) else 0.2,
    )
    clock = StepClock()
    trainer: Any = GRPOTrainer(folder, reward_funcs=reward, args=settings, train_dataset=Dataset.from_list(rows), callbacks=[clock])
    started = time.time()
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("RESULT " + json.dumps({"begun": started, "rewards": rewards, "ends": clock.ends}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
