"""A first try of the author's file in a process of its own: a file that hangs, exits or crashes costs a message, not the run.

As a module that is run, it is that process: a recipe comes in on stdin, and its verdict goes to the file that it is given.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.sdk.agent_spec import AgentSpec, command
from penstock.sdk.discovery import construct
from penstock.system.process_group import how_ended

STARTUP_S = 30.0
"""For an interpreter to come up, besides what the author's file takes."""
FLOW_AGENTS = "penstock.sdk.flows.agent"
"""Imported where the agent is made of flows, and else not."""
GUARD = "under `if __name__ == '__main__':` or into run()"


class AgentTraits(NamedTuple):
    """What is known of an agent that was tried."""

    columns: bool
    """Whether it takes rows with all their columns, as flows do."""


def preflight(
    source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any], *, timeout_s: float = 60.0
) -> AgentTraits:
    """Open the agent in another process as `open_agent` does, and make one workflow and one grader.

    Raises the ConfigError that `open_agent` would, or one that says how the process hung or died. What the file prints is dropped,
    but for the last line of one that died.
    """
    recipe, entry = AgentSpec.to_load(source, workflow, grader), source.entry
    with tempfile.TemporaryFile() as verdict, tempfile.TemporaryFile() as stack, tempfile.TemporaryFile() as output:
        code = _run_child(recipe, (verdict, stack, output), timeout_s)
        told, where, said = _read(verdict), _line(_read(stack), entry), _read(output).split("\n")
    if code == 0 and told:
        answer = json.loads(told)
        if answer["refused"]:
            raise ConfigError(answer["refused"])
        return AgentTraits(answer["columns"])
    if where.late or code is None:
        raise ConfigError(f"{where.text}: importing it took longer than {timeout_s:g} s; move long work {GUARD}")
    last = next((f" and had said {line.strip()[:200]!r}" for line in reversed(said) if line.strip()), "")
    raise ConfigError(f"{where.text}: importing it failed: its process {how_ended(code)}{last}; move what did that {GUARD}")


def _run_child(recipe: AgentSpec, files: tuple[IO[bytes], IO[bytes], IO[bytes]], timeout_s: float) -> int | None:
    """The exit code of a process that tries the recipe, and of which nothing is left; None where it had to be killed."""
    verdict, stack, output = (file.fileno() for file in files)
    process = subprocess.Popen(
        [*command(__name__), str(verdict), str(stack), str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=(verdict, stack),
        start_new_session=True,
    )
    try:
        process.communicate(recipe.write(), timeout=timeout_s + STARTUP_S)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


class CrashLocation(NamedTuple):
    """Where in the author's file a process hung or died."""

    text: str
    late: bool
    """Whether it was its own alarm clock that ended it."""


def _line(stack: str, entry: Path) -> CrashLocation:
    """From what faulthandler wrote: one line for each frame, the innermost first."""
    mark = f'  File "{entry.resolve()}", line '
    lines = [line.removeprefix(mark).partition(" ")[0] for line in stack.splitlines() if line.startswith(mark)]
    return CrashLocation(f"{entry}, line {lines[0]}" if lines else str(entry), stack.startswith("Timeout"))


def _child_main(verdict: int, stack: int, timeout_s: float) -> None:
    """What the other process does."""
    recipe = AgentSpec.read(sys.stdin.buffer.read())
    faulthandler.enable(stack, all_threads=False)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
    refused, columns = None, False
    try:
        agent = recipe.load()
        construct(agent)
        columns = FLOW_AGENTS in sys.modules and sys.modules[FLOW_AGENTS].is_flow_agent(agent)
    except ConfigError as error:
        refused = str(error)
    os.pwrite(verdict, json.dumps({"refused": refused, "columns": columns}).encode(), 0)
    os._exit(0)  # whatever threads and exit hooks the file left behind


if __name__ == "__main__":
    _child_main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
