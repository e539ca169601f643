"""The event log of a run: each event is appended to `events.jsonl` and passed to listeners."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

Listener = Callable[[str, dict[str, Any]], None]


class Events:
    """The run's event log. An event is a kind ("rollout.end", "train.step", …) and plain JSON fields."""

    def __init__(self, path: Path | None = None) -> None:
        self._listeners: list[Listener] = []
        self._file = path.open("ab", buffering=0) if path else None

    def listen(self, listener: Listener) -> None:
        """Call `listener(kind, fields)` on every event from now on."""
        self._listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> None:
        """Write an event and call the listeners. The wall time is a label; the order of lines is the order of events."""
        if self._file:
            self._file.write(json_line({"time": round(time.time(), 3), "kind": kind, **fields}))
        for listener in self._listeners:
            listener(kind, fields)

    def close(self) -> None:
        """Close the file; later events reach the listeners only."""
        if self._file:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def json_line(event: dict[str, Any]) -> bytes:
    """Encode plain fields as a line of JSON, whatever text they hold."""
    try:
        return orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate in an author's message must not end the run
        return orjson.dumps(_whole_text(event), option=orjson.OPT_APPEND_NEWLINE)


def _whole_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _whole_text(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_whole_text(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
