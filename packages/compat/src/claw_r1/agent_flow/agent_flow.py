"""The base class of flows, their registry, and the workers that run them. Only the worker classes import Ray."""

from typing import TYPE_CHECKING

from penstock_compat.lazy import lazy_attributes

if TYPE_CHECKING:
    from penstock_compat.flow import AgentFlowBase, register
    from penstock_compat.flows.batches import FlowBatchRunner as AgentFlowWorkerBase
    from penstock_compat.flows.ray_batches import FlowBatchActor as AgentFlowWorker
    from penstock_compat.flows.ray_batches import FlowBatchActors as AgentFlowManager
    from penstock_compat.flows.step import SubmittedStep as Step

__all__ = ["AgentFlowBase", "AgentFlowManager", "AgentFlowWorker", "AgentFlowWorkerBase", "Step", "register"]

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(("AgentFlowBase", "register"), "penstock_compat.flow")
    | {
        "AgentFlowManager": "penstock_compat.flows.ray_batches:FlowBatchActors",
        "AgentFlowWorker": "penstock_compat.flows.ray_batches:FlowBatchActor",
    }
    | {"AgentFlowWorkerBase": "penstock_compat.flows.batches:FlowBatchRunner"}
    | {"Step": "penstock_compat.flows.step:SubmittedStep"},
)
