"""Signs in a run's metrics: why it learns nothing, and alarms when it goes wrong (what, since when, where to look, what to try).

An alarm reports what is the case over some steps. None is proof, and a run can be gamed without any of them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from textwrap import shorten
from typing import Any, NamedTuple

from penstock.records import BEHAVIOUR_UNKNOWN, Rollout
from penstock.run.shortfalls import add_shortfalls, read_shortfalls

Entries = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl, oldest first."""

WINDOW = 5
"""Steps that each sign is taken over, at the start and at the end."""
SOLVED = 0.9
"""Share of the highest reward from which a task counts as solved: a solved one may well have little entropy and equal groups."""


class Sign(NamedTuple):
    text: str
    values: dict[str, float]
    """What was measured, by name."""


class Alarm(NamedTuple):
    name: str
    step: int
    since: int
    """The last step before the signs."""
    text: str
    values: dict[str, float]
    group_id: str
    """A group of the last step, where to look first."""


def new_alarms(entries: Entries, start_reward: float | None = None) -> list[Alarm]:
    """Returns the alarms that the last step raised; without those that the step before raised too.

    `start_reward` is that of the held-out evaluation before training.
    """
    before, now = _signs(entries[:-1], start_reward), _signs(entries, start_reward)
    if not now:
        return []
    last = entries[-1]
    group_id = next(iter(last.get("group_ids", ())), "")
    since = max(0, int(last["step"]) - WINDOW)
    return [
        Alarm(kind, last["step"], since, f"step {last['step']}: {sign.text}", sign.values, group_id)
        for kind, sign in now.items()
        if kind not in before
    ]


def _signs(entries: Entries, start_reward: float | None) -> dict[str, Sign]:
    if len(entries) < 2 * WINDOW:  # the start and the end must not overlap
        early = {name: SIGNS[name] for name in FROM_THE_START}
        return _raised(early, entries, start_reward) if len(entries) >= WINDOW else {}
    return _raised(SIGNS, entries, start_reward)


def _raised(signs: Mapping[str, "Check"], entries: Entries, start_reward: float | None) -> dict[str, Sign]:
    made = {name: check(entries, start_reward) for name, check in signs.items()}
    return {name: sign for name, sign in made.items() if sign is not None}


Check = Callable[[Entries, float | None], Sign | None]


def _entropy_collapse(entries: Entries, _: float | None) -> Sign | None:
    first, last = _trained(entries[:WINDOW], "entropy"), _trained(entries[-WINDOW:], "entropy")
    if not first or last is None or last > 0.1 * first or _solved(entries) or _rising(entries):
        return None
    text = f"entropy fell from {first:.3g} to {last:.3g} while the reward stands at {_mean(entries[-WINDOW:], 'reward'):.3g}"
    return Sign(
        f"{text}: the policy has stopped trying other replies; raise train.entropy or sampling.temperature, or lower train.lr",
        {"entropy_first": first, "entropy_last": last},
    )


def _length_explosion(entries: Entries, _: float | None) -> Sign | None:
    first, last = _length(entries[:WINDOW]), _length(entries[-WINDOW:])
    if first == 0 or last < 3 * first or _gain(entries) > 0.05 * _spread(entries):
        return None
    return Sign(
        f"rollouts grew from {first:.0f} to {last:.0f} sampled tokens without more reward: look at what they repeat; set "
        "train.overlong or sampling.max_tokens, or train.mean = 'token' if the loss favours length",
        {"tokens_first": first, "tokens_last": last},
    )


def _equal_groups(entries: Entries, _: float | None) -> Sign | None:
    recent = entries[-WINDOW:]
    equal, groups = (sum(int(entry.get(name, 0)) for entry in recent) for name in ("groups_equal", "groups"))
    if not groups or equal < 0.9 * groups or _solved(entries):
        return None
    return Sign(
        f"in {equal} of the last {groups} groups all rewards were equal, so they taught nothing: take tasks that succeed "
        "sometimes, a larger rollout.group_size, partial credit in the grader, or train.dynamic_sampling",
        {"groups_equal": equal, "groups": groups},
    )


def _held_out_flat(entries: Entries, start_reward: float | None) -> Sign | None:
    measured = [float(entry["eval_reward"]) for entry in entries if entry.get("eval_reward") is not None]
    measured = [*([start_reward] if start_reward is not None else []), *measured]
    gain = _gain(entries)
    if len(measured) < 3 or gain < 0.2 * _spread(entries):
        return None
    held_out = fmean(measured[-2:]) - measured[0]
    if held_out > 0.25 * gain:
        return None
    return Sign(
        f"the reward rose by {gain:.3g} in training, and by {held_out:.3g} on held-out tasks: the policy learns the tasks by "
        "heart or games the grader; read its best rollouts, add tasks, try: penstock grader attack FILE.toml",
        {"gain": gain, "held_out_gain": held_out},
    )


def _one_pattern(entries: Entries, _: float | None) -> Sign | None:
    recent = _common_replies(entries[-WINDOW:])
    first, last = _share(_common_replies(entries[:WINDOW])), _share(recent)
    if last < 0.6 or last < 2 * first or _gain(entries) < 0.1 * _spread(entries):
        return None
    reply = recent[-1]["text"]
    return Sign(
        f"{last:.0%} of the replies are the same ({first:.0%} at first), and the reward rose: {reply[:80]!r} may be all that the "
        "grader wants; try: penstock grader attack FILE.toml",
        {"share_first": first, "share_last": last},
    )


def _mismatch(entries: Entries, _: float | None) -> Sign | None:
    divergence, gap = _trained(entries[-WINDOW:], "kl_behaviour"), _trained(entries[-WINDOW:], "logprob_gap")
    if divergence is None or gap is None or divergence < 0.05:
        return None
    return Sign(
        f"engine and trainer disagree: KL {divergence:.3g}, up to {gap:.3g} in a log-probability: check with penstock verify; "
        "lower rollout.max_staleness, serve in float32, or take train.loss = 'icepop'",
        {"kl_behaviour": divergence, "logprob_gap": gap},
    )


def _importance_at_the_cap(entries: Entries, _: float | None) -> Sign | None:
    share = _trained(entries[-WINDOW:], "importance_high")
    if share is None or share < 0.05:
        return None
    return Sign(
        f"{share:.0%} of the trained tokens are at least twice as likely as when they were sampled, so their weights are cut: "
        "lower rollout.max_staleness, train.updates_per_step or train.lr",
        {"importance_high": share},
    )


def _lost(entries: Entries, _: float | None) -> Sign | None:
    recent = entries[-WINDOW:]
    rollouts = sum(int(entry.get("rollouts", 0)) for entry in recent)
    completed = sum(int(entry.get("ends", {}).get("completed", 0)) for entry in recent)
    stale, groups = (sum(int(entry.get(name, 0)) for entry in recent) for name in ("groups_stale", "groups"))
    if rollouts and completed < 0.5 * rollouts:
        ends = {end for entry in recent for end in entry["ends"]} - {"completed"}
        text = (
            f"{rollouts - completed} of {rollouts} rollouts did not complete ({', '.join(sorted(ends))}): see what was lost and why"
        )
        return Sign(f"{text} with penstock view", {"rollouts": rollouts, "completed": completed})
    if groups and stale >= groups:
        return Sign(
            f"{stale} groups were dropped as too old while {groups} were trained: raise rollout.max_staleness or lower "
            "rollout.concurrency",
            {"groups_stale": stale, "groups": groups},
        )
    return None


SIGNS: dict[str, Check] = {
    "entropy_collapse": _entropy_collapse,
    "length_explosion": _length_explosion,
    "equal_groups": _equal_groups,
    "held_out_flat": _held_out_flat,
    "one_pattern": _one_pattern,
    "logprob_gap": _mismatch,
    "importance_at_cap": _importance_at_the_cap,
    "lost_rollouts": _lost,
}
"""By the kind of alarm."""
FROM_THE_START = ("equal_groups", "logprob_gap", "importance_at_cap", "lost_rollouts")
"""Signs that compare nothing with the start of the run."""


def _mean(entries: Entries, name: str) -> float:
    return fmean(float(entry[name]) for entry in entries)


def _trained(entries: Entries, name: str) -> float | None:
    """The mean over steps that trained something; None unless most did."""
    values = [float(entry.get(name, 0.0)) for entry in entries if entry.get("trained_tokens")]
    return fmean(values) if 2 * len(values) > len(entries) else None


def _length(entries: Entries) -> float:
    rollouts = sum(int(entry.get("rollouts", 0)) for entry in entries)
    return sum(int(entry.get("sampled_tokens", 0)) for entry in entries) / rollouts if rollouts else 0.0


def _common_replies(entries: Entries) -> list[Mapping[str, Any]]:
    """Returns the most common reply of each step that had one with text."""
    return [entry["replies"]["commonest"] for entry in entries if entry.get("replies")]


def _share(replies: Entries) -> float:
    return fmean(each["count"] / each["of"] for each in replies) if replies else 0.0


def _spread(entries: Entries) -> float:
    """How far apart rewards of this run lie; 1 while all are equal."""
    rewards = [reward for entry in entries for reward in entry["rewards"]]
    return max(rewards) - min(rewards) or 1.0 if rewards else 1.0


def _gain(entries: Entries) -> float:
    return _mean(entries[-WINDOW:], "reward") - _mean(entries[:WINDOW], "reward")


def _rising(entries: Entries) -> bool:
    """Whether the last steps got clearly more than those before them."""
    return _mean(entries[-WINDOW:], "reward") - _mean(entries[-2 * WINDOW : -WINDOW], "reward") > 0.05 * _spread(entries)


def _solved(entries: Entries) -> bool:
    """A reward below 1 that never was another is no success: the grader may know no other."""
    rewards = [reward for entry in entries for reward in entry["rewards"]]
    if not rewards or max(rewards) <= 0 or min(rewards) == max(rewards) < 1:
        return False
    return _mean(entries[-WINDOW:], "reward") >= SOLVED * max(rewards)


FIRST, LAST = 32, 64
"""Rollouts over which the first and the last reward are means."""
NOTHING_LEARNED = 3
"""The exit code of a finished run that published no version."""
STALLED_STEPS = 5
"""Steps without an update after which a notice is logged, and again after as many more."""
UNKNOWN_REMEDY = (
    "the engine does not report with which probability it samples: start vLLM with --logprobs-mode processed_logprobs, sample at "
    'temperature 1 without top_p, top_k and min_p, or set train.unknown_logprobs = "recompute"'
)
REPLY_CHARS = 200
"""Of a reply in the metrics."""


def reply_examples(attempts: Sequence[Rollout]) -> dict[str, Any]:
    """Returns the last replies of the best and of the worst rollout, and the most common one, for the metrics of a step."""
    graded = [(attempt.reward, reply) for attempt in attempts if attempt.reward is not None and (reply := _last_reply(attempt))]
    if not graded:
        return {"replies": {}}
    (best, best_reply), (worst, worst_reply) = max(graded, key=lambda each: each[0]), min(graded, key=lambda each: each[0])
    text, count = Counter(reply for _, reply in graded).most_common(1)[0]
    examples: dict[str, Any] = {"commonest": {"count": count, "of": len(graded), "text": text}}
    if best > worst:
        examples |= {"best": {"reward": best, "text": best_reply}, "worst": {"reward": worst, "text": worst_reply}}
    return {"replies": examples}


def _last_reply(attempt: Rollout) -> str:
    content = max(attempt.steps, key=lambda step: step.index).message.get("content") if attempt.steps else None
    return shorten(content, REPLY_CHARS, placeholder="…") if isinstance(content, str) else ""


def idle_steps(metrics: Entries) -> Entries:
    """Returns the last steps, those that published no version."""
    count, versions = 0, [0, *(entry["version"] for entry in metrics)]
    while count < len(metrics) and versions[-1 - count] == versions[-2 - count]:
        count += 1
    return metrics[len(metrics) - count :]


def why_idle(metrics: Entries) -> str:
    """Says why the last steps made no update, and what to do; empty if the very last one made one."""
    steps = idle_steps(metrics)
    if not steps:
        return ""
    last = "step" if len(steps) == 1 else f"{len(steps)} steps"
    return f"no update in the last {last}: {_cause(steps, metrics[: len(metrics) - len(steps)])}"


def _cause(steps: Entries, before: Entries) -> str:
    rewards = [reward for entry in steps for reward in entry["rewards"]]
    masked = sum((Counter[str](entry.get("masked", {})) for entry in steps), Counter[str]())
    failed = add_shortfalls(read_shortfalls(entry.get("shortfalls")) for entry in steps).get("failed")
    if failed and failed.count > len(rewards) and not masked:
        others = ", and the rewards of the others are equal" if rewards else ""
        failures = f"{failed.count:,} of {sum(entry['rollouts'] for entry in steps):,} rollouts failed{others}"
        return f"{failures} (most common: {failed.reason}); fix the agent, and try it with --dry-run"
    if sum(entry["groups_equal"] for entry in steps) < sum(entry["groups"] for entry in steps):
        reasons = ", ".join(f"{reason} {number}" for reason, number in masked.most_common(3)) or "no reason was recorded"
        remedy = UNKNOWN_REMEDY if BEHAVIOUR_UNKNOWN in masked else "penstock verify names them"
        return f"no sampled token could be trained (masked steps: {reasons}); {remedy}"
    low, high = min(rewards), max(rewards)
    if low == high and high <= 0:
        succeeded = any(reward > high for entry in before for reward in entry["rewards"])
        success = "no success to learn from any more" if succeeded else "there was never a first success to learn from"
        return (
            f"all rewards equal, every one is {high:g}: {success}{_common_reply(steps)}; "
            "give partial credit in the grader, easier tasks, a worked example in the prompt, or a larger model, and see the "
            "transcripts in the report"
        )
    if low == high:
        return (
            f"all rewards equal, every one is {high:g}: if that is the best reward, the tasks are solved; give harder ones, or "
            "stop. If not, the grader does not tell good replies from bad ones"
        )
    return (
        f"in each group, all rewards equal, though tasks differ (from {low:g} to {high:g}): each task is always or never "
        f"solved{_common_reply(steps)}; raise rollout.group_size or sampling.temperature, or take tasks that are solved sometimes"
    )


def _common_reply(steps: Entries) -> str:
    found = steps[-1].get("replies", {}).get("commonest")
    return f" (the most common reply, {found['count']} of {found['of']} in the last step: {found['text']!r})" if found else ""
