"""The C library's heap of a process that works with large tensors in several threads.

glibc gives each thread its own heap and keeps what was freed there: a process in which one thread samples and another trains
holds the peaks of both for good. With one heap for all, each uses what the other freed. Elsewhere these functions do nothing.
"""

import ctypes
import os
import sys
from functools import cache

M_ARENA_MAX = -8


@cache
def _library() -> ctypes.CDLL | None:
    """Returns glibc; None where the C library is another one."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


def share_heap() -> None:
    """Makes threads that start from now on use one heap, unless MALLOC_ARENA_MAX says how many there are to be."""
    library = _library()
    if library is not None and "MALLOC_ARENA_MAX" not in os.environ:
        library.mallopt(M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Gives free memory back to the system; tenths of a second for gigabytes, in which no thread can allocate."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)
