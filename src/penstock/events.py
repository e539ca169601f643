"""What happens in a run, told once: appended to `events.jsonl` and to whoever listens."""

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
        """Tell everybody. The wall time is a label; order is the order of lines."""
        if self._file:
            line = orjson.dumps({"time": round(time.time(), 3), "kind": kind, **fields}, option=orjson.OPT_APPEND_NEWLINE)
            self._file.write(line)
        for listener in self._listeners:
            listener(kind, fields)

    def close(self) -> None:
        """Let go of the file; later events reach the listeners only."""
        if self._file:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
