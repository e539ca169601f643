"""Decoder for server-sent events: bytes in pieces of any size to the `data` of whole events."""

MAX_EVENT_BYTES = 64 << 20


class SseDecoder:
    """Collects bytes and returns the `data` of each complete event. Comments and other fields are ignored."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._line: list[bytes] = []
        """The pieces of the last, unfinished line."""
        self._data: list[bytes] = []
        """The data lines of the last, unfinished event."""
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that `piece` completes. Raises ValueError if one event is longer than the limit."""
        self._size += len(piece)
        if b"\n" not in piece:
            self._line.append(piece)
            self._check_size()
            return []
        first, *rest = piece.split(b"\n")
        lines = [b"".join([*self._line, first]), *rest]
        self._line = [lines.pop()]
        events: list[bytes] = []
        for line in lines:
            self._add_line(line.removesuffix(b"\r"), events)
        self._check_size()
        return events

    def _add_line(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data, self._size = [], 0

    def _check_size(self) -> None:
        if self._size > self._limit:
            raise ValueError(f"one event is longer than {self._limit} bytes")
