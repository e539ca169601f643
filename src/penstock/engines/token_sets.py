"""Sets of token ids as bytes: those that a token was chosen from.

A set is stored as its ids or as a bit for each token of the vocabulary, whichever is shorter. Equal sets have equal bytes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IDS, BITS = b"i", b"b"
"""The first byte."""


def pack_set(allowed: NDArray[np.bool_]) -> bytes:
    """Pack one row, [vocab]."""
    ids = np.flatnonzero(allowed)
    if 4 * len(ids) < len(allowed) // 8:
        return IDS + ids.astype("<i4").tobytes()
    return BITS + np.packbits(allowed, bitorder="little").tobytes()


def pack_bits(bits: NDArray[np.uint8], vocab_size: int) -> bytes:
    """Pack one row that is a bit for each token, the lowest first, [vocab / 8] or more."""
    return pack_set(np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_))


def in_set(token_id: int, packed: bytes) -> bool:
    if packed[:1] == IDS:
        ids = np.frombuffer(packed, "<i4", offset=1)
        at = int(np.searchsorted(ids, token_id))
        return at < len(ids) and bool(ids[at] == token_id)
    byte = 1 + token_id // 8
    return not packed or (byte < len(packed) and bool(packed[byte] >> token_id % 8 & 1))


def unpack_sets(sets: Sequence[bytes], vocab_size: int) -> NDArray[np.bool_]:
    """Returns [sets, vocab]. An empty one stands for all tokens."""
    rows = np.zeros((len(sets), vocab_size), np.bool_)
    for row, packed in zip(rows, sets, strict=True):
        if packed[:1] == IDS:
            row[np.frombuffer(packed, "<i4", offset=1)] = True
        elif packed:
            bits = np.unpackbits(np.frombuffer(packed, np.uint8, offset=1), count=vocab_size, bitorder="little")
            row[:] = bits.view(np.bool_)
        else:
            row[:] = True
    return rows
