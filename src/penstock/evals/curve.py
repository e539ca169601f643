"""The reward curve as inline SVG: axes, a line, and a tooltip per step, without a script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step of the curve."""

    step: int
    reward: float
    title: str
    """What its tooltip says."""


def reward_curve(points: list[Point], heldout: Sequence[Point] = ()) -> str:
    """The whole `<svg>`; `heldout` are rings beside the line, of steps that it has.

    Rewards between 0 and 1 are drawn on that scale, others on a round one around them.
    """
    if not points:
        return '<p class="dim">No step has been trained yet.</p>'
    first, last = points[0].step, points[-1].step
    rings = [point for point in heldout if first <= point.step <= last]
    low, high, ticks = _scale([p.reward for p in (*points, *rings)])

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - first) / (last - first) if last > first else 0.5)

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (reward - low) / (high - low))

    parts = [_row(tick, y(tick)) for tick in ticks]
    parts += [_column(step, x(step)) for step in _some_steps(first, last)]
    line = " ".join(f"{x(p.step):.1f},{y(p.reward):.1f}" for p in points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    reach = max(3.0, (WIDTH - LEFT - RIGHT) / max(1, last - first) / 2)
    parts += [_mark(p, x(p.step), y(p.reward), reach) for p in points]
    parts += [_ring(p, x(p.step), y(p.reward)) for p in rings]
    label = f"Mean reward per step, from {points[0].reward:.3f} to {points[-1].reward:.3f}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _scale(rewards: list[float]) -> tuple[float, float, list[float]]:
    low, high = min(rewards), max(rewards)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]
    span = (high - low) or max(1.0, abs(high))
    unit = 10 ** math.floor(math.log10(span))
    step = next(unit * m for m in (0.25, 0.5, 1, 2.5) if span / (unit * m) <= 5)
    bottom, top = math.floor(low / step), math.ceil(high / step)
    top = max(top, bottom + 1)
    return bottom * step, top * step, [n * step for n in range(bottom, top + 1)]


def _some_steps(first: int, last: int) -> list[int]:
    """At most about ten steps to name on the axis."""
    gap = max(1, math.ceil((last - first + 1) / 10))
    return list(range(first, last + 1, gap))


def _row(tick: float, y: float) -> str:
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'


def _column(step: int, x: float) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{step}</text>'


def _ring(point: Point, x: float, y: float) -> str:
    return f'<g><circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="5"/><title>{escape(point.title)}</title></g>'


def _mark(point: Point, x: float, y: float, reach: float) -> str:
    dot = f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    target = f'<rect class="target" x="{x - reach:.1f}" y="{TOP}" width="{2 * reach:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
    return f"<g>{target}{dot}<title>{escape(point.title)}</title></g>"
