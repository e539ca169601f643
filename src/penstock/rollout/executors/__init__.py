"""Executors: where the author's workflow and grader run. Each is made with `executor(context)`; see `executors.base`."""

from penstock.registry import Registry

EXECUTORS = Registry(
    "executor",
    {
        "inline": "penstock.rollout.executors.inline:InlineExecutor",
        "process": "penstock.rollout.executors.process:ProcessExecutor",
        "ray": "penstock.scale.executor:RayExecutor",
    },
    wheels={"server": "penstock-compat"},
)
