"""Executors: where the author's workflow runs. Each name makes one with `executor(agent, guests)`."""

from penstock.registry import Registry

EXECUTORS = Registry("executor", {"inline": "penstock.rollout.executors.inline:InlineExecutor"})
