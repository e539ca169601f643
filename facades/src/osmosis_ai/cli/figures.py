"""Formats values for people: aligned columns, local times, sizes, durations."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

NONE = "—"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows: each column is as wide as its widest cell."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plain(value: Any) -> str:
    """Formats any value on one line."""
    return NONE if value is None else re.sub(r"\s+", " ", str(value))


def moment(text: str | None) -> str:
    """Formats as `Jan 2, 2026 3:04 PM` in the local time zone. Text without a time zone is returned unchanged."""
    try:
        read = datetime.fromisoformat(text or "")
    except ValueError:
        return text or NONE
    if read.tzinfo is None:
        return text or NONE
    local = read.astimezone()
    return f"{local:%b} {local.day}, {local.year} {local.hour % 12 or 12}:{local:%M %p}"


def size(count: int | None) -> str:
    if count is None:
        return NONE
    amount, unit = float(count), "B"
    for larger in ("KB", "MB", "GB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def duration(milliseconds: float | None) -> str | None:
    if milliseconds is None:
        return None
    seconds = round(milliseconds / 1000)
    parts = [(seconds // 3600, "h"), (seconds % 3600 // 60, "m"), (seconds % 60, "s")]
    return " ".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


def settings(config: dict[str, Any] | None) -> str | None:
    """Formats as `key=value, table.key=value`, without the model, which is shown separately."""
    texts: list[str] = []
    for key, value in sorted((config or {}).items()):
        table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        pairs = [(f"{key}.{inner}", item) for inner, item in sorted(table.items())] or [(key, value)]
        texts += [f"{name}={item}" for name, item in pairs if item is not None and name != "model_path"]
    return ", ".join(texts) or None


def two_digits(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def percent(value: float | None) -> str | None:
    """Formats a rate between 0 and 1."""
    return None if value is None else f"{value:.1%}"
