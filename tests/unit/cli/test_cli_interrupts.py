"""Ctrl-C: once is a safe stop, twice is now, and a stuck agent cannot prevent it."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from penstock.system import async_tools
from penstock.system.async_tools import Interrupts

MODULE = f"""
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("interrupts", {async_tools.__file__!r})
interrupts = module_from_spec(spec)
spec.loader.exec_module(interrupts)
"""
SCRIPT = """
import asyncio, os, signal, time

interrupts.GRACE_S = {grace}

async def main():
    with interrupts.Interrupts(asyncio.Event(), lambda: print("told", flush=True)):
        {body}

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("cancelled", flush=True)
"""


def ran(body: str, grace: float = 60.0) -> subprocess.CompletedProcess[str]:
    code = MODULE + SCRIPT.format(body=body, grace=grace)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_to_stop_and_work_continues(number):
    reported: list[str] = []

    async def work() -> str:
        stop = asyncio.Event()
        with Interrupts(stop, lambda: reported.append("stopping")):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stop.wait(), 10)
            await asyncio.sleep(0)
            return "done"

    assert asyncio.run(work()) == "done"
    assert reported == ["stopping"]


def test_the_handlers_from_before_are_back_afterwards():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    async def work() -> None:
        with Interrupts(asyncio.Event(), lambda: None):
            assert signal.getsignal(signal.SIGINT) != before[0]

    asyncio.run(work())
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_second_signal_cancels_the_work():
    result = ran("[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]; await asyncio.Event().wait()")
    assert (result.returncode, result.stdout) == (0, "told\ncancelled\n")


def test_work_that_blocks_loop_is_ended_after_short_grace():
    result = ran("[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]; signal.pause()", grace=0.05)
    assert (result.returncode, result.stdout) == (130, "")


def test_a_third_signal_does_not_wait_for_the_grace():
    result = ran("[os.kill(os.getpid(), signal.SIGINT) for _ in range(3)]; signal.pause()")
    assert (result.returncode, result.stdout) == (130, "")


def test_one_sigterm_counts_as_two_after_a_while():
    code = MODULE + SCRIPT.format(body="os.kill(os.getpid(), signal.SIGTERM); await asyncio.Event().wait()", grace=60.0)
    code = code.replace("flush=True)):", "flush=True), terminate_s=0.05):")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "told\ncancelled\n")


def test_thread_that_never_ends_keeps_neither_loop_nor_process():
    code = """
import asyncio, threading

interrupts.GRACE_S = 0.05

async def main():
    with interrupts.Interrupts(asyncio.Event(), lambda: None):
        forever = [asyncio.create_task(asyncio.to_thread(threading.Event().wait)) for _ in range(50)]
        await asyncio.to_thread(print, "threads are left for the run itself")

asyncio.run(main())
interrupts.leave(7)
"""
    result = subprocess.run([sys.executable, "-c", MODULE + code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (7, "threads are left for the run itself\n")
