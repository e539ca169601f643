"""Executors: where the author's workflow runs. Each name makes one with `executor(given)`."""

from penstock.registry import Registry

EXECUTORS = Registry(
    "executor",
    {
        "inline": "penstock.rollout.executors.inline:InlineExecutor",
        "process": "penstock.rollout.executors.process:ProcessExecutor",
        "ray": "penstock.scale.executor:RayExecutor",
        "server": "penstock.rollout.executors.server:ServerExecutor",
    },
)

SECTIONS = Registry(
    "executor section",
    {
        "process": "penstock.rollout.executors.process:ProcessSection",
        "ray": "penstock.scale.executor:RaySection",
        "server": "penstock.rollout.executors.server:ServerSection",
    },
)
"""What each takes under `[executor]`; one that is not listed takes nothing."""
