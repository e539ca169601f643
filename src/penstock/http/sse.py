"""Server-sent events out of bytes that the network cut wherever it liked."""

MAX_EVENT_BYTES = 64 << 20
"""Bytes of one event; a server that sends more is not one of ours."""


class SseDecoder:
    """Collects bytes and gives the `data` of each complete event; comments and other fields are left out."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._line: list[bytes] = []
        """The pieces of a line whose end has not come."""
        self._lines: list[bytes] = []
        """The data lines of an event whose end has not come."""
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes. Raises ValueError past the limit."""
        self._size += len(piece)
        if b"\n" not in piece:
            self._line.append(piece)
            self._check()
            return []
        first, *rest = piece.split(b"\n")
        lines = [b"".join([*self._line, first]), *rest]
        self._line = [lines.pop()]
        events: list[bytes] = []
        for line in lines:
            self._take(line.removesuffix(b"\r"), events)
        self._check()
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._lines.append(line[5:].removeprefix(b" "))
        elif not line:
            if self._lines:
                events.append(b"\n".join(self._lines))
            self._lines, self._size = [], 0

    def _check(self) -> None:
        if self._size > self._limit:
            raise ValueError(f"one event is longer than {self._limit} bytes")
