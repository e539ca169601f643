"""A training run as one HTML page."""

from collections import Counter
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from penstock.evals.curve import Point, reward_curve
from penstock.evals.html import Pick, change, config_part, document, number, percent, table, tiles, transcript


class Heldout(NamedTuple):
    """A held-out evaluation."""

    step: int
    when: str
    """`before`, `during` or `after` training."""
    reward: float | None
    """None where it was due and skipped, or all its rollouts failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that the page tells about a run."""

    name: str
    config: dict[str, Any]
    """As the run folder keeps it."""
    metrics: list[dict[str, Any]]
    """One entry per trained step."""
    summary: dict[str, Any]
    """Empty until the run has stopped or finished."""
    heldout: list[Heldout] = field(default_factory=list[Heldout])
    """In the order of their steps."""
    ends: dict[str, int] = field(default_factory=dict[str, int])
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    """How often messages were rendered anew although the rollout had earlier steps, by reason."""
    picks: list[Pick] = field(default_factory=list[Pick])
    picked_from: str = ""
    """Which rollouts the picks were chosen among."""


def render_page(facts: RunFacts) -> str:
    """The whole document."""
    status = facts.summary.get("status") or "not finished"
    model = facts.config.get("model", {}).get("name", "")
    body = f"""{_tiles(facts)}
<h2>Mean reward per step</h2>
{reward_curve([_point(entry) for entry in facts.metrics if entry["reward"] is not None], _marks(facts.heldout))}
{_evaluations(facts.heldout)}
{_steps(facts.metrics)}
<h2>Exact tokens</h2>
{_exactness(facts)}
<h2>How rollouts ended, held-out ones included</h2>
{table(["end", "rollouts"], facts.ends.items()) if facts.ends else "<p>None yet.</p>"}
<h2>Transcripts</h2>
<p class="dim">{escape(facts.picked_from)}</p>
{"".join(transcript(pick) for pick in facts.picks)}
{config_part(facts.config, "run")}"""
    return document(facts.name, f"{model} · {len(facts.metrics)} steps · {status}", body)


def _tiles(facts: RunFacts) -> str:
    summary, rewards = facts.summary, [entry["reward"] for entry in facts.metrics]
    first = summary.get("first_reward", rewards[0] if rewards else None)
    last = summary.get("last_reward", rewards[-1] if rewards else None)
    exact = _exact_rate(facts.metrics)
    return tiles(
        [
            ("training reward", change(first, last)),
            ("held-out reward", change(summary.get("eval_before"), summary.get("eval_after"))),
            ("exact tokens", percent(exact)),
            ("rollouts", f"{summary.get('rollouts', sum(facts.ends.values())):,}"),
            ("seconds", number(summary.get("train_seconds"))),
        ]
    )


def _exact_rate(metrics: list[dict[str, Any]]) -> float | None:
    sampled = sum(entry["sampled_tokens"] for entry in metrics)
    return sum(entry["exact_tokens"] for entry in metrics) / sampled if sampled else None


def _exactness(facts: RunFacts) -> str:
    """What keeps tokens from being trained as they were sampled, or at all, by reason; entries of old runs may lack some of it."""
    totals: dict[str, Counter[str]] = {"inexact": Counter(), "masked": Counter()}
    for entry in facts.metrics:
        for name, total in totals.items():
            total.update(entry.get(name, {}))
    named = [("tokens not exact", totals["inexact"]), ("steps masked", totals["masked"]), ("breaks", facts.breaks)]
    rows = [(what, reason, f"{count:,}") for what, counted in named for reason, count in counted.items()]
    sampled = sum(entry["sampled_tokens"] for entry in facts.metrics)
    unhashed = sum(entry.get("unhashed_tokens", 0) for entry in facts.metrics)
    said = f"{percent(_exact_rate(facts.metrics))} of {sampled:,} sampled tokens are exact, {unhashed:,} of them unhashed."
    return f'<p class="dim">{escape(said)}</p>' + (table(["what", "reason", "count"], rows) if rows else "")


def _point(entry: dict[str, Any]) -> Point:
    counted = f"{entry['rollouts']} rollouts, {entry['groups_equal']} of {entry['groups']} groups of equal reward"
    return Point(
        step=entry["step"], reward=entry["reward"], title=f"step {entry['step']}: reward {number(entry['reward'])}, {counted}"
    )


def _marks(heldout: list[Heldout]) -> list[Point]:
    """The evaluations beside training, for the curve."""
    said = "held-out after step {step}: reward {reward}"
    return [
        Point(step=one.step, reward=one.reward, title=said.format(step=one.step, reward=number(one.reward)))
        for one in heldout
        if one.when == "during" and one.reward is not None
    ]


def _evaluations(heldout: list[Heldout]) -> str:
    if not any(one.when == "during" for one in heldout):
        return ""
    rows = [(one.step, one.when, "skipped or failed" if one.reward is None else number(one.reward)) for one in heldout]
    return f"<h2>Held-out evaluations</h2>{table(['step', 'training', 'mean reward'], rows)}"


def _steps(metrics: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for entry in metrics for name, value in entry.items() if not isinstance(value, dict | list)))
    rows = [[number(entry.get(name)) for name in names] for entry in metrics]
    return (
        f'<details><summary>Every step in numbers</summary><div class="wide">{table(names, rows)}</div></details>' if rows else ""
    )
