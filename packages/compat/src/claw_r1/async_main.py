"""`python3 -m claw_r1.async_main KEY=VALUE …`: trains asynchronously, on Ray unless `penstock.scale.name=none`."""

import shlex
import sys
from collections.abc import Sequence
from typing import Any

import typer

from claw_r1.convert import Converted, convert, put, read_overrides
from claw_r1.keys import COMBINED_KEYS, MAPPED_KEYS
from penstock.cli.app import exit_code
from penstock.cli.train import run_training
from penstock.config import RunConfig, validate
from penstock.errors import ConfigError
from penstock.sdk.dataset import load_tasks
from penstock.view.summary import ResumeCommand

USAGE = """python3 -m claw_r1.async_main KEY=VALUE …

Needed: data.train_files, actor_rollout_ref.model.path, actor_rollout_ref.rollout.agent.default_agent_flow.
Keys of Penstock itself begin with penstock., such as penstock.scale.name=none. All keys: docs/claw-r1.md."""


DEFAULT_FLOW = "single_step_single_turn_agent"


def main(arguments: Sequence[str] | None = None, *, module: str = "claw_r1.async_main", is_async: bool = True) -> int:
    """Trains. Returns the exit code of `penstock train`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        typer.echo(USAGE)
        return 0
    command = shlex.join(["python3", "-m", module, *words])
    return exit_code(lambda: _train(words, command, is_async=is_async))


def _train(arguments: list[str], command: str, *, is_async: bool) -> None:
    converted = convert(read_overrides(arguments), is_async=is_async)
    config = run_config(converted, command.split(" ", 3)[2])
    for notice in converted.notices:
        typer.echo(f"penstock: {notice}", err=True)
    resume = ResumeCommand(command, "trainer.total_training_steps=", "trainer.resume_mode=disable")
    run_training(config, resume, fresh=converted.fresh)


def run_config(converted: Converted, where: str = "claw_r1.async_main") -> RunConfig:
    """Returns the validated settings. Error messages name Claw-R1's key, not Penstock's."""
    if "dataset.train" not in converted.settings:
        raise ConfigError(f"{where}: data.train_files is missing; give the file with the tasks, data.train_files=train.parquet")
    tree: dict[str, Any] = {"agent": {"entry": "."}, "workflow": converted.config}
    if not {"agent.flow", "agent.flows", "agent.entry"} & converted.settings.keys():
        tree["agent"]["flow"] = DEFAULT_FLOW
    if converted.settings.get("scale.name") != "none":
        tree |= {"scale": {"name": "ray"}, "rollout": {"executor": "ray"}}
    for key, value in converted.settings.items():
        put(tree, key, value)
    try:
        config = validate(RunConfig, tree, where)
    except ConfigError as error:
        raise ConfigError(_renamed(str(error))) from error
    if converted.epochs is None:
        return config
    tasks = len(load_tasks(config.dataset.train, columns=True))
    steps = max(1, tasks * converted.epochs // config.rollout.groups_per_step)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def _renamed(message: str) -> str:
    """Replaces the Penstock setting in `message` by the Claw-R1 key that sets it."""
    ours = {**{key: each.ours for key, each in MAPPED_KEYS.items()}, **{key: each[0] for key, each in COMBINED_KEYS.items()}}
    found = next((key for key, each in ours.items() if f"{each} =" in message), None)
    return message.replace(ours[found], found, 1) if found else message


if __name__ == "__main__":
    sys.exit(main())
