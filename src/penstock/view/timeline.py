"""What engine, agents, graders, trainer and publications were doing when, from a run's events and the calls of its rollouts."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.pool.base import PoolDatabase
from penstock.view.run_files import parse_event

MAX_BYTES = 2 << 20
"""Of events that are read for one answer."""
MAX_SPANS = 2000
MAX_ROLLOUTS = 200
"""Rollouts whose calls are looked up."""
DEFAULT_S = 120.0


class Span(NamedTuple):
    lane: str
    start: float
    end: float | None
    """None while it runs."""
    name: str
    about: str = ""


def timeline(folder: Path, database: PoolDatabase | None, *, until: float | None, span_s: float = DEFAULT_S) -> dict[str, Any]:
    """Returns the spans of a window of time: the last one, or that which ends at `until`."""
    file = folder / "events.jsonl"
    bounds = _bounds(file)
    if bounds is None:
        return {"start": None, "end": None, "from": None, "to": None, "spans": [], "cut": False}
    end = min(until, bounds[1]) if until is not None else bounds[1]
    start = max(bounds[0], end - span_s)
    events, cut_short = _events_between(file, start - span_s, end)
    spans = _spans(events, end if end < bounds[1] else None)
    seen = [span for span in spans if (span.end is None or span.end >= start) and span.start <= end]
    agents = [span.about for span in seen if span.lane == "agents"]
    calls = _calls(database, agents[-MAX_ROLLOUTS:]) if database else []
    seen += [span for span in calls if (span.end or 0) >= start and span.start <= end]
    kept = sorted(seen, key=lambda span: span.start)[-MAX_SPANS:]
    is_cut = cut_short or len(kept) < len(seen) or len(agents) > MAX_ROLLOUTS
    gaps = [] if is_cut else _gaps([span for span in seen if span.lane in ("engine", "trainer")], start, end)
    busy = {lane: _covered([s for s in seen if s.lane == lane], start, end) for lane in ("engine", "agents", "graders", "trainer")}
    if not is_cut:  # calls that are not seen would count as idle time
        busy["idle"] = _covered(gaps, start, end)
    return {
        "start": bounds[0],
        "end": bounds[1],
        "from": start,
        "to": end,
        "spans": [span._asdict() for span in (*kept, *gaps)],
        "cut": is_cut,
        "busy": busy,
    }


def _covered(spans: list[Span], start: float, end: float) -> float | None:
    """Returns the share of the window in which at least one span was going on."""
    if end <= start:
        return None
    return 1 - sum((gap.end or end) - gap.start for gap in _gaps(spans, start, end)) / (end - start)


def _gaps(spans: list[Span], start: float, end: float) -> list[Span]:
    """Returns the times of the window in which none of the spans was going on; waiting does not count."""
    found, reached = list[Span](), start
    for span in sorted(spans, key=lambda each: each.start):
        if span.name.startswith("waits"):
            continue
        if span.start > reached:
            found.append(Span("idle", reached, min(span.start, end), "neither engine nor trainer"))
        reached = max(reached, span.end or end)
    return found + ([Span("idle", reached, end, "neither engine nor trainer")] if reached < end else [])


def _spans(events: list[dict[str, Any]], until: float | None) -> list[Span]:
    found, open_spans = list[Span](), dict[tuple[str, str], Span]()

    def begin(lane: str, key: str, at: float, name: str, about: str = "") -> None:
        open_spans[lane, key] = Span(lane, at, None, name, about)

    def finish(lane: str, key: str, at: float, name: str = "") -> None:
        if span := open_spans.pop((lane, key), None):
            found.append(span._replace(end=at, name=name or span.name))

    for event in events:
        at, kind = float(event["time"]), event["kind"]
        about, step = str(event.get("rollout_id", "")), event.get("step")
        if kind == "rollout.start":
            begin("agents", about, at, "agent", about)
        elif kind == "rollout.grade":
            finish("agents", about, at)
            begin("graders", about, at, "grader", about)
        elif kind == "rollout.end":
            finish("agents", about, at, str(event.get("end")))
            finish("graders", about, at)
        elif kind == "step.start":
            finish("trainer", "", at)
            begin("trainer", "", at, f"waits for groups of step {step}")
        elif kind == "train.start":
            finish("trainer", "", at)
            begin("trainer", "", at, f"update of step {step}")
        elif kind == "train.step":
            finish("trainer", "", at)
        elif kind == "policy.publish":
            seconds = float(event.get("seconds") or 0)
            found.append(Span("publications", at - seconds, at, f"version {event.get('version')}"))
        elif kind == "checkpoint":
            found.append(Span("publications", at, at, f"checkpoint {event.get('version')}"))
        elif kind in ("run.end", "run.stop", "gateway.stop"):
            for lane, key in list(open_spans):
                finish(lane, key, at)
    return found + [span if until is None else span._replace(end=until) for span in open_spans.values()]


def _calls(database: PoolDatabase, rollouts: list[str]) -> list[Span]:
    """Returns the calls of rollouts as spans of the engine."""
    found: list[Span] = []
    for name in dict.fromkeys(rollouts):
        rows = database.execute("SELECT id, record FROM steps WHERE rollout_id = ? ORDER BY id LIMIT 200", (name,)).fetchall()
        for index, record in rows:
            step = orjson.loads(bytes(record))
            if created := step.get("created"):
                found.append(Span("engine", created, created + step.get("seconds", 0.0), f"call {index}", name))
    return found


def _bounds(file: Path) -> tuple[float, float] | None:
    try:
        with file.open("rb") as events:
            first = parse_event(events.readline(1 << 20))
            size = events.seek(0, os.SEEK_END)
            events.seek(max(0, size - (1 << 20)))
            last = [event for line in events.read().splitlines()[-50:] if (event := parse_event(line))]
    except OSError:
        return None
    return (float(first["time"]), float(last[-1]["time"])) if first and last else None


def _events_between(file: Path, start: float, end: float) -> tuple[list[dict[str, Any]], bool]:
    """Returns the events of a window, found by bisection, and whether there were more than are read."""
    with file.open("rb") as events:
        low, high = 0, events.seek(0, os.SEEK_END)
        while high - low > 64 * 1024:
            middle = (low + high) // 2
            events.seek(middle)
            events.readline()
            event = parse_event(events.readline(1 << 20))
            if event is None or event["time"] >= start:
                high = middle
            else:
                low = middle
        events.seek(low)
        if low:
            events.readline()
        content = events.read(MAX_BYTES)
    found = [event for line in content.splitlines() if (event := parse_event(line)) and start <= event["time"] <= end]
    return found, len(content) == MAX_BYTES and bool(found) and found[-1]["time"] < end
