"""Promotion: `promoted/` in the run folder is the last policy that is established to be better than the one promoted before it."""

import asyncio
import shutil
from pathlib import Path

import orjson

from penstock.engines.checkpoint_files import OPTIMIZER, STATE
from penstock.errors import TrainError
from penstock.train import policy
from penstock.train.held_out import compare_with_before
from penstock.train.sequential_test import SequentialResult
from penstock.train.training_run import TrainingRun

PROMOTED, RECORD = "promoted", "promotion.json"


async def promote_if_better(run: TrainingRun, evaluation: str, version: int) -> None:
    """Promote the checkpoint of `version`, which was evaluated, if the test says so. Done twice, it changes nothing."""
    result, target = compare_with_before(run, evaluation), run.folder.path / PROMOTED
    if result is None or not result.better or promoted_version(run.folder.path) == version:
        return
    checkpoint = policy.find(run.folder.checkpoints, version)
    if checkpoint is None:
        raise TrainError(f"version {version} is better and cannot be promoted: {run.folder.checkpoints} does not hold it any more")
    await asyncio.to_thread(_copy, checkpoint, target, result, version)
    gain = f"{result.difference:+.3f} against {result.against}, evidence {result.evidence:,.0f}, needed {result.needed:,.0f}"
    run.events.emit("notice", text=f"version {version} is better than before at 95 % ({gain}) and is promoted: {target}")


def promoted_version(run: Path) -> int | None:
    """Returns which version `promoted/` of a run folder holds; None if there is none."""
    record = run / PROMOTED / RECORD
    return orjson.loads(record.read_bytes())["version"] if record.exists() else None


def _copy(checkpoint: Path, target: Path, result: SequentialResult, version: int) -> None:
    """Copy the model folder, without the optimizer's state, then put it in place."""
    part, old = target.with_suffix(policy.PART), target.with_suffix(".old")
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, part, ignore=shutil.ignore_patterns(OPTIMIZER, STATE))
        (part / RECORD).write_bytes(orjson.dumps({"version": version, **result._asdict()}, option=orjson.OPT_INDENT_2))
        if target.exists():
            target.rename(old)
        part.rename(target)
    except OSError as cause:
        raise TrainError(f"version {version} could not be promoted to {target}: {cause}; the same command tries again") from cause
    shutil.rmtree(old, ignore_errors=True)
