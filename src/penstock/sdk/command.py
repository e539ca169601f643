"""A program in any language as an agent: run for each rollout, led to the gateway by its environment, and killed at the end.

[agent]
command = ["node", "agent.mjs"]   # any program that uses the OpenAI or the Anthropic API
entry = "grader.py"               # one Grader
"""

import asyncio
import json
import os
import re
import shutil
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, cast

from penstock.config import AgentSection, validate
from penstock.errors import ConfigError, WorkflowError
from penstock.sdk.context import AgentWorkflowContext
from penstock.sdk.discovery import Agent, LoadedGrader, find_grader, import_entry, load_built_in_grader, names_built_in_grader
from penstock.sdk.environment import rollout_environment, without_secrets
from penstock.sdk.routing import running_rollout
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig
from penstock.system.processes import describe_exit, end_group

PROMPT = "{prompt}"
"""Replaced, in an argument, by the text of the task's last message."""
GRACE_S = 1.0
"""Between SIGTERM and SIGKILL; executors give an agent at least twice that."""
MAX_VARIABLE_CHARS = 100_000
"""Linux takes 128 KiB in one variable. A larger task comes on stdin alone."""
_ERROR = re.compile(r"error|exception|fatal|panic", re.IGNORECASE)
"""Marks a line that says what went wrong; many runtimes end their output with a stack or their version."""
_TAIL_BYTES = 4096
_MAX_LINE_CHARS = 300


class CommandConfig(AgentWorkflowConfig):
    """`[workflow]` of a command; unknown fields are sent to the program with its task."""

    command: tuple[str, ...]
    folder: Path


class CommandWorkflow(AgentWorkflow[CommandConfig]):
    """Runs the program on one task; any exit code but 0 is a failure."""

    async def run(self, ctx: AgentWorkflowContext[CommandConfig]) -> None:
        """See `AgentWorkflow.run`. The program's output is kept in `ctx.artifacts_dir`."""
        config = self.config
        assert config is not None  # `command_agent` makes no other
        task = _task(ctx, config)
        with ExitStack() as stack:
            files = _files(stack, task, ctx.artifacts_dir)
            process = await _start(config, ctx.prompt, _environment(task, ctx.artifacts_dir), files, ctx.artifacts_dir)
            try:
                code = _exit_code(await process.wait())
            finally:
                await end_group(process, GRACE_S if process.returncode is None else 0.0)
            if code != 0:
                raise WorkflowError(f"{_name(config.command)} {describe_exit(code)}{_error_line(files[2])}")


def command_agent(source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Agent:
    """Returns the agent that `agent.command` names, with the grader of `agent.entry`; ConfigError if there is no such program."""
    _check_program(source.command, source.folder)
    reserved = sorted({"command", "folder"} & workflow.keys())
    if reserved:
        raise ConfigError(f"[workflow] {reserved[0]}: it is a key of [agent]; write it there, or call it something else")
    fields = {"name": _name(source.command), **workflow, "command": source.command, "folder": source.folder}
    loaded = _load_grader(source.entry, grader)
    return Agent(
        entry=source.entry,
        workflow=CommandWorkflow,
        workflow_config=validate(CommandConfig, fields, "[workflow]"),
        grader=loaded.grader,
        grader_config=loaded.config,
        source=source,
        tables=(workflow, grader),
    )


def _load_grader(entry: Path, table: Mapping[str, Any]) -> LoadedGrader:
    return (
        load_built_in_grader(table["name"], table, entry)
        if names_built_in_grader(table)
        else find_grader(import_entry(entry), table, entry)
    )


def _check_program(command: Sequence[str], folder: Path) -> None:
    program = command[0] if command else ""
    if not program:
        raise ConfigError('agent.command: names no program; write it as a list, such as ["node", "agent.mjs"]')
    if not folder.is_dir():
        raise ConfigError(f"agent.folder = {str(folder)!r}: no such folder; make it, or name the one where {program!r} is to run")
    if os.sep not in program:
        if shutil.which(program) is None:
            here = f"write './{program}'" if (folder / program).is_file() else "install it, or write its path"
            raise ConfigError(f"agent.command: no program {program!r} in $PATH; {here}")
        return
    file = folder / program
    if not file.is_file():
        raise ConfigError(f"agent.command: no file {str(file)!r}; paths are taken from agent.folder, by default the TOML file's")
    if not os.access(file, os.X_OK):
        raise ConfigError(f"agent.command: {str(file)!r} may not be executed; chmod +x it, or put its interpreter before it")


def program_file(source: AgentSection) -> Path:
    """The program that `agent.command` starts."""
    program = source.command[0]
    return source.folder / program if os.sep in program else Path(shutil.which(program) or program)


def _name(command: Sequence[str]) -> str:
    return Path(command[0]).name


def _task(ctx: AgentWorkflowContext[CommandConfig], config: CommandConfig) -> str:
    """Returns the task as JSON: a workflow's view of it, never the label."""
    fields = {
        "rollout_id": running_rollout("agent.command").rollout_id,
        "prompt": ctx.prompt,
        "metadata": ctx.metadata,
        "config": config.model_extra or {},
    }
    return json.dumps(fields, default=str)


def _environment(task: str, artifacts: Path | None) -> dict[str, str]:
    context = running_rollout("agent.command")
    own = rollout_environment(context.base_url, context.api_key, context.rollout_id)
    own |= {"PENSTOCK_TASK": task} if len(task) <= MAX_VARIABLE_CHARS else {}
    own |= {"PENSTOCK_ARTIFACTS": str(artifacts.resolve())} if artifacts else {}
    if artifacts and context.confinement and context.confinement.sandbox.name == "user":
        own |= {"HOME": str(artifacts.resolve())}  # ours is another user's
    return without_secrets(os.environ) | own


Files = tuple[IO[bytes], IO[bytes], IO[bytes]]
"""stdin, stdout, stderr. Files, not pipes: a program that does not read, or leaves children behind, then blocks nobody."""


def _files(stack: ExitStack, task: str, artifacts: Path | None) -> Files:
    stdin = _output(stack, None)
    stdin.write(task.encode())
    stdin.seek(0)
    out, err = (_output(stack, artifacts and artifacts / f"command-{name}.log") for name in ("stdout", "stderr"))
    return stdin, out, err


def _output(stack: ExitStack, file: Path | None) -> IO[bytes]:
    """Opens a new file, which is removed at the end if it is empty."""
    if file is None:
        return cast("IO[bytes]", stack.enter_context(TemporaryFile()))
    stack.callback(_remove_if_empty, file)
    return stack.enter_context(file.open("w+b"))


def _remove_if_empty(file: Path) -> None:
    with suppress(OSError):
        if file.stat().st_size == 0:
            file.unlink()


def _exit_code(code: int) -> int:
    confinement = running_rollout("agent.command").confinement
    return confinement.sandbox.exit_code(code) if confinement else code


async def _start(
    config: CommandConfig,
    prompt: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    files: Files,
    artifacts: Path | None,
) -> Process:
    question = _text(prompt[-1].get("content")) if prompt else ""
    line = [config.command[0], *(argument.replace(PROMPT, question) for argument in config.command[1:])]
    confinement, options = running_rollout("agent.command").confinement, dict[str, Any]()
    stdin, stdout, stderr = files
    try:
        if confinement is not None:
            line, options = confinement.command(line, writable=[artifacts] if artifacts else [])
        return await asyncio.create_subprocess_exec(
            *line, stdin=stdin, stdout=stdout, stderr=stderr, cwd=config.folder, env=environment, start_new_session=True, **options
        )
    except OSError as cause:
        raise WorkflowError(f"{line[0]} cannot be started: {cause.strerror}; check agent.command and agent.folder") from cause


def _text(content: Any) -> str:
    """Returns a message's text, or that of its parts."""
    if not isinstance(content, list):
        return str(content or "")
    parts = cast("list[dict[str, Any]]", content)
    return "\n".join(str(part["text"]) for part in parts if "text" in part)


def _error_line(stderr: IO[bytes]) -> str:
    """Returns the last line that mentions an error, else the last line, with a colon before it; empty without output."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = [" ".join(line.split()) for line in stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return f": {(errors or lines)[-1][:_MAX_LINE_CHARS]}" if lines else ""
