"""What `penstock eval` shows: progress while it runs, and results as text or as plain lines for other programs."""

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from textwrap import shorten, wrap
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from penstock.run.shortfalls import shortfall_rows
from penstock.view.formatting import NOTICES, PlainLine, aligned, clock, counts, misreported_text, plain_text, reward_text
from penstock.view.live import NotebookArea, RunningRollouts, in_notebook, make_console, pace_text

if TYPE_CHECKING:
    from penstock.evals.metrics import Difference, Estimate
    from penstock.evals.outcome import Comparison, EvalOutcome
    from penstock.evals.run import Evaluation
    from penstock.evals.spending import Latency, Spending


# While it runs


LINES = 10
"""Progress lines in all, where there is no terminal."""
SILENT_S = 30.0
"""Seconds without a line after which one says what is being waited for, where there is no terminal."""
ROWS = 100
"""Rollouts whose result a terminal shows above the bar, spread over all; the first is always shown."""


class EvalView:
    """A listener of events. A context manager: the bar is gone when it closes."""

    def __init__(self, console: Console | None = None, *, plain: bool = False, silent_s: float = SILENT_S) -> None:
        self._console = console or make_console()
        notebook = in_notebook() and not plain
        self._terminal = notebook or (self._console.is_interactive and not self._console.is_dumb_terminal and not plain)
        self._lock = threading.Lock()
        self._rollouts = RunningRollouts()
        self._silent_s, self._closed, self._spoke = silent_s, threading.Event(), False
        self._total = self._done = 0
        self._rewards: list[float] = []
        self._ends: Counter[str] = Counter()
        self._misreported = 0
        self._last_line = ""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _PaceColumn(self))
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._bar: Any = None
        self._live: AbstractContextManager[Any] = self._bars if self._terminal else nullcontext()
        if notebook:
            self._live = NotebookArea(self._bars.get_renderable)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        with self._lock:
            self._rollouts.apply(kind, fields)
            if kind == "stage" or kind in NOTICES:
                self._print_once(fields["text"])
            elif kind == "rollout.misreported":
                self._misreported += 1
                if self._misreported == 1:
                    self.notice(misreported_text(fields))
            elif kind in ("eval.begin", "branch.begin"):
                self._begin(fields)
            elif kind == "rollout.end" and fields["end"] != "lost":
                self._end(fields)

    def notice(self, text: str) -> None:
        """Print something that is not an event."""
        self._spoke = True
        self._console.print(text, markup=False, soft_wrap=True)

    def announce_stop(self) -> None:
        self.notice("Stopping. Start it again to resume; rollouts that have ended are kept.")

    def refresh(self) -> None:
        if isinstance(self._live, NotebookArea):
            self._live.refresh()

    def show(self, text: str) -> None:
        """Print the result."""
        self.notice(text)

    def pace(self) -> str:
        """How fast rollouts end, how long the rest takes, and what is being waited for.

        Without our lock: rich calls it in its own thread, under its own lock, which printing needs too.
        """
        left = self._rollouts.left_s(self._total)
        parts = (pace_text(self._rollouts.per_second), "" if left is None else f"about {clock(left)} left")
        return ", ".join(part for part in (*parts, self._rollouts.waiting_text()) if part)

    def __enter__(self) -> Self:
        self._live.__enter__()
        if not self._terminal:
            threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        self._live.__exit__(kind, error, trace)

    def _break_silence(self) -> None:
        while not self._closed.wait(self._silent_s):
            with self._lock:
                if not self._spoke and self._rollouts.started:
                    self.notice(f"{self._done}/{self._total} rollouts, {self.pace()}")
                self._spoke = False

    def _print_once(self, text: str) -> None:
        if text != self._last_line:
            self._last_line = text
            self.notice(text)

    def _begin(self, fields: dict[str, Any]) -> None:
        self._total = fields["rollouts"]
        before = f", {fields['done']} were made before" if fields["done"] else ""
        self._print_once(f"{fields['model']}: {self._total} rollouts{before}, in {fields['folder']}")
        if self._terminal:
            self._bar = self._bars.add_task("rollouts", total=self._total)

    def _end(self, fields: dict[str, Any]) -> None:
        self._done += 1
        self._ends[fields["end"]] += 1
        self._rewards.append(fields["reward"] or 0.0)
        mean = sum(self._rewards) / len(self._rewards)
        if fields["end"] not in ("completed", "cancelled") and self._ends[fields["end"]] == 1:
            self.notice(
                f"first rollout to end {fields['end']}: {fields['rollout_id']}: {' '.join((fields['message'] or '-').split())}"
            )
        if self._bar is None:
            if self._due(LINES):
                facts = [f"{self._done}/{self._total} rollouts", f"reward {reward_text(mean)}", self.pace()]
                self._print_once(", ".join(fact for fact in facts if fact))
            return
        if self._due(ROWS):
            self.notice(result_line(fields))
        self._bars.update(self._bar, completed=self._done, description=f"reward {reward_text(mean)}")

    def _due(self, often: int) -> bool:
        """Whether this is the first rollout to end, or one of `often` in all."""
        return self._done == 1 or self._done * often // self._total > (self._done - 1) * often // self._total


class _PaceColumn(ProgressColumn):
    def __init__(self, view: EvalView) -> None:
        super().__init__()
        self._view = view

    def render(self, task: Any) -> Text:
        return Text(self._view.pace(), style="dim")


def result_line(fields: Mapping[str, Any]) -> str:
    """How one rollout ended; its row in the dataset is that of its group."""
    row, place = fields["group_id"].rpartition("-")[2], fields["rollout_id"].rpartition(".")[0].rpartition(".")[2]
    verdict = reward_text(fields["reward"]) if fields["end"] == "completed" else fields["end"]
    return f"row {row}, attempt {int(place) + 1}: {verdict} in {fields['seconds']:.1f} s"


# Results as text


def as_text(found: "Evaluation", page: Path | None = None, train: str = "") -> str:
    """A small table, aligned, in words; `train` is the command that trains what was measured, empty where there is none."""
    own = found.outcome
    status = "failed" if own.all_failed and found.status == "finished" else found.status
    head = f"Evaluation {found.name} {status}: {own.tasks} tasks x {own.samples} of {found.model} in {clock(found.seconds)}."
    rows = [("reward", _estimate(own.reward)), *_components(own)]
    rows += [(f"pass@{k}", _estimate(value)) for k, value in own.passes.items()]
    rows.append(("rollouts", f"{own.rollouts:,}: {counts(own.ends)}" if own.ends else "0"))
    for end, messages in own.reasons.items():
        message, count = max(messages.items(), key=lambda item: item[1])
        rows.append(("", shorten(f"{end} ({count}x): {message or 'no message'}", 160, placeholder="…")))
    rows += shortfall_rows(own.shortfalls)
    rows += [("not done", line) for line in wrap(f"calls: {counts(found.notices)}" if found.notices else "", 100)]
    rows += _spent(own.spent)
    rows += [("", ""), ("folder", found.folder)]
    rows += [("report", str(page))] if page else []
    following = [train] if train else []
    if found.status == "stopped":
        again = ["run the same command to resume"]
    elif own.all_failed:
        again = ["no rollout was graded: fix what failed (the transcripts are in the report), then run it again with --fresh"]
    else:
        again = [*following, f"penstock eval compare {found.folder} OTHER"]
    rows += [("next" if place == 0 else "", text) for place, text in enumerate(again)]
    return f"\n{head}\n\n" + "\n".join(f"  {label:<12}{text}".rstrip() for label, text in rows) + "\n"


def regrade_text(own: "EvalOutcome", before: Path, folder: Path) -> str:
    rows = [
        ("reward", _estimate(own.reward)),
        *_components(own),
        *((f"pass@{k}", _estimate(value)) for k, value in own.passes.items()),
    ]
    rows += [("rollouts", f"{own.rollouts:,}: {counts(own.ends)}"), *shortfall_rows(own.shortfalls), ("folder", str(folder))]
    rows.append(("next", f"penstock eval compare {before} {folder}"))
    return f"\n{aligned(rows)}\n"


def comparison_text(found: "Comparison") -> str:
    rows = [("A", f"{found.first}: {reward_text(found.means[0])}"), ("B", f"{found.second}: {reward_text(found.means[1])}")]
    rows.append(("B - A", _difference(found.difference)))
    rows.append(("tasks", f"{found.tasks} that both tried: B is better on {found.better}, worse on {found.worse}"))
    if found.left_out:
        rows.append(("left out", f"{found.left_out} that one of them did not try"))
    for name, spent in zip("AB", found.spent, strict=True):
        rows += [(f"{name}, {label}", text) for label, text in _spent(spent)]
    return f"\n{aligned(rows)}\n"


def _spent(spent: "Spending") -> list[tuple[str, str]]:
    rows = [("model", f"{spent.steps:,} calls, {spent.completion_tokens:,} tokens sampled, {spent.prompt_tokens:,} read")]
    times = {"call": spent.call_s, "rollout": spent.rollout_s}
    took = [f"{name} {each.p50:.2f} s (p95 {each.p95:.2f} s)" for name, each in times.items() if each is not None]
    rows += [("median", ", ".join(took))] if took else []
    return rows if spent.cost is None else [*rows, ("cost", f"{spent.cost:.4g}")]


def _estimate(value: "Estimate | None") -> str:
    return "-" if value is None else f"{value.value:.3f}   95 % between {value.low:.3f} and {value.high:.3f}"


def _components(own: "EvalOutcome") -> list[tuple[str, str]]:
    return [(f"  {name}", _estimate(value)) for name, value in own.components.items()]


def _difference(value: "Difference") -> str:
    verdict = "not likely chance" if value.p < 0.05 else "may be chance"
    return f"{value.value:+.3f}   95 % between {value.low:+.3f} and {value.high:+.3f}, p = {value.p:.3g} ({verdict})"


# Results as plain lines


def evaluation_lines(found: "Evaluation", page: Path | None) -> str:
    """The plain form of `penstock eval run`."""
    head = [
        PlainLine("name", found.name),
        PlainLine("status", found.status),
        PlainLine("model", found.model),
        PlainLine("folder", found.folder),
    ]
    tail = [PlainLine("resumed", found.resumed), PlainLine("seconds", found.seconds), PlainLine("report", page)]
    not_done = [PlainLine(f"not_done.{name}", count) for name, count in found.notices.items()]
    return plain_text([*head, *_outcome(found.outcome), *not_done, *tail])


def regrade_lines(found: "EvalOutcome", folder: Path, page: Path | None) -> str:
    """The plain form of `penstock eval regrade`."""
    return plain_text([PlainLine("folder", folder), *_outcome(found), PlainLine("report", page)])


def comparison_lines(found: "Comparison") -> str:
    """The plain form of `penstock eval compare`."""
    lines = [
        PlainLine("tasks", found.tasks),
        PlainLine("left_out", found.left_out),
        PlainLine("better", found.better),
        PlainLine("worse", found.worse),
    ]
    lines.append(PlainLine("difference", *found.difference[:3]))
    lines.append(PlainLine("p", found.difference.p))
    sides = zip(("a", "b"), (found.first, found.second), found.means, found.spent, strict=True)
    for name, folder, mean, spent in sides:
        lines += [PlainLine(f"{name}.folder", folder), PlainLine(f"{name}.reward", mean)]
        lines += [line._replace(name=f"{name}.{line.name}") for line in _spent_lines(spent)]
    return plain_text(lines)


def _outcome(own: "EvalOutcome") -> list[PlainLine]:
    lines = [PlainLine("tasks", own.tasks), PlainLine("samples", own.samples), PlainLine("rollouts", own.rollouts)]
    lines += [_estimate_lines("reward", own.reward), *(_estimate_lines(f"pass@{k}", value) for k, value in own.passes.items())]
    lines += [_estimate_lines(f"component.{name}", value) for name, value in own.components.items()]
    lines += [PlainLine(f"end.{end}", count) for end, count in own.ends.items()]
    for kind, each in own.shortfalls.items():
        lines += [PlainLine(kind, each.count), PlainLine(f"{kind}.reason", each.reason)]
    return [*lines, *_spent_lines(own.spent)]


def _spent_lines(spent: "Spending") -> list[PlainLine]:
    lines = [PlainLine("steps", spent.steps), PlainLine("prompt_tokens", spent.prompt_tokens)]
    lines += [PlainLine("completion_tokens", spent.completion_tokens), PlainLine("cost", spent.cost)]
    return [*lines, *_latency("call_s", spent.call_s), *_latency("rollout_s", spent.rollout_s)]


def _estimate_lines(name: str, value: "Estimate | None") -> PlainLine:
    return PlainLine(name, None) if value is None else PlainLine(name, *value)


def _latency(name: str, value: "Latency | None") -> list[PlainLine]:
    return [PlainLine(f"{name}.p50", value and value.p50), PlainLine(f"{name}.p95", value and value.p95)]
