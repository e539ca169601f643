"""The queue of submitted steps under its name in Claw-R1. `ray.remote(DataPool)` makes an actor of it."""

from penstock_compat.flows.step_queue import StepQueue as DataPool
from penstock_compat.flows.step_queue import StepQueueConfig as DataPoolConfig

__all__ = ["DataPool", "DataPoolConfig"]
