"""The report of an evaluation as one HTML page: numbers, histograms, tasks, and chosen transcripts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config import EvalSection
from penstock.evals.metrics import Estimate
from penstock.evals.outcome import EvalOutcome, StoredEvaluation, TaskScores, open_evaluation, outcome, score_tasks
from penstock.evals.spending import Latency
from penstock.graders.rubric import read_verdict_file
from penstock.pool.base import Pool
from penstock.records import End
from penstock.reports.html import TranscriptPick, config_section, document, histogram, number, table, tiles, transcript
from penstock.system.files import write_file

TRANSCRIPTS_EACH = 3
"""Transcripts shown of the best rollouts, of the worst, and of each failed end."""
MAX_TASKS = 1000
"""Tasks listed; the others are only counted."""


async def write_eval_page(folder: Path) -> Path:
    """Writes `report.html` into the evaluation's folder and returns its path."""
    async with open_evaluation(folder) as found:
        page = await render_eval_page(found, folder / "artifacts")
    return write_file(folder / "report.html", page.encode("utf-8", "replace"))


async def render_eval_page(found: StoredEvaluation, artifacts: Path | None = None) -> str:
    """Returns the page. `artifacts` holds a folder per rollout, with the judge's verdict."""
    section = EvalSection.model_validate(found.config.get("eval", {}))
    scored = await score_tasks(found.groups())
    result = outcome(scored, section, prices=found.prices, seconds=found.seconds)
    picked = await choose_transcripts(scored, found.pool)
    name, model = found.config["run"]["name"], found.config["model"]["name"]
    body = f"""{_tiles(result)}
<h2>Mean reward of each task</h2>
{histogram([each.mean for each in scored], what="tasks", of="mean reward", low=0.0, high=1.0)}
<details><summary>Every task</summary><div class="wide">{_tasks(scored)}</div></details>
{_components(result)}<h2>How long rollouts took</h2>
{histogram(list(found.seconds.values()), what="rollouts", of="time in seconds", low=0.0, high=0.0)}
<h2>How rollouts ended</h2>
{table(["end", "rollouts"], result.ends.items())}
{table(["", "rollouts", "commonest reason"], [(kind, each.count, each.reason) for kind, each in result.shortfalls.items()])}
{_reasons(result)}
{_notices(found)}<h2>Transcripts</h2>
{"".join(transcript(replace(pick, note=_note(artifacts, pick))) for pick in picked)}
{config_section(found.config, "evaluation")}"""
    status = found.summary.get("status", "not finished")
    return document(name, f"{model} · {result.tasks} tasks x {result.samples} · {status}", body)


async def choose_transcripts(scored: Sequence[TaskScores], pool: Pool) -> list[TranscriptPick]:
    """Returns the worst and best rollouts, and some of each failed end, without duplicates."""
    attempts = [each for task in scored for each in task.attempts]
    graded = sorted((each for each in attempts if each.end is End.COMPLETED), key=lambda each: each.reward)
    chosen = [("worst", each) for each in graded[:TRANSCRIPTS_EACH]] + [("best", each) for each in graded[::-1][:TRANSCRIPTS_EACH]]
    for end in sorted({str(each.end) for each in attempts if each.end is not End.COMPLETED}):
        chosen += [("failed", each) for each in attempts if each.end == end][:TRANSCRIPTS_EACH]
    reasons: dict[str, str] = {}
    for why, each in chosen:
        reasons.setdefault(each.usage.rollout_id, why)
    return [TranscriptPick(why=why, task=await pool.task(name), attempt=await pool.attempt(name)) for name, why in reasons.items()]


def _tiles(result: EvalOutcome) -> str:
    named = [_between("reward", result.reward), *(_between(f"pass@{k}", value) for k, value in result.passes.items())]
    spent = result.spent
    named += [("rollouts", f"{result.rollouts:,}"), ("model calls", f"{spent.steps:,}")]
    named += [("tokens sampled", f"{spent.completion_tokens:,}"), ("tokens read", f"{spent.prompt_tokens:,}")]
    named += [("cost", "-" if spent.cost is None else f"{spent.cost:.4g}")]
    named += [("call, p50 / p95", _latency(spent.call_s)), ("rollout, p50 / p95", _latency(spent.rollout_s))]
    return tiles(named)


def _components(result: EvalOutcome) -> str:
    rows = [(name, number(each.value), f"{each.low:.3f} to {each.high:.3f}") for name, each in result.components.items()]
    return f"<h2>Parts of the reward</h2>\n{table(['part', 'mean', '95 %'], rows)}\n" if rows else ""


def _latency(seconds: Latency | None) -> str:
    return "-" if seconds is None else f"{seconds.p50:.3g} / {seconds.p95:.3g} s"


def _note(artifacts: Path | None, pick: TranscriptPick) -> str:
    verdict = read_verdict_file(artifacts / pick.attempt.rollout.id) if artifacts else None
    return verdict.explanation if verdict else ""


def _between(name: str, value: Estimate | None) -> tuple[str, str]:
    return (name, "-") if value is None else (f"{name} ({value.low:.2f} to {value.high:.2f})", f"{value.value:.3f}")


def _tasks(scored: Sequence[TaskScores]) -> str:
    rows = [
        (each.row, each.task_id, number(each.mean), " ".join(number(reward) for reward in each.rewards))
        for each in scored[:MAX_TASKS]
    ]
    beyond = f'<p class="dim">and {len(scored) - MAX_TASKS:,} more</p>' if len(scored) > MAX_TASKS else ""
    return table(["row", "task", "mean", "rewards"], rows) + beyond


def _notices(found: StoredEvaluation) -> str:
    rows: dict[str, int] = found.summary.get("notices") or {}
    return f"<h2>What was not done as agents asked</h2>\n{table(['what', 'calls'], rows.items())}\n" if rows else ""


def _reasons(result: EvalOutcome) -> str:
    rows = [(end, count, message[:300]) for end, messages in result.reasons.items() for message, count in messages.items()]
    return table(["end", "rollouts", "message"], rows) if rows else ""
