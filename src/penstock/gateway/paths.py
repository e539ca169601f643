"""The tokens of a path, end to end: a prompt is made of the parts that the graph keeps, and copies none of them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import overload


class TokenPath(Sequence[int]):
    """What a tuple of all these tokens would be, made in a time that does not depend on how many they are.

    >>> prompt = TokenPath((1, 2), (3,))
    >>> prompt.then((4, 5)) == (1, 2, 3, 4, 5), prompt[-2:], len(prompt)
    (True, (2, 3), 3)
    """

    __slots__ = ("_ends", "_parts")

    def __init__(self, *parts: tuple[int, ...]) -> None:
        self._parts = parts
        ends, end = [0], 0
        for part in parts:
            ends.append(end := end + len(part))
        self._ends = tuple(ends)
        """Where each part ends, after where the first one begins."""

    def then(self, added: tuple[int, ...]) -> "TokenPath":
        """These and `added`."""
        longer = TokenPath()
        longer._parts, longer._ends = (*self._parts, added), (*self._ends, self._ends[-1] + len(added))
        return longer

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice) and index.step not in (None, 1):
            return tuple(self)[index]
        place = range(len(self))[index]
        first = place if isinstance(place, int) else place.start
        which = bisect_right(self._ends, first) - 1
        before = self._ends[which]
        if isinstance(place, int):
            return self._parts[which][place - before]
        return tuple(islice(chain.from_iterable(self._parts[which:]), first - before, max(first, place.stop) - before))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenPath | tuple | list):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TokenPath({tuple(self)})"
