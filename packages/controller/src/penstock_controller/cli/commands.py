"""Adds the controller's commands to the `penstock` command line; an entry point of the group `penstock.command`."""

import typer

from penstock_controller.cli import controller, datasets, models, runs, secrets, workspace


def add_commands(root: typer.Typer, groups: dict[str, typer.Typer]) -> None:
    root.command("doctor")(workspace.doctor)
    runs.add_run_commands(groups["train"], "train")
    runs.add_run_commands(groups["eval"], "eval")
    workspace.add_rollout_commands(groups["rollout"])
    models.add_model_commands(groups["model"])
    groups["dataset"] = datasets.app
    groups["secret"] = secrets.app
    groups["controller"] = controller.app
