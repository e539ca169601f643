"""Loads the author's file in a child process first: a file that hangs, exits or crashes costs a message, not the run.

Run as a module, this is the child: it reads an agent spec from stdin and writes its answer to an inherited file.
"""

import faulthandler
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.sdk.discovery import Agent, AgentSpec, check_constructors
from penstock.system.processes import describe_exit, last_line, run_module

STARTUP_S = 30.0
"""For the interpreter to start, besides the time that the author's file takes."""
GUARD = "under `if __name__ == '__main__':` or into run()"


class AgentTraits(NamedTuple):
    """What the child found out about an agent."""

    columns: bool
    """Whether it takes rows with all their columns, as flows do."""


def preflight(
    source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any], *, timeout_s: float = 60.0
) -> AgentTraits:
    """Open the agent in a child process as `open_agent` does, and construct one workflow and one grader.

    Raises the ConfigError that `open_agent` would, or one that says how the child hung or died, with the last line that it printed.
    """
    spec, entry = AgentSpec.from_config(source, workflow, grader), source.entry
    with tempfile.TemporaryFile() as answer_file, tempfile.TemporaryFile() as stack, tempfile.TemporaryFile() as output:
        code = run_module(
            __name__,
            *(str(answer_file.fileno()), str(stack.fileno()), str(timeout_s)),
            stdin=spec.write(),
            output=output.fileno(),
            timeout_s=timeout_s + STARTUP_S,
            pass_fds=(answer_file.fileno(), stack.fileno()),
        )
        answer_text, crash, printed = _read(answer_file), _crash_location(_read(stack), entry), last_line(_read(output))
    if code == 0 and answer_text:
        answer = json.loads(answer_text)
        if answer["refused"]:
            raise ConfigError(answer["refused"])
        return AgentTraits(answer["columns"])
    if crash.timed_out or code is None:
        raise ConfigError(f"{crash.text}: importing it took longer than {timeout_s:g} s; move long work {GUARD}")
    last = f" and had said {printed[:200]!r}" if printed else ""
    raise ConfigError(f"{crash.text}: importing it failed: its process {describe_exit(code)}{last}; move what did that {GUARD}")


def check_agent(agent: Agent) -> AgentTraits:
    """The same for an agent that was made in this process."""
    check_constructors(agent)
    return AgentTraits(agent.kind.keeps_columns)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


class CrashLocation(NamedTuple):
    """Where in the author's file the child hung or died."""

    text: str
    timed_out: bool
    """Whether faulthandler's timer ended it."""


def _crash_location(stack: str, entry: Path) -> CrashLocation:
    """Parse faulthandler's output: one line for each frame, the innermost first."""
    mark = f'  File "{entry.resolve()}", line '
    lines = [line.removeprefix(mark).partition(" ")[0] for line in stack.splitlines() if line.startswith(mark)]
    return CrashLocation(f"{entry}, line {lines[0]}" if lines else str(entry), stack.startswith("Timeout"))


def _child_main(verdict: int, stack: int, timeout_s: float) -> None:
    spec = AgentSpec.read(sys.stdin.buffer.read())
    faulthandler.enable(stack, all_threads=False)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
    refused, columns = None, False
    try:
        agent = spec.load()
        check_constructors(agent)
        columns = agent.kind.keeps_columns
    except ConfigError as error:
        refused = str(error)
    os.pwrite(verdict, json.dumps({"refused": refused, "columns": columns}).encode(), 0)
    os._exit(0)  # without waiting for threads or exit hooks of the author's file


if __name__ == "__main__":
    _child_main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
