"""The live view of a training run: its state, kept up to date from events, as a panel, as printed lines or in a notebook."""

import importlib
import io
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.run.folder import RunFolder, component_values
from penstock.run.shortfalls import read_shortfalls
from penstock.view.formatting import NOTICES, clock, counts, misreported_text, percent, rate, reward_text, sparkline


@dataclass(slots=True)
class RunningRollouts:
    """Rollouts between their start and their end. Only `apply` changes it."""

    now: Callable[[], float] = time.monotonic
    started: dict[str, float] = field(default_factory=dict[str, float])
    """When each that runs began."""
    grading: set[str] = field(default_factory=set[str])
    """Those whose agent is done."""
    ended: int = 0
    first_at: float | None = None

    def apply(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "rollout.start":
                self.started[fields["rollout_id"]] = self.now()
                self.first_at = self.now() if self.first_at is None else self.first_at
            case "rollout.grade":
                self.grading.add(fields["rollout_id"])
            case "rollout.end":
                name = fields.get("rollout_id", "")
                self.started.pop(name, None)
                self.grading.discard(name)
                self.ended += fields["end"] != "lost"
            case _:
                pass

    @property
    def per_second(self) -> float | None:
        """How many have ended in a second so far; None before the first."""
        if self.first_at is None or not self.ended:
            return None
        return self.ended / max(1e-3, self.now() - self.first_at)

    def left_s(self, total: int) -> float | None:
        """The time until `total` have ended, at the pace so far; None if that is not known, or they have."""
        pace = self.per_second
        return None if pace is None or total <= self.ended else (total - self.ended) / pace

    def waiting_text(self) -> str:
        """What is being waited for; empty if nothing runs."""
        started, grading = self.started.copy(), self.grading.copy()  # another thread may add to them
        if not started:
            return ""
        longest = clock(self.now() - min(started.values()))
        graded = f", {len(grading)} being graded" if grading else ""
        return f"{len(started)} running{graded}, the longest for {longest}"


def pace_text(per_second: float | None) -> str:
    """`3.2/s`, `12/min` or `40/h`; empty for None."""
    if per_second is None:
        return ""
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
        if per_second * seconds >= 1 or unit == "h":
            return f"{per_second * seconds:.2g}/{unit}" if per_second * seconds < 10 else f"{per_second * seconds:,.0f}/{unit}"
    return ""


# Notebooks


WIDTH = 100


def in_notebook() -> bool:
    """Returns whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "kernel", None) is not None if ipython else False


def make_console() -> Console:
    """Returns the console for progress: stderr, or a notebook's plain output."""
    if in_notebook():
        return Console(file=sys.stdout, force_jupyter=False, highlight=False, width=WIDTH)
    return Console(stderr=True, highlight=False)


class NotebookArea:
    """An output of a notebook cell that is drawn again in place. rich does that only where ipywidgets is installed."""

    def __init__(self, render: Callable[[], RenderableType]) -> None:
        self._render, self._shown = render, ""

    def __enter__(self) -> Self:
        display: Any = importlib.import_module("IPython.display").display
        self._handle = display(self._draw(), raw=True, display_id=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self.refresh()

    def refresh(self) -> None:
        before, drawn = self._shown, self._draw()
        if self._shown != before:
            self._handle.update(drawn, raw=True)

    def _draw(self) -> dict[str, str]:
        console = Console(file=io.StringIO(), record=True, force_jupyter=False, force_terminal=True, width=WIDTH)
        console.print(self._render())
        self._shown = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>", clear=False)
        return {"text/html": self._shown, "text/plain": console.export_text()}


REPLIES_EVERY = 5
"""Steps from one line with examples of replies to the next, where there is no terminal."""


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of a run. Only `apply` changes it."""

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
    replies: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Examples of the last step; see `penstock.train.monitoring`."""
    eval_before: float | None = None
    eval_last: str = ""
    """The last evaluation during training, in words."""
    eval_after: float | None = None
    ends: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Per end other than completed: how often each message came with it."""
    now: str = "starting"
    next: str = ""
    evaluating: bool = False
    expected: int = 0
    """Rollouts of the current activity; 0 if it has none."""
    done: int = 0
    share: float | None = None
    """How far the current activity is, if it has no rollouts and reports it."""
    started_at: float = 0.0
    steps_from: int = 0
    """The step at which this process began, and when its first one did: what the estimate is made from."""
    steps_at: float | None = None
    groups_set_aside: int = 0
    misreported: int = 0
    """Rollouts whose agents reported another conversation than was recorded."""
    last_step_at: float = 0.0
    eval_seconds: float = 0.0
    running: RunningRollouts = field(default_factory=RunningRollouts)

    def __post_init__(self) -> None:
        self.started_at = self.clock()
        self.running.now = self.clock

    def apply(self, kind: str, fields: dict[str, Any]) -> None:
        """Apply one event; kinds that the view does not show are ignored."""
        self.running.apply(kind, fields)
        if change := _CHANGES.get(kind):
            change(self, fields)

    @property
    def elapsed_s(self) -> float:
        """Since this process began."""
        return self.clock() - self.started_at

    @property
    def left_s(self) -> float | None:
        """The time for the remaining steps at the pace so far, plus the last evaluation; None before the first step is done."""
        pace = self.seconds_per_step
        if pace is None:
            return None
        return max(0.0, pace * (self.steps - self.step) - (self.clock() - self.last_step_at) + self.eval_seconds)

    @property
    def seconds_per_step(self) -> float | None:
        """At the pace so far; None before the first step is done."""
        done = self.step - self.steps_from
        return None if self.steps_at is None or done <= 0 else (self.last_step_at - self.steps_at) / done

    @property
    def pace(self) -> str:
        """How fast steps are made; empty before the first is done."""
        seconds = self.seconds_per_step
        return f"{pace_text(1 / max(seconds, 1e-3))} steps" if seconds is not None else ""

    @property
    def activity(self) -> str:
        """What is being done now, how far it is, and what it waits for."""
        if self.expected:
            waiting = self.running.waiting_text()
            done = f"{self.now}, {min(self.done, self.expected)}/{self.expected} rollouts"
            return f"{done}; {waiting}" if waiting else done
        return self.now if self.share is None else f"{self.now}, {self.share:.0%}"

    def failure(self) -> str:
        """The most frequent reason among rollouts that did not complete."""
        counted = [(count, message) for messages in self.reasons.values() for message, count in messages.items() if message]
        return max(counted)[1] if counted else ""


def _run_start(state: RunState, fields: dict[str, Any]) -> None:
    state.name, state.folder, state.model = fields["name"], fields["folder"], fields["model"]
    state.steps, state.step = fields["steps"], fields["first_step"] - 1
    state.steps_from = state.step
    state.next = "held-out evaluation, then training"


def _stage(state: RunState, fields: dict[str, Any]) -> None:
    _set_activity(state, fields["text"])
    state.share = fields["done"] / fields["total"] if fields.get("total") else None


def _eval_start(state: RunState, fields: dict[str, Any]) -> None:
    if fields["when"] == "during":
        return
    before = fields["when"] == "before"
    _set_activity(state, f"held-out evaluation {fields['when']} training", expected=fields["tasks"])
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


def _group_drop(state: RunState, fields: dict[str, Any]) -> None:
    state.groups_set_aside += "message" in fields  # the others are replaced, as their rollouts failed


def _rollout_misreported(state: RunState, fields: dict[str, Any]) -> None:
    state.misreported += 1


def _step_start(state: RunState, fields: dict[str, Any]) -> None:
    if state.steps_at is None:
        state.steps_at = state.last_step_at = state.clock()
    _set_activity(state, f"step {fields['step']}: sampling", expected=state.rollouts_per_step)
    state.next = "update the policy"


def _train_start(state: RunState, fields: dict[str, Any]) -> None:
    _set_activity(state, f"step {fields['step']}: updating the policy on {fields['groups']} groups")
    last = fields["step"] >= state.steps
    state.next = "held-out evaluation, report" if last else f"step {fields['step'] + 1}"


def _train_step(state: RunState, fields: dict[str, Any]) -> None:
    state.step, state.steps = fields["step"], fields["steps"]
    state.rewards.append(fields["reward"])
    state.groups += fields["groups"]
    state.groups_equal += fields["groups_equal"]
    state.groups_stale += fields["groups_stale"]
    state.exact_token_rate, state.tokens_per_s = fields["exact_token_rate"], fields["tokens_per_s"]
    state.replies = fields.get("replies", {})
    state.last_step_at = state.clock()


def _train_wait(state: RunState, fields: dict[str, Any]) -> None:
    state.now = fields["text"]


def _set_activity(state: RunState, text: str, *, expected: int = 0) -> None:
    state.now, state.expected, state.done, state.share = text, expected, 0, None


_CHANGES: dict[str, Callable[[RunState, dict[str, Any]], None]] = {
    "run.start": _run_start,
    "stage": _stage,
    "eval.start": _eval_start,
    "eval.end": _eval_end,
    "rollout.end": _rollout_end,
    "group.drop": _group_drop,
    "rollout.misreported": _rollout_misreported,
    "step.start": _step_start,
    "train.start": _train_start,
    "train.wait": _train_wait,
    "train.step": _train_step,
}


class LiveView:
    """An event listener that shows the state of the run. A context manager: the panel disappears when it closes."""

    def __init__(self, state: RunState, console: Console | None = None, *, plain: bool = False) -> None:
        self.state = state
        self.console = console or make_console()
        notebook = in_notebook() and not plain
        self.terminal = notebook or (self.console.is_interactive and not self.console.is_dumb_terminal and not plain)
        self._notice = self._last_line = ""
        self._lock = threading.Lock()  # rich draws the panel in a thread, so that it moves while the loop is busy
        self._live: AbstractContextManager[Any] = nullcontext()
        if notebook:
            self._live = NotebookArea(self._panel)
        elif self.terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4, transient=True)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        with self._lock:
            self.state.apply(kind, fields)
            if kind == "run.start" and fields["resumed"]:
                self.state.rewards = [entry["reward"] for entry in RunFolder(Path(fields["folder"]), resumed=True).metrics()]
            line = None if self.terminal and kind not in NOTICES else event_line(kind, fields, self.state)
        if line and line != self._last_line:  # a stage is emitted again with each progress
            self._last_line = line
            self._print(line)

    def notice(self, text: str) -> None:
        """Show something that is not an event, such as what Ctrl-C will do."""
        with self._lock:
            self._notice = text
        if not self.terminal:
            self._print(text)

    def announce_stop(self) -> None:
        when = "now" if self.state.evaluating else "after this step"
        self.notice(f"Stopping {when}. Press Ctrl-C again to quit at once. Both are safe: start it again to resume.")

    def refresh(self) -> None:
        if isinstance(self._live, NotebookArea):
            self._live.refresh()

    def show(self, text: str) -> None:
        """Print the result."""
        self._print(text)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        with self._lock:
            return panel(self.state, self._notice, width=min(self.console.width, 100))


def panel(state: RunState, notice: str = "", *, width: int = 80) -> RenderableType:
    """The whole view, at most `width` columns wide."""
    rows = Table.grid(padding=(0, 2), expand=False)
    rows.add_column(style="dim", width=8, no_wrap=True)
    rows.add_column(width=width - 12, no_wrap=True, overflow="ellipsis")
    for label, text in _rows(state, width=width - 12):
        rows.add_row(label, text)
    if notice:
        rows.add_row("", Text(notice, style="yellow", no_wrap=False, overflow="fold"))
    return Group(_header(state, width), Text(""), _indented(rows), Text(""))


def event_line(kind: str, fields: dict[str, Any], state: RunState) -> str | None:
    """The line printed for an event where there is no terminal; None for most events."""
    match kind:
        case "run.start":
            how = f"taken up again after step {state.step}" if fields["resumed"] else f"model {state.model}"
            return f"run {state.name} in {state.folder}: {how}, {state.steps} steps"
        case "train.wait":
            waiting = state.running.waiting_text()
            return f"{fields['text']}; {waiting}" if waiting else fields["text"]
        case "stage":
            return fields["text"]
        case _ if kind in NOTICES:
            return fields["text"]
        case "eval.start" if fields["when"] == "during":
            return f"held-out evaluation after step {fields['step']} begins during training: {fields['tasks']} tasks"
        case "eval.start":
            return f"{state.now}: {fields['tasks']} tasks"
        case "eval.end":
            took = f"{fields['rollouts']} rollouts in {fields['seconds']:.1f} s"
            when = f"after step {fields['step']}" if fields["when"] == "during" else f"{fields['when']} training"
            return f"held-out {when}: reward {reward_text(fields['reward'])}, {took}"
        case "eval.skip":
            return f"held-out evaluation after step {fields['step']} skipped: that after step {fields['running']} still runs"
        case "eval.fail":
            return f"held-out evaluation after step {fields['step']} failed: {_one_line(fields['message'])}"
        case "group.drop" if "message" in fields:
            return f"group {fields['group_id']} set aside, {fields['reason']}: {_one_line(fields['message'])}"
        case "update.skip":
            return f"step {fields['step']}: the last {fields['updates']} updates are skipped: {_one_line(fields['message'])}"
        case "rollout.misreported" if state.misreported == 1:
            return misreported_text(fields)
        case "rollout.end" if fields["end"] != "completed" and state.ends[fields["end"]] == 1:
            return (
                f"first rollout to end {fields['end']}: {fields['rollout_id']}: {_one_line(fields.get('message') or 'no message')}"
            )
        case "train.step":
            return _step_line(fields, state)
        case "run.stop":
            return f"stopped: {fields['reason']}"
        case _:
            return None


def _step_line(fields: dict[str, Any], state: RunState) -> str:
    done = f"{fields['step']:>{len(str(state.steps))}}/{state.steps}"
    groups = f"groups {fields['groups']} ({fields['groups_equal']} equal)"
    spark = sparkline(state.rewards, width=20)
    exact, speed = percent(fields["exact_token_rate"]), rate(fields["tokens_per_s"])
    own = "".join(
        f"  {name} {reward_text(policy['reward'])}"
        for name, policy in fields.get("policies", {}).items()
        if not policy["frozen"] and policy["reward"] is not None
    )
    own += "".join(f"  {name} {reward_text(mean)}" for name, mean in component_values(fields).items())
    own += _shortfall_note(fields)
    line = f"step {done}  reward {reward_text(fields['reward'])}{own}  {groups}  exact {exact}  {speed} tok/s  {spark}"
    if state.left_s is not None and fields["step"] < state.steps:
        line += f"  {state.pace}, about {clock(state.left_s)} left"
    shown = state.replies if fields["step"] % REPLIES_EVERY == 1 else {}
    return "\n".join([line, *(f"  {name} reply, {text}" for name, text in _replies(shown))])


def _shortfall_note(fields: dict[str, Any]) -> str:
    """How many rollouts failed and were not graded, with the most common reason; the reward is the mean of the others alone."""
    found = read_shortfalls(fields.get("shortfalls"))
    short = [(kind, found[kind]) for kind in ("failed", "ungraded") if kind in found and found[kind].count]
    notes = [f"{each.count} of {fields['rollouts']} rollouts {kind}: {each.reason}" for kind, each in short]
    return f"  ({'; '.join(notes)})" if notes else ""


def _replies(replies: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """The best and the worst reply, each with its reward; if all rewards are equal, the most common one."""
    if "best" in replies:
        return [(name, f"{reward_text(replies[name]['reward'])}: {replies[name]['text']}") for name in ("best", "worst")]
    return [("most common", f"{each['count']} of {each['of']}: {each['text']}") for each in (replies.get("commonest"),) if each]


def _header(state: RunState, width: int) -> RenderableType:
    title = Text.assemble(("penstock", "bold cyan"), ("  ", ""), (state.name, "bold"), ("  ", ""), (state.model, "dim"))
    left = state.left_s
    times = clock(state.elapsed_s) + (f", about {clock(left)} left" if left is not None else "")
    line = Table.grid(expand=False)
    line.add_column(width=width - len(times) - 1, no_wrap=True, overflow="ellipsis")
    line.add_column(width=len(times), justify="right", no_wrap=True)
    line.add_row(title, Text(times, style="dim"))
    return line


def _rows(state: RunState, *, width: int) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [("step", _step_row(state, width))]
    if state.rewards:
        rows.append(("reward", _reward_row(state, width)))
    if state.eval_before is not None:
        after = f"{reward_text(state.eval_after)} after" if state.eval_after is not None else state.eval_last
        rows.append(("held-out", Text(" → ".join(part for part in (f"{reward_text(state.eval_before)} before", after) if part))))
    if state.step > state.steps_from:
        stale = f", {state.groups_stale} stale" if state.groups_stale else ""
        stale += f", {state.groups_set_aside} set aside" if state.groups_set_aside else ""
        rows.append(("groups", Text(f"{state.groups} trained, {state.groups_equal} of equal reward{stale}")))
        rows.append(("tokens", Text(f"{percent(state.exact_token_rate)} exact, {rate(state.tokens_per_s)} per second")))
    rows += [("reply" if name == "most common" else name, Text(text, style="dim")) for name, text in _replies(state.replies)]
    failed = {end: count for end, count in state.ends.items() if end != "completed"}
    if failed:
        rows.append(("failed", Text(f"{counts(failed)} of {sum(state.ends.values()):,} rollouts", style="yellow")))
        rows.append(("", Text(_one_line(state.failure()), style="dim")))
    rows.append(("now", Text(state.activity)))
    rows.append(("next", Text(state.next, style="dim")))
    return rows


def _step_row(state: RunState, width: int) -> RenderableType:
    bar = ProgressBar(total=max(1, state.steps), completed=state.step, width=min(40, width - 10), complete_style="cyan")
    return _pair(f"{state.step}/{state.steps}", bar, Text(state.pace, style="dim"))


def _reward_row(state: RunState, width: int) -> RenderableType:
    spark = Text(sparkline(state.rewards, width=min(40, width - 10)), style="green")
    return _pair(Text(reward_text(state.rewards[-1]), style="bold"), spark)


def _pair(number: RenderableType, *drawings: RenderableType) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=8, no_wrap=True)
    for _ in drawings:
        row.add_column(no_wrap=True)
    row.add_row(number, *drawings)
    return row


def _indented(rows: Table) -> RenderableType:
    outer = Table.grid()
    outer.add_column(width=2)
    outer.add_column()
    outer.add_row("", rows)
    return outer


def _one_line(text: str) -> str:
    return " ".join(text.split())
