"""Shielded work: it comes to its end, whatever happens to whoever waits for it."""

import asyncio
import gc
from typing import Any

import pytest

from penstock.system.async_tools import finish_shielded


def test_failure_after_cancellation_prints_no_traceback():
    reported: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            await cancelled.wait()
            raise ValueError("the rollout has ended")

        caller = asyncio.create_task(finish_shielded(work()))
        await begun.wait()
        caller.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        del caller
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert reported == []
