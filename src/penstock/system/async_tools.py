"""Small asyncio tools."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


SETTLE_S = 30.0
"""Bound on a write that is finished although its caller was cancelled."""


async def settled(work: Coroutine[Any, Any, T]) -> T:
    """Await a short write to its end; a cancellation that comes meanwhile goes on afterwards."""
    job = asyncio.create_task(work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait({job}, timeout=SETTLE_S)
        raise
