"""How values are spread, as inline SVG with a tooltip for each bar, without a script."""

from collections.abc import Sequence
from html import escape

BARS, WIDTH, HEIGHT, FOOT = 20, 760, 180, 24


def histogram(values: Sequence[float], *, what: str, of: str, low: float, high: float) -> str:
    """The whole `<svg>`, at least from `low` to `high`: how many of `what` have which `of`."""
    if not values:
        return f'<p class="dim">There are no {escape(what)} yet.</p>'
    low, high = min(low, *values), max(high, *values)
    width, counts = (high - low or 1.0) / BARS, [0] * BARS
    for value in values:
        counts[min(BARS - 1, int((value - low) / width))] += 1
    bars = [_bar(place, count, max(counts), _said(count, place, low, width, what, of)) for place, count in enumerate(counts)]
    ticks = [
        f'<text class="tick" x="{at * (WIDTH - 30) + 2:.0f}" y="{HEIGHT - 6}">{low + at * BARS * width:.3g}</text>'
        for at in (0, 0.5, 1)
    ]
    ticks.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{HEIGHT - FOOT}" y2="{HEIGHT - FOOT}"/>')
    label = escape(f"{of} of {len(values)} {what}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join([*bars, *ticks])}</svg>'


def _said(count: int, place: int, low: float, width: float, what: str, of: str) -> str:
    return f"{count} {what} with a {of} from {low + place * width:.3g} to {low + (place + 1) * width:.3g}"


def _bar(place: int, count: int, most: int, said: str) -> str:
    step, tall = WIDTH / BARS, (HEIGHT - FOOT - 10) * count / most
    box = f'x="{place * step + 1:.1f}" y="{HEIGHT - FOOT - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}"'
    return f'<g><rect class="dot" {box}/><title>{escape(said)}</title></g>'
