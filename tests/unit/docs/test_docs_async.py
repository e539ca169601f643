"""The page on asynchronous training: its settings load, its names exist."""

import re
from pathlib import Path

from penstock.config import load_config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/train.md").read_text().partition("## Asynchronous training")[2].partition("\n## ")[0]


def test_its_settings_load(tmp_path: Path) -> None:
    (sample,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.toml").write_text(f'{sample}[dataset]\ntrain = "tasks.jsonl"\n')
    config = load_config(tmp_path / "train.toml")
    assert (config.rollout.max_staleness, config.train.eval_every, config.train.importance_cap) == (4, 8, 2.0)


def test_every_metric_that_it_names_is_written() -> None:
    reported = (ROOT / "src/penstock/train/loop.py").read_text() + (ROOT / "src/penstock/train/evaluation.py").read_text()
    reported += (ROOT / "src/penstock/train/learner.py").read_text() + (ROOT / "src/penstock/train/metrics.py").read_text()
    reported += (ROOT / "src/penstock/train/loop.py").read_text()
    named = [name for row in re.findall(r"(?m)^\| (`.*?) \|", PAGE) for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == 10 and [name for name in named if name not in reported] == []
