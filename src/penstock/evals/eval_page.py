"""An evaluation as one HTML page: its numbers, how rewards are spread, every task, and the transcripts worth reading."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from penstock.config import EvalSection
from penstock.evals.html import Pick, config_part, document, number, table, tiles, transcript
from penstock.evals.metrics import Estimate
from penstock.evals.outcome import Outcome, Scores, ended, outcome, reward_of, scores
from penstock.evals.stored import Stored, read_evaluation
from penstock.records import End, Group

SHOWN = 3
"""Best and worst rollouts with their transcripts, and failed ones of each end."""
BARS, WIDTH, HEIGHT, FOOT = 20, 760, 180, 24


async def write_eval_page(folder: Path) -> Path:
    """Write `report.html` into the evaluation's folder and return its path."""
    found = await read_evaluation(folder)
    path, draft = folder / "report.html", folder / "report.html.new"
    draft.write_text(render_eval_page(found), encoding="utf-8", errors="replace")
    return draft.replace(path)


def render_eval_page(found: Stored) -> str:
    """The whole document."""
    section = EvalSection.model_validate(found.config.get("eval", {}))
    result, scored = outcome(found.groups, section), scores(found.groups)
    name, model = found.config["run"]["name"], found.config["model"]["name"]
    body = f"""{_tiles(result)}
<h2>Mean reward of each task</h2>
{_histogram([each.mean for each in scored])}
<details><summary>Every task</summary><div class="wide">{_tasks(scored)}</div></details>
<h2>How rollouts ended</h2>
{table(["end", "rollouts"], result.ends.items())}
{_reasons(result)}
<h2>Transcripts</h2>
{"".join(transcript(pick) for pick in picks(found.groups))}
{config_part(found.config, "evaluation")}"""
    status = found.summary.get("status", "not finished")
    return document(name, f"{model} · {result.tasks} tasks x {result.samples} · {status}", body)


def picks(groups: Sequence[Group]) -> list[Pick]:
    """The worst, the best, and some of each way to fail; each once."""
    tried = [(group.task, attempt) for group in groups for attempt in ended(group)]
    graded = sorted((each for each in tried if each[1].end is End.COMPLETED), key=lambda each: reward_of(each[1]))
    chosen = [("worst", each) for each in graded[:SHOWN]] + [("best", each) for each in graded[::-1][:SHOWN]]
    for end in sorted({str(attempt.end) for _, attempt in tried if attempt.end is not End.COMPLETED}):
        chosen += [("failed", each) for each in tried if each[1].end == end][:SHOWN]
    found: dict[str, Pick] = {}
    for why, (task, attempt) in chosen:
        found.setdefault(attempt.rollout.id, Pick(why=why, task=task, attempt=attempt))
    return list(found.values())


def _tiles(result: Outcome) -> str:
    named = [_between("reward", result.reward), *(_between(f"pass@{k}", value) for k, value in result.passes.items())]
    named += [("rollouts", f"{result.rollouts:,}"), ("model calls", f"{result.steps:,}")]
    named += [("tokens sampled", f"{result.sampled_tokens:,}"), ("median call", f"{number(result.call_seconds)} s")]
    return tiles(named)


def _between(name: str, value: Estimate | None) -> tuple[str, str]:
    return (name, "-") if value is None else (f"{name} ({value.low:.2f} to {value.high:.2f})", f"{value.value:.3f}")


def _tasks(scored: Sequence[Scores]) -> str:
    rows = [(each.row, each.task_id, number(each.mean), " ".join(number(reward) for reward in each.rewards)) for each in scored]
    return table(["row", "task", "mean", "rewards"], rows)


def _reasons(result: Outcome) -> str:
    rows = [(end, count, message[:300]) for end, messages in result.reasons.items() for message, count in messages.items()]
    return table(["end", "rollouts", "message"], rows) if rows else ""


def _histogram(means: Sequence[float]) -> str:
    """How many tasks have which mean reward, as inline SVG with a tooltip for each bar."""
    low, high = min(0.0, *means), max(1.0, *means)
    width, counts = (high - low) / BARS, [0] * BARS
    for mean in means:
        counts[min(BARS - 1, int((mean - low) / width))] += 1
    most, step, bars = max(counts), WIDTH / BARS, list[str]()
    for place, count in enumerate(counts):
        tall = (HEIGHT - FOOT - 10) * count / most
        said = f"{count} tasks with a mean reward from {low + place * width:.3g} to {low + (place + 1) * width:.3g}"
        box = f'x="{place * step + 1:.1f}" y="{HEIGHT - FOOT - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}"'
        bars.append(f'<g><rect class="dot" {box}/><title>{escape(said)}</title></g>')
    ticks = [
        f'<text class="tick" x="{at * (WIDTH - 30) + 2:.0f}" y="{HEIGHT - 6}">{low + at * (high - low):.3g}</text>'
        for at in (0, 0.5, 1)
    ]
    ticks.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{HEIGHT - FOOT}" y2="{HEIGHT - FOOT}"/>')
    label = f"Mean rewards of {len(means)} tasks"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join([*bars, *ticks])}</svg>'
