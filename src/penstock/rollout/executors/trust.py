"""What an executor keeps from agents, and what it says at the start of a run where it cannot."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import penstock
from penstock.rollout.executors.base import ExecutorContext
from penstock.sdk.command import CommandWorkflow, program_file
from penstock.sdk.discovery import Agent
from penstock.system.sandbox import Confinement, Sandbox, SandboxWish, choose_sandbox

PACKAGE = Path(penstock.__file__).parent
TOOLS = re.compile(
    r"\bsubprocess\b|\bos\.(system|popen|exec|spawn|posix_spawn)|create_subprocess_|\bpty\b|\bshell\b|(?<![.\w])(eval|exec)\("
    r"|ShellTool|PythonREPL|python_repl|FileManagementToolkit|file_write|strands_tools|CodeInterpreter",
    re.IGNORECASE,
)
"""Marks an agent's file that lets the policy run programs or code; best effort."""
REMEDY = 'set rollout.executor = "process"'


def starts_programs(context: ExecutorContext) -> bool:
    """Whether each rollout is a program, which can be started in a sandbox."""
    return issubclass(context.agent.workflow, CommandWorkflow)


def confine_programs(context: ExecutorContext, wish: SandboxWish) -> Confinement:
    """Chooses the sandbox for an agent's programs, and says what it does not keep from them."""
    agent = context.agent
    sandbox = choose_program_sandbox(agent, wish)
    confinement = Confinement(
        sandbox=sandbox,
        hidden=(*context.hidden, context.scratch.root),
        readonly=tuple(path for path in (agent.entry, PACKAGE) if path.exists()),
        visible=visible_paths(context),
    )
    announce_sandbox(context, sandbox)
    return confinement


def choose_program_sandbox(agent: Agent, wish: SandboxWish) -> Sandbox:
    """Chooses the sandbox for the programs of an agent's command."""
    return choose_sandbox(wish, needs=[agent.source.folder, program_file(agent.source)])


def visible_paths(context: ExecutorContext) -> tuple[Path, ...]:
    """Returns what an agent needs that is inside of a hidden folder."""
    hidden = [path.resolve() for path in context.hidden]
    needed = {path.resolve() for path in (context.agent.entry.parent, context.agent.source.folder, Path.cwd(), Path(sys.prefix))}
    return tuple(sorted(path for path in needed if any(path.is_relative_to(each) for each in hidden)))


def announce_sandbox(context: ExecutorContext, sandbox: Sandbox) -> None:
    """Says in one line what agents can reach, if that is more than nothing."""
    if text := sandbox_notice(sandbox, context.hidden):
        context.events.emit("notice", text=text)


def sandbox_notice(sandbox: Sandbox, hidden: Iterable[Path]) -> str:
    """What agents can reach in a sandbox, in one line; empty if it is nothing."""
    if not sandbox.isolates:
        return f"agents run without a sandbox ({sandbox.reason}): they can read the run's files, labels included, and each other"
    if sandbox.name != "user":
        return ""
    text = "agents run under user ids of their own: they write to their artifacts folder and to /tmp"
    if exposed := sandbox.exposed(hidden):
        files = ", ".join(map(str, exposed))
        text += f", and can read what every user can; hide it with: chmod -R o-rwx {files}"
    return text


def announce_trusted(context: ExecutorContext, executor: str = "inline") -> None:
    """Says that an agent is trusted, if it looks like one that runs programs or code for the policy."""
    home = context.agent.entry.parent.resolve()
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {Path(file) for file in modules if file and file.endswith(".py")} | {context.agent.entry.resolve()}
    for file in sorted(file for file in files if file.parent == home and file.is_file()):
        if found := TOOLS.search(file.read_text(errors="replace")):
            trusted = f"{file.name} has {found[0]!r}: {executor} agents are trusted with the memory and files of their process"
            return context.events.emit("notice", text=f"{trusted}; if tools run what the policy writes, {REMEDY}")
    return None
