"""What a person watches while a run trains, on stderr: a calm panel on a terminal, one line per event that matters elsewhere."""

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.figures import clock, counts, percent, rate, reward, sparkline
from penstock.cli.state import RunState
from penstock.run.folder import RunFolder


class LiveView:
    """A listener of events that shows where the run stands. A context manager: the panel is gone when it closes."""

    def __init__(self, state: RunState, console: Console | None = None) -> None:
        self.state = state
        self.console = console or Console(stderr=True, highlight=False)
        self.terminal = self.console.is_interactive and not self.console.is_dumb_terminal
        self._notice = self._said = ""
        self._lock = threading.Lock()  # the panel is drawn by a thread of its own, so that it moves while the loop is busy
        self._live: AbstractContextManager[Any] = nullcontext()
        if self.terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4, transient=True)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        """Take in one event."""
        with self._lock:
            self.state.apply(kind, fields)
            if kind == "run.start" and fields["resumed"]:
                self.state.rewards = [entry["reward"] for entry in RunFolder(Path(fields["folder"]), resumed=True).metrics()]
            line = None if self.terminal else event_line(kind, fields, self.state)
        if line and line != self._said:  # a stage comes again each time it got further
            self._said = line
            self._print(line)

    def notice(self, text: str) -> None:
        """Say something that is not an event, such as what Ctrl-C will do."""
        with self._lock:
            self._notice = text
        if not self.terminal:
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
    """The line that `kind` deserves where there is no terminal; None for most."""
    match kind:
        case "run.start":
            how = f"taken up again after step {state.step}" if fields["resumed"] else f"model {state.model}"
            return f"run {state.name} in {state.folder}: {how}, {state.steps} steps"
        case "stage":
            return fields["text"]
        case "eval.start" if fields["when"] == "during":
            return f"held-out evaluation after step {fields['step']} begins, beside training: {fields['tasks']} tasks"
        case "eval.start":
            return f"{state.now}: {fields['tasks']} tasks"
        case "eval.end":
            took = f"{fields['rollouts']} rollouts in {fields['seconds']:.1f} s"
            when = f"after step {fields['step']}" if fields["when"] == "during" else f"{fields['when']} training"
            return f"held-out {when}: reward {reward(fields['reward'])}, {took}"
        case "eval.skip":
            return f"held-out evaluation after step {fields['step']} skipped: that after step {fields['running']} still runs"
        case "eval.fail":
            return f"held-out evaluation after step {fields['step']} failed: {_one_line(fields['message'])}"
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
    return f"step {done}  reward {reward(fields['reward'])}  {groups}  exact {exact}  {speed} tok/s  {spark}"


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
        after = f"{reward(state.eval_after)} after" if state.eval_after is not None else state.eval_last
        rows.append(("held-out", Text(" → ".join(part for part in (f"{reward(state.eval_before)} before", after) if part))))
    if state.step > state.steps_from:
        stale = f", {state.groups_stale} stale" if state.groups_stale else ""
        rows.append(("groups", Text(f"{state.groups} trained, {state.groups_equal} of equal reward{stale}")))
        rows.append(("tokens", Text(f"{percent(state.exact_token_rate)} exact, {rate(state.tokens_per_s)} per second")))
    failed = {end: count for end, count in state.ends.items() if end != "completed"}
    if failed:
        rows.append(("failed", Text(f"{counts(failed)} of {sum(state.ends.values()):,} rollouts", style="yellow")))
        rows.append(("", Text(_one_line(state.failure()), style="dim")))
    rows.append(("now", Text(state.activity)))
    rows.append(("next", Text(state.next, style="dim")))
    return rows


def _step_row(state: RunState, width: int) -> RenderableType:
    bar = ProgressBar(total=max(1, state.steps), completed=state.step, width=min(40, width - 10), complete_style="cyan")
    return _pair(f"{state.step}/{state.steps}", bar)


def _reward_row(state: RunState, width: int) -> RenderableType:
    spark = Text(sparkline(state.rewards, width=min(40, width - 10)), style="green")
    return _pair(Text(reward(state.rewards[-1]), style="bold"), spark)


def _pair(number: RenderableType, drawing: RenderableType) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=8, no_wrap=True)
    row.add_column(no_wrap=True)
    row.add_row(number, drawing)
    return row


def _indented(rows: Table) -> RenderableType:
    outer = Table.grid()
    outer.add_column(width=2)
    outer.add_column()
    outer.add_row("", rows)
    return outer


def _one_line(text: str) -> str:
    return " ".join(text.split())
