"""Whether a run learns anything, and if not, why: from the metrics of its steps, which also keep examples of replies."""

from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from penstock.records import BEHAVIOUR_UNKNOWN, Attempt
from penstock.run.shortfalls import add_shortfalls, read_shortfalls

FIRST, LAST = 32, 64
"""Rollouts over which the first and the last reward are means."""
NOTHING_LEARNED = 3
"""The exit code of a finished run that published no version."""
STALLED_STEPS = 5
"""Steps without an update after which it is told, and told again as often."""
UNKNOWN_REMEDY = (
    "the engine does not tell with which probability it samples: start vLLM with --logprobs-mode processed_logprobs, sample at "
    'temperature 1 without top_p, top_k and min_p, or set train.unknown_logprobs = "recompute"'
)
REPLY_CHARS = 200
"""Of a reply in the metrics."""


def reply_examples(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Returns the last replies of the best and of the worst rollout, and the commonest one, for the metrics of a step."""
    graded = [(attempt.reward, reply) for attempt in attempts if attempt.reward is not None and (reply := _last_reply(attempt))]
    if not graded:
        return {"replies": {}}
    (best, best_reply), (worst, worst_reply) = max(graded, key=lambda each: each[0]), min(graded, key=lambda each: each[0])
    text, count = Counter(reply for _, reply in graded).most_common(1)[0]
    examples: dict[str, Any] = {"commonest": {"count": count, "of": len(graded), "text": text}}
    if best > worst:
        examples |= {"best": {"reward": best, "text": best_reply}, "worst": {"reward": worst, "text": worst_reply}}
    return {"replies": examples}


def _last_reply(attempt: Attempt) -> str:
    content = max(attempt.steps, key=lambda step: step.index).message.get("content") if attempt.steps else None
    return shorten(content, REPLY_CHARS, placeholder="…") if isinstance(content, str) else ""


def idle_steps(metrics: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the last steps, those that published no version."""
    count, versions = 0, [0, *(entry["version"] for entry in metrics)]
    while count < len(metrics) and versions[-1 - count] == versions[-2 - count]:
        count += 1
    return metrics[len(metrics) - count :]


def why_idle(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Says why the last steps made no update, and what to do; empty if the very last one made one."""
    steps = idle_steps(metrics)
    if not steps:
        return ""
    last = "step" if len(steps) == 1 else f"{len(steps)} steps"
    return f"no update in the last {last}: {_cause(steps, metrics[: len(metrics) - len(steps)])}"


def _cause(steps: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    rewards = [reward for entry in steps for reward in entry["rewards"]]
    masked = sum((Counter[str](entry.get("masked", {})) for entry in steps), Counter[str]())
    failed = add_shortfalls(read_shortfalls(entry.get("shortfalls")) for entry in steps).get("failed")
    if failed and failed.count > len(rewards) and not masked:
        others = ", and the rewards of the others are equal" if rewards else ""
        told = f"{failed.count:,} of {sum(entry['rollouts'] for entry in steps):,} rollouts failed{others}"
        return f"{told} (commonest: {failed.reason}); mend the agent, and try it with --dry-run"
    if sum(entry["groups_equal"] for entry in steps) < sum(entry["groups"] for entry in steps):
        reasons = ", ".join(f"{reason} {number}" for reason, number in masked.most_common(3)) or "no reason was recorded"
        remedy = UNKNOWN_REMEDY if BEHAVIOUR_UNKNOWN in masked else "penstock verify names them"
        return f"no sampled token could be trained (masked steps: {reasons}); {remedy}"
    low, high = min(rewards), max(rewards)
    if low == high and high <= 0:
        succeeded = any(reward > high for entry in before for reward in entry["rewards"])
        success = "no success to learn from any more" if succeeded else "there was never a first success to learn from"
        return (
            f"all rewards equal, every one is {high:g}: {success}{_commonest(steps)}; "
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
        f"solved{_commonest(steps)}; raise rollout.group_size or sampling.temperature, or take tasks that are solved sometimes"
    )


def _commonest(steps: Sequence[Mapping[str, Any]]) -> str:
    found = steps[-1].get("replies", {}).get("commonest")
    return f" (the commonest reply, {found['count']} of {found['of']} in the last step: {found['text']!r})" if found else ""
