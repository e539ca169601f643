"""Numbers, times and results as short text, for terminals and for other programs."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


def misreported_text(fields: Mapping[str, Any]) -> str:
    """Reports the first agent whose reported conversation differs from the recorded one."""
    names = ", ".join(fields["transcripts"])
    return f"{fields['rollout_id']}: the agent reports another conversation as {names} than was recorded, which is graded"


NOTICES = (
    "notice",
    "loop.blocked",
    "loop.moved",
    "code.changed",
    "train.stalled",
    "train.alarm",
    "rollout.forged",
    "grading.refused",
    "checkpoint.damaged",
    "checkpoint.fallback",
    "record.damaged",
)
"""Events whose `text` people must see, also where a live view hides most lines."""


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """A line for each row, its label in its own column."""
    return "\n".join(f"  {label:<12}{text}".rstrip() for label, text in rows)


# Results as plain lines


class PlainLine(NamedTuple):
    """One number of a result for other programs: its name, value, lower and upper bound, printed with tabs and no header.

    What a number does not have, or is not known, is left empty. Later releases may add names; those that exist stay.
    """

    name: str
    value: object
    low: object = None
    high: object = None


def plain_text(lines: Iterable[PlainLine]) -> str:
    return "\n".join("\t".join(map(_plain_cell, line)) for line in lines)


def _plain_cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())


# Numbers and times as text


SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], *, width: int = 40) -> str:
    """One block per value; neighbours are averaged if there are more than `width`. A missing value is a blank.

    Rewards between 0 and 1 are drawn on that scale, so that a flat line at 0.2 looks low; others on their own range.
    """
    points = _downsample(values, width)
    known = [p for p in points if p is not None]
    if not known:
        return " " * len(points)
    low, high = min(0.0, *known), max(1.0, *known)
    if low < 0.0 or high > 1.0:
        low, high = min(known), max(known)
    return "".join(" " if p is None else _block((p - low) / (high - low) if high > low else 0.5) for p in points)


def _block(height: float) -> str:
    return SPARKS[min(len(SPARKS) - 1, int(height * len(SPARKS)))]


def _downsample(values: Sequence[float | None], width: int) -> list[float | None]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def reward_text(value: float | None) -> str:
    """Three digits, or a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def percent(share: float | None) -> str:
    """`99.98 %`, never rounded up to 100."""
    if share is None:
        return "-"
    return f"{int(share * 10000) / 100:g} %"


def rate(per_second: float | None) -> str:
    """`1,234`, or a dash for None."""
    return "-" if per_second is None else f"{per_second:,.0f}"


def counts(numbers: Mapping[str, int]) -> str:
    """`3 timeout, 1 lost`: the largest first."""
    return ", ".join(f"{count:,} {name}" for name, count in sorted(numbers.items(), key=lambda item: -item[1]))


def ranges(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)
