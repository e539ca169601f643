"""The page on asynchronous training: its settings load, its names exist."""

import re
from pathlib import Path

from penstock.config import load_config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/async.md").read_text()


def test_its_settings_load(tmp_path: Path) -> None:
    (sample,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.toml").write_text(f'{sample}[dataset]\ntrain = "tasks.jsonl"\n')
    config = load_config(tmp_path / "train.toml")
    assert (config.rollout.max_staleness, config.train.eval_every, config.train.importance_cap) == (4, 8, 2.0)


def test_every_test_that_it_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    known = {name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) >= 8 and named - known == set()


def test_every_metric_that_it_names_is_written() -> None:
    told = (ROOT / "src/penstock/train/loop.py").read_text() + (ROOT / "src/penstock/train/held_out.py").read_text()
    told += (ROOT / "src/penstock/train/learner.py").read_text()
    table = PAGE.split("## What is measured")[1].split("## ")[0]
    named = [name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == 10 and [name for name in named if name not in told] == []
