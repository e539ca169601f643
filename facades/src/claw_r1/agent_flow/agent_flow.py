"""The base class of flows, their registry, and the workers that run them. Only the worker classes import Ray."""

from typing import TYPE_CHECKING

from claw_r1._names import lazy_attributes

if TYPE_CHECKING:
    from penstock.scale.manager import AgentFlowManager
    from penstock.scale.worker import AgentFlowWorker
    from penstock.sdk.flow import AgentFlowBase, register
    from penstock.sdk.flows.step import SubmittedStep as Step

__all__ = ["AgentFlowBase", "AgentFlowManager", "AgentFlowWorker", "Step", "register"]

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(("AgentFlowBase", "register"), "penstock.sdk.flow")
    | {"AgentFlowManager": "penstock.scale.manager", "AgentFlowWorker": "penstock.scale.worker"}
    | {"Step": "penstock.sdk.flows.step:SubmittedStep"},
)
