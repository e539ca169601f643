"""An evaluation in the platform's numbers. Pure."""

import statistics
from collections.abc import Sequence
from typing import Any

from penstock.config import EvalSection
from penstock.controller.api.progress import Seen, Tried
from penstock.evals.metrics import pass_at_k


def results(seen: Seen, section: EvalSection, *, dataset_rows: int | None, resumed: int | None) -> dict[str, Any]:
    """`results` of a list or a detail. An attempt that failed has reward 0, is graded, and does not pass."""
    tried = seen.ordered()
    stats = reward_stats(tried)
    spread = None if stats is None else stats | {"pass_at_k": {str(k): value for k, value in passes(tried, section).items()}}
    return {
        "score": stats and stats["mean"],
        "total_runs": len(tried),
        "sampled_rows": len(seen.rows),
        "total_dataset_rows": dataset_rows,
        **_counts(tried, section),
        "total_tokens": _tokens(tried),
        "resumed_count": resumed,
        "reward_stats": spread,
    }


def overview(seen: Seen, section: EvalSection, *, duration_ms: int | None) -> dict[str, Any]:
    """`overview` of the metrics."""
    tried = seen.ordered()
    return {
        "duration_ms": duration_ms,
        "total_samples": len(seen.rows) * section.samples,
        "completed_samples": len(tried),
        **_counts(tried, section),
        "tokens_used": _tokens(tried),
    }


def reward_stats(tried: Sequence[Tried]) -> dict[str, float] | None:
    """Over attempts; None before the first."""
    rewards = [each.reward for each in tried]
    if not rewards:
        return None
    return {
        "mean": statistics.fmean(rewards),
        "median": statistics.median(rewards),
        "std": statistics.pstdev(rewards),
        "min": min(rewards),
        "max": max(rewards),
    }


def passed(each: Tried, section: EvalSection) -> bool:
    """Whether the attempt's reward is high enough; one that failed has none."""
    return each.end == "completed" and each.reward >= section.passes


def passes(tried: Sequence[Tried], section: EvalSection) -> dict[int, float]:
    """pass@k, the mean over rows all of whose attempts have ended; unbiased."""
    rows: dict[int, list[bool]] = {}
    for each in tried:
        rows.setdefault(each.row, []).append(passed(each, section))
    whole = [row for row in rows.values() if len(row) == section.samples]
    return {k: statistics.fmean(pass_at_k(len(row), sum(row), k) for row in whole) for k in section.k if whole}


def _counts(tried: Sequence[Tried], section: EvalSection) -> dict[str, Any]:
    right = sum(passed(each, section) for each in tried)
    return {
        "graded": len(tried),
        "passed": right,
        "failed": len(tried) - right,
        "skipped": 0,
        "pass_rate": right / len(tried) if tried else None,
        "pass_threshold": section.passes,
    }


def _tokens(tried: Sequence[Tried]) -> int:
    return sum(each.prompt_tokens + each.sampled_tokens for each in tried)
