"""A program in any language as an agent: run for each rollout, led to the gateway by its environment, ended with all it started.

[agent]
command = ["node", "agent.mjs"]   # any program that speaks the OpenAI or the Anthropic API
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
"""Stands, in an argument, for the text of the task's last message."""
GRACE_S = 1.0
"""Between asking a late or cancelled program to end and killing it; executors give an agent at least twice that."""
LARGEST_VARIABLE = 100_000
"""Bytes; Linux takes 128 KiB in one variable. A larger task comes on stdin alone."""
_ERROR = re.compile(r"error|exception|fatal|panic", re.IGNORECASE)
"""In a line that says what went wrong; many runtimes end with a stack or their version."""
_TAIL = 4096
_LONGEST = 300


class CommandConfig(AgentWorkflowConfig):
    """`[workflow]` of a command: fields that penstock does not know are told to the program with its task."""

    command: tuple[str, ...]
    folder: Path


class CommandWorkflow(AgentWorkflow[CommandConfig]):
    """Runs the program on one task. It has done well where its exit code is 0."""

    async def run(self, ctx: AgentWorkflowContext[CommandConfig]) -> None:
        """See `AgentWorkflow.run`. What the program prints is kept in `ctx.artifacts_dir`."""
        config = self.config
        assert config is not None  # `command_agent` makes no other
        task = _task(ctx, config)
        with ExitStack() as stack:
            files = _files(stack, task, ctx.artifacts_dir)
            process = await _start(config, ctx.prompt, _environment(task, ctx.artifacts_dir), files)
            try:
                code = await process.wait()
            finally:
                await end_group(process, GRACE_S if process.returncode is None else 0.0)
            if code != 0:
                raise WorkflowError(f"{_name(config.command)} {describe_exit(code)}{_last_words(files[2])}")


def command_agent(source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Agent:
    """The agent that `agent.command` names, with the grader of `agent.entry`; ConfigError where there is no such program."""
    _check_program(source.command, source.folder)
    taken = sorted({"command", "folder"} & workflow.keys())
    if taken:
        raise ConfigError(f"[workflow] {taken[0]}: it is a key of [agent]; write it there, or call it something else")
    fields = {"name": _name(source.command), **workflow, "command": source.command, "folder": source.folder}
    judge = _judge(source.entry, grader)
    return Agent(
        entry=source.entry,
        workflow=CommandWorkflow,
        workflow_config=validate(CommandConfig, fields, "[workflow]"),
        grader=judge.grader,
        grader_config=judge.config,
        source=source,
        tables=(workflow, grader),
    )


def _judge(entry: Path, table: Mapping[str, Any]) -> LoadedGrader:
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


def _name(command: Sequence[str]) -> str:
    return Path(command[0]).name


def _task(ctx: AgentWorkflowContext[CommandConfig], config: CommandConfig) -> str:
    """The task as JSON: what a workflow sees of it, never the label."""
    told = {
        "rollout_id": running_rollout("agent.command").rollout_id,
        "prompt": ctx.prompt,
        "metadata": ctx.metadata,
        "config": config.model_extra or {},
    }
    return json.dumps(told, default=str)


def _environment(task: str, artifacts: Path | None) -> dict[str, str]:
    context = running_rollout("agent.command")
    own = rollout_environment(context.base_url, context.api_key, context.rollout_id)
    own |= {"PENSTOCK_TASK": task} if len(task) <= LARGEST_VARIABLE else {}
    own |= {"PENSTOCK_ARTIFACTS": str(artifacts.resolve())} if artifacts else {}
    return without_secrets(os.environ) | own


Files = tuple[IO[bytes], IO[bytes], IO[bytes]]
"""stdin, stdout, stderr. Files, so that neither a program that does not read nor one that leaves children holds anyone up."""


def _files(stack: ExitStack, task: str, artifacts: Path | None) -> Files:
    stdin = _output(stack, None)
    stdin.write(task.encode())
    stdin.seek(0)
    out, err = (_output(stack, artifacts and artifacts / f"command-{name}.log") for name in ("stdout", "stderr"))
    return stdin, out, err


def _output(stack: ExitStack, file: Path | None) -> IO[bytes]:
    """A new file, which goes again if nothing is written to it."""
    if file is None:
        return cast("IO[bytes]", stack.enter_context(TemporaryFile()))
    stack.callback(_drop_empty, file)
    return stack.enter_context(file.open("w+b"))


def _drop_empty(file: Path) -> None:
    with suppress(OSError):
        if file.stat().st_size == 0:
            file.unlink()


async def _start(
    config: CommandConfig, prompt: Sequence[Mapping[str, Any]], environment: Mapping[str, str], files: Files
) -> Process:
    asked = _text(prompt[-1].get("content")) if prompt else ""
    line = [config.command[0], *(argument.replace(PROMPT, asked) for argument in config.command[1:])]
    stdin, stdout, stderr = files
    try:
        return await asyncio.create_subprocess_exec(
            *line, stdin=stdin, stdout=stdout, stderr=stderr, cwd=config.folder, env=environment, start_new_session=True
        )
    except OSError as cause:
        raise WorkflowError(f"{line[0]} cannot be started: {cause.strerror}; check agent.command and agent.folder") from cause


def _text(content: Any) -> str:
    """Of a message: its text, or that of its parts."""
    if not isinstance(content, list):
        return str(content or "")
    parts = cast("list[dict[str, Any]]", content)
    return "\n".join(str(part["text"]) for part in parts if "text" in part)


def _last_words(stderr: IO[bytes]) -> str:
    """Why it failed, to end a sentence with: its last line that speaks of an error, else its last; nothing where there is none."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TAIL))
    lines = [" ".join(line.split()) for line in stderr.read().decode("utf-8", "replace").splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.search(line)]
    return f": {(named or lines)[-1][:_LONGEST]}" if lines else ""
