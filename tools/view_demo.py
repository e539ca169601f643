"""Makes the recordings of `penstock view --demo`: the tiny policy learns to multiply, and is evaluated three times.

`python tools/view_demo.py` (a minute or two); then take the pictures anew with tools/view_screenshots.py.
"""

import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHIVE = ROOT / "src" / "penstock" / "view" / "demo.tar.xz"
CONFIG = """
[run]
name = "multiply"
[model]
name = "tiny"
[agent]
entry = "view_demo_agent.py"
[dataset]
train = "tiny_tasks.jsonl"
eval = "tiny_heldout.jsonl"
[sampling]
max_tokens = 30
eval_temperature = 1.0
[rollout]
group_size = 8
groups_per_step = 4
[train]
steps = 12
lr = 4e-4
advantage = "dr_grpo"
eval_every = 4
checkpoint_every = 6
[eval]
samples = 4
k = [1, 4]
"""
LEFT_OUT = (
    "model.safetensors", "optimizer.state", "state.json", "code.json", "task_rewards.json", "pool.db-shm", "pool.db-wal",
    "report.html", ".checksums.json", ".lock", ".processes",
)  # fmt: skip
"""What the dashboard does not read."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as made:
        folder = Path(made)
        for name in ("tiny_tasks.jsonl", "tiny_heldout.jsonl"):
            shutil.copy(ROOT / "examples" / "multiply" / name, folder)
        shutil.copy(ROOT / "tools" / "view_demo_agent.py", folder)
        (folder / "demo.toml").write_text(CONFIG)
        run(folder, "train", "demo.toml")
        for name, more in {
            "start": [],
            "trained": ["--model", "runs/multiply/checkpoints/000012"],
            "short": ["--set", "sampling.max_tokens=8"],
        }.items():
            run(folder, "eval", "run", "demo.toml", "--name", name, *more)
        pack(folder / "runs")


def run(folder: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "penstock", *arguments, "--plain"], cwd=folder, env=environment, check=True)


def pack(runs: Path) -> None:
    files = [path for path in sorted(runs.rglob("*")) if path.is_file() and not path.name.endswith(LEFT_OUT)]
    with lzma.open(ARCHIVE, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files:
            name = path.relative_to(runs)
            if "checkpoints" in name.parts and "000012" not in name.parts:
                continue
            archive.add(path, str(name), filter=ownerless)


def ownerless(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
