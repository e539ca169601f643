"""Where a run stands, folded from its events: what the live view shows."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of a run as its events tell it. `apply` is the only way in."""

    rollouts_per_step: int
    clock: Callable[[], float] = time.monotonic
    name: str = ""
    folder: str = ""
    model: str = ""
    steps: int = 0
    step: int = 0
    """Steps trained so far, those of earlier processes included."""
    rewards: list[float | None] = field(default_factory=list[float | None])
    """Mean reward of every step."""
    groups: int = 0
    groups_equal: int = 0
    groups_stale: int = 0
    exact_token_rate: float | None = None
    tokens_per_s: float | None = None
    eval_before: float | None = None
    eval_last: str = ""
    """The last evaluation beside training, in words."""
    eval_after: float | None = None
    ends: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Per end other than completed: how often each message came with it."""
    now: str = "starting"
    next: str = ""
    evaluating: bool = False
    expected: int = 0
    """Rollouts that what is being done now will take; 0 where it is not about rollouts."""
    done: int = 0
    share: float | None = None
    """How far what is being done now is, where it is not about rollouts and somebody knows."""
    started_at: float = 0.0
    steps_from: int = 0
    """The step at which this process began, and when its first one did: what the estimate is made from."""
    steps_at: float | None = None
    last_step_at: float = 0.0
    eval_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def apply(self, kind: str, fields: dict[str, Any]) -> None:
        """Take in one event; kinds that the view does not show are left alone."""
        if change := _CHANGES.get(kind):
            change(self, fields)

    @property
    def elapsed_s(self) -> float:
        """Since this process began."""
        return self.clock() - self.started_at

    @property
    def left_s(self) -> float | None:
        """What the remaining steps will take at the pace so far, plus the last evaluation; None before the first step is done."""
        done = self.step - self.steps_from
        if self.steps_at is None or done <= 0:
            return None
        pace = (self.last_step_at - self.steps_at) / done
        return max(0.0, pace * (self.steps - self.step) - (self.clock() - self.last_step_at) + self.eval_seconds)

    @property
    def activity(self) -> str:
        """What is being done now, with how far it is."""
        if self.expected:
            return f"{self.now}, {min(self.done, self.expected)}/{self.expected} rollouts"
        return self.now if self.share is None else f"{self.now}, {self.share:.0%}"

    def failure(self) -> str:
        """The most frequent reason among rollouts that did not complete."""
        told = [(count, message) for messages in self.reasons.values() for message, count in messages.items() if message]
        return max(told)[1] if told else ""


def _run_start(state: RunState, fields: dict[str, Any]) -> None:
    state.name, state.folder, state.model = fields["name"], fields["folder"], fields["model"]
    state.steps, state.step = fields["steps"], fields["first_step"] - 1
    state.steps_from = state.step
    state.next = "held-out evaluation, then training"


def _stage(state: RunState, fields: dict[str, Any]) -> None:
    _doing(state, fields["text"])
    state.share = fields["done"] / fields["total"] if fields.get("total") else None


def _eval_start(state: RunState, fields: dict[str, Any]) -> None:
    if fields["when"] == "during":
        return
    before = fields["when"] == "before"
    _doing(state, f"held-out evaluation {fields['when']} training", expected=fields["tasks"])
    state.evaluating = True
    state.next = f"step {state.step + 1}" if before else "report"


def _eval_end(state: RunState, fields: dict[str, Any]) -> None:
    if fields["when"] == "during":
        state.eval_last = f"{fields['reward']:.3f} after step {fields['step']}"
        return
    state.evaluating = False
    if fields["when"] == "before":
        state.eval_before, state.eval_seconds = fields["reward"], fields["seconds"]
    else:
        state.eval_after, state.eval_seconds = fields["reward"], 0.0


def _rollout_end(state: RunState, fields: dict[str, Any]) -> None:
    end = str(fields["end"])
    state.ends[end] = state.ends.get(end, 0) + 1
    if (fields["channel"] == "train") != state.evaluating:
        state.done += 1
    if end != "completed":
        messages = state.reasons.setdefault(end, {})
        message = fields.get("message") or ""
        messages[message] = messages.get(message, 0) + 1


def _step_start(state: RunState, fields: dict[str, Any]) -> None:
    if state.steps_at is None:
        state.steps_at = state.last_step_at = state.clock()
    _doing(state, f"step {fields['step']}: sampling", expected=state.rollouts_per_step)
    state.next = "update the policy"


def _train_start(state: RunState, fields: dict[str, Any]) -> None:
    _doing(state, f"step {fields['step']}: updating the policy on {fields['groups']} groups")
    last = fields["step"] >= state.steps
    state.next = "held-out evaluation, report" if last else f"step {fields['step'] + 1}"


def _train_step(state: RunState, fields: dict[str, Any]) -> None:
    state.step, state.steps = fields["step"], fields["steps"]
    state.rewards.append(fields["reward"])
    state.groups += fields["groups"]
    state.groups_equal += fields["groups_equal"]
    state.groups_stale += fields["groups_stale"]
    state.exact_token_rate, state.tokens_per_s = fields["exact_token_rate"], fields["tokens_per_s"]
    state.last_step_at = state.clock()


def _doing(state: RunState, what: str, *, expected: int = 0) -> None:
    state.now, state.expected, state.done, state.share = what, expected, 0, None


_CHANGES: dict[str, Callable[[RunState, dict[str, Any]], None]] = {
    "run.start": _run_start,
    "stage": _stage,
    "eval.start": _eval_start,
    "eval.end": _eval_end,
    "rollout.end": _rollout_end,
    "step.start": _step_start,
    "train.start": _train_start,
    "train.step": _train_step,
}
