"""A first try of the author's file in a process of its own: a file that hangs, exits or crashes costs a message, not the run.

As a module that is run, it is that process: a recipe comes in on stdin, and its verdict goes to the file that it is given.
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
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.discovery import check_constructors
from penstock.system.processes import describe_exit, last_line, run_module

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
    recipe, entry = AgentSpec.from_config(source, workflow, grader), source.entry
    with tempfile.TemporaryFile() as verdict, tempfile.TemporaryFile() as stack, tempfile.TemporaryFile() as output:
        code = run_module(
            __name__,
            *(str(verdict.fileno()), str(stack.fileno()), str(timeout_s)),
            stdin=recipe.write(),
            output=output.fileno(),
            timeout_s=timeout_s + STARTUP_S,
            pass_fds=(verdict.fileno(), stack.fileno()),
        )
        told, where, said = _read(verdict), _line(_read(stack), entry), last_line(_read(output))
    if code == 0 and told:
        answer = json.loads(told)
        if answer["refused"]:
            raise ConfigError(answer["refused"])
        return AgentTraits(answer["columns"])
    if where.late or code is None:
        raise ConfigError(f"{where.text}: importing it took longer than {timeout_s:g} s; move long work {GUARD}")
    last = f" and had said {said[:200]!r}" if said else ""
    raise ConfigError(f"{where.text}: importing it failed: its process {describe_exit(code)}{last}; move what did that {GUARD}")


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


class Place(NamedTuple):
    """Where in the author's file a process hung or died."""

    text: str
    late: bool
    """Whether it was its own alarm clock that ended it."""


def _line(stack: str, entry: Path) -> Place:
    """From what faulthandler wrote: one line for each frame, the innermost first."""
    mark = f'  File "{entry.resolve()}", line '
    lines = [line.removeprefix(mark).partition(" ")[0] for line in stack.splitlines() if line.startswith(mark)]
    return Place(f"{entry}, line {lines[0]}" if lines else str(entry), stack.startswith("Timeout"))


def _attempt(verdict: int, stack: int, timeout_s: float) -> None:
    """What the other process does."""
    recipe = AgentSpec.read(sys.stdin.buffer.read())
    faulthandler.enable(stack, all_threads=False)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
    refused, columns = None, False
    try:
        agent = recipe.load()
        check_constructors(agent)
        columns = FLOW_AGENTS in sys.modules and sys.modules[FLOW_AGENTS].is_flow_agent(agent)
    except ConfigError as error:
        refused = str(error)
    os.pwrite(verdict, json.dumps({"refused": refused, "columns": columns}).encode(), 0)
    os._exit(0)  # whatever threads and exit hooks the file left behind


if __name__ == "__main__":
    _attempt(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
