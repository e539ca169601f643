import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

from penstock.system.processes import describe_exit, end_process, last_line, read_answer

STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); sys.stdin.read()"


async def _end(code: str, grace_s: float, *, close_stdin: bool = False) -> int | None:
    process = await asyncio.create_subprocess_exec(*(sys.executable, "-c", code), stdin=PIPE, stdout=PIPE, start_new_session=True)
    assert process.stdin is not None
    assert await read_answer(process, "died") == {}
    await end_process(process, grace_s, ask=process.stdin.close if close_stdin else None)
    return process.returncode


def test_process_that_ignores_sigterm_is_killed_after_grace_period() -> None:
    assert asyncio.run(_end(STUBBORN, 0.05)) == -signal.SIGKILL


def test_process_may_be_asked_by_end_of_its_stdin() -> None:
    assert asyncio.run(_end(STUBBORN, 30.0, close_stdin=True)) == 0


def test_a_child_that_dies_before_it_answers_is_an_error() -> None:
    async def start() -> dict[str, object]:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "", stdout=PIPE, start_new_session=True)
        try:
            return await read_answer(process, "it died")
        finally:
            await end_process(process, 1.0)

    assert asyncio.run(start()) == {"error": "it died"}


def test_exit_codes_and_last_lines_in_words() -> None:
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(3) == "ended with exit code 3"
    assert last_line("first\n  why \n\n") == "why" and last_line("\n") == ""
