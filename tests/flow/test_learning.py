"""From a dataset row to a better policy, with every part real: the tiny policy learns its tool in seconds."""

import asyncio
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


@pytest.mark.slow
def test_mean_reward_over_256_rollouts_rises_from_below_0_4_to_above_0_8(tmp_path: Path) -> None:
    rows = (HERE / "tasks.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "eval.jsonl").write_text("".join((rows * 7)[:256]))
    settings = (f'dataset.eval="{tmp_path / "eval.jsonl"}"', "dataset.eval_limit=256", "sampling.eval_temperature=1.0")
    summary = run(tmp_path, *settings)
    print(f"mean reward over 256 rollouts: {summary.eval_before} before, {summary.eval_after} after {summary.steps} updates")
    assert summary.steps <= 60 and summary.exact_token_rate == 1.0
    assert summary.eval_before is not None and summary.eval_before < 0.4
    assert summary.eval_after is not None and summary.eval_after > 0.8
    assert set(summary.ends) == {"completed"}
