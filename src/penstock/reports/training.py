"""The report of a training run as one HTML page. `render_report` reads the run folder and its pool; `render_page` does no I/O."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.location import refuse_foreign_pool
from penstock.records import ADHOC_CHANNEL, Attempt, End, Group, Task
from penstock.reports.html import (
    ChartPoint,
    TranscriptPick,
    change,
    config_section,
    document,
    number,
    percent,
    reward_curve,
    table,
    tiles,
    transcript,
)
from penstock.run.code import code_changes
from penstock.run.folder import RunFolder, component_values, find_run_folder
from penstock.run.shortfalls import add_shortfalls, read_shortfalls
from penstock.train.sequences import Exactness, exactness


class Recording(NamedTuple):
    """What `penstock run` recorded."""

    calls: int
    exact: Exactness
    """Counted over the rollouts that the transcripts are chosen from."""


class HeldoutReward(NamedTuple):
    step: int
    when: str
    """`before`, `during` or `after` training."""
    reward: float | None
    """None if the evaluation was skipped, or all its rollouts failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The content of the page."""

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One entry per trained step."""
    damaged_metrics: int = 0
    """Steps whose entry is damaged and left out."""
    summary: dict[str, Any]
    """Empty until the run stops or finishes."""
    heldout: list[HeldoutReward] = field(default_factory=list[HeldoutReward])
    """Sorted by step."""
    ends: dict[str, int] = field(default_factory=dict[str, int])
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    """How often messages were rendered from scratch although the rollout had earlier steps, by reason."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups that were taken out of training, by reason."""
    code_changes: list[str] = field(default_factory=list[str])
    """When the author's code changed, and in which files."""
    picks: list[TranscriptPick] = field(default_factory=list[TranscriptPick])
    picked_from: str = ""
    """Says which groups the transcripts were chosen from."""
    recording: Recording | None = None
    """None for a run that trains."""


def render_page(report: RunReport) -> str:
    status = report.summary.get("status") or "not finished"
    model = report.config.get("model", {}).get("name", "")
    body = f"""{_tiles(report) if report.recording is None else _recording_tiles(report, report.recording)}
{_training(report) if report.recording is None else ""}
<h2>Exact tokens</h2>
{_exactness(report)}
<h2>How rollouts ended, held-out ones included</h2>
{table(["end", "rollouts"], report.ends.items()) if report.ends else "<p>None yet.</p>"}
{_shortfalls(report.metrics)}
<h2>Transcripts</h2>
<p class="dim">{escape(report.picked_from)}</p>
{"".join(transcript(pick) for pick in report.picks)}
{config_section(report.config, "run")}"""
    lacking = max(report.damaged_metrics, report.summary.get("steps", 0) - len(report.metrics))
    left_out = f" · {lacking} steps are left out, as metrics.jsonl is damaged" if lacking else ""
    about = f"{len(report.metrics)} steps · {status}{left_out}" if report.recording is None else "a recording, nothing was trained"
    return document(report.name, f"{model} · {about}", body)


def _training(report: RunReport) -> str:
    return f"""<h2>Mean reward per step</h2>
{reward_curve([_point(entry) for entry in report.metrics if entry["reward"] is not None], _marks(report.heldout))}
{"".join(f"<p>{escape(text)}: rewards before and after may not compare.</p>" for text in report.code_changes)}
{_components(report.metrics)}{_policies(report.metrics)}{_evaluations(report.heldout)}
{_steps(report.metrics)}"""


def _recording_tiles(report: RunReport, recording: Recording) -> str:
    calls, exact = recording
    counted = [("calls", calls), ("sampled tokens", exact.sampled_tokens), ("rollouts", sum(report.ends.values()))]
    return tiles([*((name, f"{count:,}") for name, count in counted), ("exact tokens", percent(exact.rate))])


def _tiles(report: RunReport) -> str:
    summary, rewards = report.summary, [entry["reward"] for entry in report.metrics]
    first = summary.get("first_reward", rewards[0] if rewards else None)
    last = summary.get("last_reward", rewards[-1] if rewards else None)
    exact = _exact_rate(report.metrics)
    return tiles(
        [
            ("training reward", change(first, last)),
            ("held-out reward", change(summary.get("eval_before"), summary.get("eval_after"))),
            ("exact tokens", percent(exact)),
            ("rollouts", f"{summary.get('rollouts', sum(report.ends.values())):,}"),
            ("seconds", number(summary.get("train_seconds"))),
        ]
    )


def _shortfalls(metrics: list[dict[str, Any]]) -> str:
    """Rollouts of the trained groups that failed, were not graded, or were wrong. Entries of old runs lack them."""
    found = add_shortfalls(read_shortfalls(entry.get("shortfalls")) for entry in metrics)
    rows = [(kind, each.count, each.reason) for kind, each in found.items()]
    return table(["of trained groups", "rollouts", "commonest reason"], rows) if rows else ""


def _exact_rate(metrics: list[dict[str, Any]]) -> float | None:
    sampled = sum(entry["sampled_tokens"] for entry in metrics)
    return sum(entry["exact_tokens"] for entry in metrics) / sampled if sampled else None


def _exactness(report: RunReport) -> str:
    """Counts, by reason, inexact tokens, masked steps, breaks and dropped groups. Entries of old runs may lack some counts."""
    recorded = report.recording.exact if report.recording else exactness()
    totals: dict[str, Counter[str]] = {"inexact": Counter(recorded.inexact), "masked": Counter()}
    for entry in report.metrics:
        for name, total in totals.items():
            total.update(entry.get(name, {}))
    named = [("tokens not exact", totals["inexact"]), ("steps masked", totals["masked"]), ("breaks", report.breaks)]
    named.append(("groups dropped", report.dropped))
    rows = [(what, reason, f"{count:,}") for what, counted in named for reason, count in counted.items()]
    sampled = recorded.sampled_tokens or sum(entry["sampled_tokens"] for entry in report.metrics)
    unhashed = recorded.unhashed_tokens or sum(entry.get("unhashed_tokens", 0) for entry in report.metrics)
    exact = percent(recorded.rate if report.recording else _exact_rate(report.metrics))
    text = f"{exact} of {sampled:,} sampled tokens are exact, {unhashed:,} of them unhashed."
    return f'<p class="dim">{escape(text)}</p>' + (table(["what", "reason", "count"], rows) if rows else "")


def _point(entry: dict[str, Any]) -> ChartPoint:
    counted = f"{entry['rollouts']} rollouts, {entry['groups_equal']} of {entry['groups']} groups of equal reward"
    return ChartPoint(
        step=entry["step"], reward=entry["reward"], title=f"step {entry['step']}: reward {number(entry['reward'])}, {counted}"
    )


def _marks(heldout: list[HeldoutReward]) -> list[ChartPoint]:
    """Returns the evaluations made during training as points of the curve."""
    text = "held-out after step {step}: reward {reward}"
    return [
        ChartPoint(step=each.step, reward=each.reward, title=text.format(step=each.step, reward=number(each.reward)))
        for each in heldout
        if each.when == "during" and each.reward is not None
    ]


def _components(metrics: list[dict[str, Any]]) -> str:
    """A curve for each named part of the reward; a step whose graders named others counts as 0 there."""
    parts = [(entry["step"], component_values(entry)) for entry in metrics]
    curves = list[str]()
    for name in dict.fromkeys(name for _, own in parts for name in own):
        means = [(step, own.get(name, 0.0)) for step, own in parts]
        points = [ChartPoint(step=step, reward=mean, title=f"step {step}: {name} {number(mean)}") for step, mean in means]
        curves.append(f"<h3>{escape(name)}: {change(means[0][1], means[-1][1])}</h3>{reward_curve(points)}")
    return f"<h2>Parts of the reward</h2>{''.join(curves)}\n" if curves else ""


def _policies(metrics: list[dict[str, Any]]) -> str:
    """One row, and for a trained one a curve, for each of `[policies.*]`; empty in a run without them."""
    rows, curves = list[list[str]](), list[str]()
    for name in dict.fromkeys(name for entry in metrics for name in entry.get("policies", ())):
        own = [(entry["step"], entry["policies"][name]) for entry in metrics if name in entry.get("policies", ())]
        last, rewarded = own[-1][1], [(step, each["reward"]) for step, each in own if each["reward"] is not None]
        calls, sampled, trained = (
            sum(each.get(key, 0) for _, each in own) for key in ("calls", "sampled_tokens", "trained_tokens")
        )
        reward = change(rewarded[0][1], rewarded[-1][1]) if rewarded else "-"
        told = ["frozen", "-"] if last["frozen"] else [str(last["updates"]), number(last["lr"])]
        rows.append([name, reward, *told, f"{calls:,}", f"{sampled:,}", f"{trained:,}"])
        if rewarded and not last["frozen"]:
            points = [ChartPoint(step=step, reward=value, title=f"step {step}: reward {number(value)}") for step, value in rewarded]
            curves.append(f"<h3>Mean reward of {escape(name)}</h3>{reward_curve(points)}")
    heads = ["policy", "reward, first and last step", "updates", "learning rate", "calls", "sampled tokens", "trained tokens"]
    return f"<h2>Policies</h2>{table(heads, rows)}{''.join(curves)}\n" if rows else ""


def _evaluations(heldout: list[HeldoutReward]) -> str:
    if not any(each.when == "during" for each in heldout):
        return ""
    rows = [(each.step, each.when, "skipped or failed" if each.reward is None else number(each.reward)) for each in heldout]
    return f"<h2>Held-out evaluations</h2>{table(['step', 'training', 'mean reward'], rows)}"


def _steps(metrics: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for entry in metrics for name, value in entry.items() if not isinstance(value, dict | list)))
    rows = [[number(entry.get(name)) for name in names] for entry in metrics]
    return (
        f'<details><summary>Every step in numbers</summary><div class="wide">{table(names, rows)}</div></details>' if rows else ""
    )


SCANNED_GROUPS = 100
"""Groups read at each end of a run to choose transcripts from, as reading all of a long run is too slow."""


async def render_report(folder: Path) -> str:
    """Returns the page of the run in `folder`."""
    run = find_run_folder(folder)
    config, metrics = run.settings()["config"], run.read_metrics()
    report = RunReport(
        name=config["run"]["name"],
        config=config,
        metrics=metrics.entries,
        damaged_metrics=metrics.damaged,
        summary=run.summary() or {},
        heldout=_heldout(run.evaluations()),
        code_changes=[change.text for change in code_changes(run)],
        **await _read_pool(run, config),
    )
    return render_page(report)


def choose_transcripts(groups: list[Group], replaced: Sequence[tuple[Task, Attempt]] = ()) -> list[TranscriptPick]:
    """Returns the first, last, best and worst rollout, and the last one of each failed end, without duplicates.

    `replaced` are attempts that were made again because they failed or were lost.
    """
    all_of_them = [(group.task, attempt) for group in groups for attempt in group.attempts if attempt.end is not None]
    graded = [(task, attempt, attempt.reward) for task, attempt in all_of_them if attempt.reward is not None]
    chosen: list[tuple[str, Task, Attempt]] = []
    if graded:
        newest_first = graded[::-1]
        best, worst = max(newest_first, key=lambda item: item[2]), min(newest_first, key=lambda item: item[2])
        named = [("first", graded[0]), ("last", graded[-1]), ("best", best), ("worst", worst)]
        chosen = [(why, task, attempt) for why, (task, attempt, _) in named]
    elif all_of_them:  # recorded by `penstock run`, and not graded
        chosen = [("first", *all_of_them[0]), ("last", *all_of_them[-1])]
    failed = {attempt.end: (task, attempt) for task, attempt in (*replaced, *all_of_them) if attempt.end is not End.COMPLETED}
    chosen += [("failed", task, attempt) for task, attempt in failed.values()]
    picks: dict[str, TranscriptPick] = {}
    for why, task, attempt in chosen:
        known = picks.get(attempt.rollout.id)
        picks[attempt.rollout.id] = TranscriptPick(why=f"{known.why}, {why}" if known else why, task=task, attempt=attempt)
    return list(picks.values())


def _heldout(evaluations: dict[str, float | None]) -> list[HeldoutReward]:
    """Parses keys such as `during-10`; returns the rewards sorted by step."""
    named = [(*when.rpartition("-")[::2], reward) for when, reward in evaluations.items()]
    return sorted(HeldoutReward(int(step), when, reward) for when, step, reward in named)


async def _read_pool(run: RunFolder, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `RunReport` that come from the pool."""
    kind = POOLS.load(config["pool"]["name"])
    if reason := kind.why_unreadable(run.path):
        return {"picked_from": f"No transcripts: {reason}."}
    pool: Pool = kind(run.path, url=config["pool"].get("url", ""))
    try:
        await refuse_foreign_pool(pool, run.path)
        channel = "train" if (await pool.stats("train")).groups else ADHOC_CHANNEL
        stats = await pool.stats(channel)
        groups = await pool.groups(channel, limit=SCANNED_GROUPS)
        rest = max(SCANNED_GROUPS, stats.last_seq + 1 - SCANNED_GROUPS)
        groups += await pool.groups(channel, first_seq=rest, limit=SCANNED_GROUPS)
        replaced = [(group.task, attempt) for group in groups for attempt in await _replaced(pool, group)]
        ends = dict(sorted((await pool.stats()).ends.items(), key=lambda item: -item[1]))
    finally:
        await pool.close()
    what = "training groups" if channel == "train" else "recorded rollouts"
    scanned = f"all {what}" if stats.last_seq < 2 * SCANNED_GROUPS else f"the first and the last {SCANNED_GROUPS} {what}"
    return {
        "ends": ends,
        "breaks": stats.breaks,
        "dropped": stats.drops,
        "picks": choose_transcripts(groups, replaced),
        "picked_from": f"Chosen among {scanned}.",
        "recording": _recording(groups) if channel == ADHOC_CHANNEL and groups else None,
    }


def _recording(groups: list[Group]) -> Recording:
    attempts = [attempt for group in groups for attempt in group.attempts]
    calls = {(attempt.rollout.id, step.answer) for attempt in attempts for step in attempt.steps}
    return Recording(len(calls), exactness(*attempts))


async def _replaced(pool: Pool, group: Group) -> list[Attempt]:
    """Returns the attempts of a group that later ones replaced."""
    counting = {attempt.rollout.id for attempt in group.attempts}
    if all(attempt.rollout.attempt == 1 for attempt in group.attempts):
        return []
    return [await pool.attempt(rollout.id) for rollout in await pool.rollouts(group.id) if rollout.id not in counting]
