"""A workspace in which everything is right, with the smallest policy there is."""

import shutil
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples" / "multiply"
EXPERIMENT: dict[str, Any] = {"rollout": "multiply", "entrypoint": "main.py", "model_path": "tiny", "dataset": "multiply"}
WORKFLOW: dict[str, Any] = {"max_tokens": 30, "show_examples": False}
EVAL = """
[experiment]
rollout = "multiply"
entrypoint = "main.py"
model_path = "tiny"
dataset = "multiply"
[evaluation]
limit = 3
[secrets]
required = []
[workflow]
max_tokens = 30
show_examples = false
"""
TRAIN = EVAL.replace("[evaluation]\nlimit = 3", "[training]\nrollout_batch_size = 2\nn_samples_per_prompt = 2")


def tables(**more: Any) -> dict[str, Any]:
    """Those of a file that is right, with others."""
    return {"experiment": EXPERIMENT, **more}


def made_workspace(folder: Path) -> Path:
    """`folder` as a workspace with the rollout `multiply`."""
    for name in ("rollouts/multiply", "configs/eval", "configs/training", "data"):
        (folder / name).mkdir(parents=True)
    shutil.copy(EXAMPLE / "agent.py", folder / "rollouts/multiply/main.py")
    shutil.copy(EXAMPLE / "tiny_tasks.jsonl", folder / "data/multiply.jsonl")
    (folder / "configs/eval/multiply.toml").write_text(EVAL)
    (folder / "configs/training/multiply.toml").write_text(TRAIN)
    return folder
