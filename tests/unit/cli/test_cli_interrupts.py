"""Ctrl-C: once is a safe stop, twice is now, and a stuck agent cannot prevent it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import interrupts
from penstock.cli.interrupts import Interrupts

# Loaded alone: `penstock.cli` imports all commands, which takes longer than what is tested here.
MODULE = f"""
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("interrupts", {interrupts.__file__!r})
interrupts = module_from_spec(spec)
spec.loader.exec_module(interrupts)
"""
SCRIPT = """
import asyncio, os, signal, time

interrupts.GRACE_S = {grace}
interrupts.BLOCKED_S = {blocked}

async def main():
    with interrupts.Interrupts(asyncio.Event(), lambda: print("told", flush=True)):
        {body}

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("cancelled", flush=True)
"""


def ran(body: str, grace: float = 60.0, blocked: float = 60.0) -> subprocess.CompletedProcess[str]:
    code = MODULE + SCRIPT.format(body=body, grace=grace, blocked=blocked)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_work_goes_on(number):
    told: list[str] = []

    async def work() -> str:
        stop = asyncio.Event()
        with Interrupts(stop, lambda: told.append("stopping")):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stop.wait(), 10)
            await asyncio.sleep(0)
            return "done"

    assert asyncio.run(work()) == "done"
    assert told == ["stopping"]


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


def test_work_that_blocks_the_loop_is_ended_after_a_short_grace():
    result = ran("[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]; signal.pause()", grace=0.05)
    assert (result.returncode, result.stdout) == (130, "")


def test_a_third_signal_does_not_wait_for_the_grace():
    result = ran("[os.kill(os.getpid(), signal.SIGINT) for _ in range(3)]; signal.pause()")
    assert (result.returncode, result.stdout) == (130, "")


def test_one_sigterm_counts_as_two_after_a_while():
    code = MODULE + SCRIPT.format(
        body="os.kill(os.getpid(), signal.SIGTERM); await asyncio.Event().wait()", grace=60.0, blocked=60.0
    )
    code = code.replace("flush=True)):", "flush=True), terminate_s=0.05):")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "told\ncancelled\n")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "block",
    [
        "time.sleep(60)",
        "while True: pass",
        # native code that goes on after a signal: no Python handler runs, and nothing that a handler could do helps
        "import ctypes; c = ctypes.CDLL(None); [c.sleep(60) for _ in iter(int, 1)]",
        # holds the interpreter: no other thread runs
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        # the same, and it runs no handler either
        "sum(range(10**15))",
    ],
)
def test_one_signal_ends_a_loop_that_is_blocked(number, block):
    body = f"os.kill(os.getpid(), signal.{number})\n        {block}"
    result = ran(body, grace=0.1, blocked=0.1)
    assert result.returncode in (130, -signal.SIGKILL)
    assert "cancelled" not in result.stdout


@pytest.mark.parametrize(
    "ignore",
    ["signal.signal(signal.SIGTERM, signal.SIG_IGN)", "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)"],
)
def test_an_agent_cannot_take_the_signals_away(ignore):
    body = f"{ignore}\n        while True: await asyncio.sleep(0.05); os.kill(os.getpid(), signal.SIGTERM)"
    assert "told" in ran(body, grace=0.1).stdout


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc here")
def test_an_agent_finds_no_key_in_the_environment_of_the_process_beside_the_run(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    body = """
        [watcher] = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        print("it has", open(f"/proc/{watcher}/environ").read(), flush=True)"""
    told = ran(body).stdout
    assert "it has" in told and "secret" not in told


def test_a_thread_that_never_ends_keeps_neither_the_loop_nor_the_process():
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
