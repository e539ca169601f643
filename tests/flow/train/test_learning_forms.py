"""The multiply example learns in each of its forms, with every part real but the size of the policy."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load_config
from penstock.run.inputs import read_inputs
from penstock.train.trainer import train

EXAMPLE = Path(__file__).parents[3] / "examples" / "multiply"


def silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry", ["agent.py", *(pytest.param(entry, marks=pytest.mark.soak) for entry in ("strands_agent.py", "openai_agent.py"))]
)
def test_held_out_reward_rises_to_0_9(tmp_path: Path, entry: str) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text((EXAMPLE / "tiny_heldout.jsonl").read_text() * 16)
    settings = (f'run.folder="{tmp_path}"', f"agent.entry={entry}", f'dataset.eval="{heldout}"', "dataset.eval_limit=128")
    config = load_config(EXAMPLE / "tiny.toml", settings)
    assert config.sampling.eval_temperature == 1.0

    async def training() -> Any:
        return await train(config, read_inputs(config, silent), listener=silent, stop=asyncio.Event())

    summary = asyncio.run(training())
    print(f"{entry}: {summary.eval_before} before, {summary.eval_after} after {summary.steps} updates")
    assert summary.eval_before < 0.5
    assert summary.eval_after >= 0.9
    assert (summary.exact_token_rate, set(summary.ends), summary.breaks) == (1.0, {"completed"}, {})
