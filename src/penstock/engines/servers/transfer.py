"""Weights that go from the trainer's memory into a server's, without a file between them."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from penstock.http.client import UpstreamError


class TransferRound(NamedTuple):
    """The two sides of one exchange with a server."""

    info: dict[str, Any]
    """What the server is told."""
    work: Callable[[], None] | None = None
    """What this side does while the server does its part, such as a broadcast. It blocks, perhaps for ever."""


class WeightSender(Protocol):
    """The trainer's side of a transfer. Its methods run in a thread."""

    backend: str
    """As vLLM's `--weight-transfer-config` names it."""

    def connect(self, url: str, world_size: int) -> TransferRound:
        """Make ready for a server with so many workers; called once for each start of the server."""
        ...

    def send(self, url: str) -> TransferRound:
        """Send all weights as they are now."""
        ...


async def exchange(request: Coroutine[Any, Any, Any], work: Callable[[], None] | None, limit_s: float) -> None:
    """Do both sides at once; UpstreamError if one fails or takes longer than `limit_s`.

    A collective operation has no timeout of its own: its thread is left alone if the other side does not come, and is a daemon so
    that it cannot keep the process from ending.
    """
    done = asyncio.get_running_loop().create_future()
    if work is None:
        done.set_result(None)
    else:
        threading.Thread(target=_run, args=(work, done), name="penstock-transfer", daemon=True).start()
    asking = asyncio.ensure_future(request)
    both: set[asyncio.Future[Any]] = {asking, done}
    try:
        # After an error of one side, the other would wait in vain.
        finished, waiting = await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for future in (asking, done):
            if future in finished:
                future.result()
        if waiting:
            raise UpstreamError(f"the transfer of weights took longer than {limit_s:g} s", kind="broken", status=504)
    finally:
        asking.cancel()
        await asyncio.wait({asking})


def _run(work: Callable[[], None], done: asyncio.Future[None]) -> None:
    def finish(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    failed = None
    try:
        work()
    except Exception as cause:
        failed = UpstreamError(f"the trainer's side of the transfer failed: {cause}", kind="broken", status=500)
    if not done.get_loop().is_closed():
        done.get_loop().call_soon_threadsafe(finish, failed)
