"""Numbers as short text: sparklines, clock times, counts."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], *, width: int = 40) -> str:
    """One block per value, or per run of neighbours where there are more than `width`; a missing value is a blank.

    Rewards between 0 and 1 are drawn on that scale, so that a flat line at 0.2 looks low; others on their own range.
    """
    points = _condensed(values, width)
    known = [p for p in points if p is not None]
    if not known:
        return " " * len(points)
    low, high = min(0.0, *known), max(1.0, *known)
    if low < 0.0 or high > 1.0:
        low, high = min(known), max(known)
    return "".join(" " if p is None else _block((p - low) / (high - low) if high > low else 0.5) for p in points)


def clock(seconds: float) -> str:
    """`1:05` or `2:03:09`."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def reward(value: float | None) -> str:
    """Three digits, or a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"


def percent(share: float | None) -> str:
    """`99.98 %`, never rounded up to 100."""
    if share is None:
        return "-"
    return f"{int(share * 10000) / 100:g} %"


def rate(per_second: float | None) -> str:
    """`1,234`, or a dash where there is none."""
    return "-" if per_second is None else f"{per_second:,.0f}"


def counts(numbers: Mapping[str, int]) -> str:
    """`3 timeout, 1 lost`: the largest first."""
    return ", ".join(f"{count:,} {name}" for name, count in sorted(numbers.items(), key=lambda item: -item[1]))


def ranges(numbers: Iterable[int]) -> str:
    """`0, 3-17, 20`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _block(height: float) -> str:
    return SPARKS[min(len(SPARKS) - 1, int(height * len(SPARKS)))]


def _condensed(values: Sequence[float | None], width: int) -> list[float | None]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
