"""From a dataset row to a better policy, with every part real: the tiny policy learns its tool in seconds."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load_config
from penstock.train.inputs import read_inputs
from penstock.train.run import train
from penstock.train.summary import Summary

HERE = Path(__file__).parent / "tiny_run"


def silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


def run(folder: Path, *overrides: str, stop: asyncio.Event | None = None) -> Summary:
    config = load_config(HERE / "train.toml", [f'run.folder="{folder}"', *overrides])

    async def training() -> Summary:
        return await train(config, read_inputs(config, silent), listener=silent, stop=stop or asyncio.Event())

    return asyncio.run(training())


def rewards(folder: Path, name: str = "tiny") -> list[float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [reward for line in lines for reward in json.loads(line)["rewards"]]


@pytest.mark.slow
def test_mean_reward_rises_from_below_0_4_to_above_0_8(tmp_path: Path) -> None:
    summary = run(tmp_path)
    seen = rewards(tmp_path)
    first, last = sum(seen[:256]) / 256, sum(seen[-256:]) / 256
    print(f"mean reward over 256 rollouts: first {first:.3f}, last {last:.3f}, {summary.steps} updates")
    assert summary.steps <= 60 and summary.exact_token_rate == 1.0
    assert sum(seen[:64]) / 64 < 0.4 and last > 0.8
    assert set(summary.ends) == {"completed"}
