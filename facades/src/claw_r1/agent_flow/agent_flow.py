"""The base class of flows, their registry, and the workers that run them. Only the worker classes import Ray."""

from typing import TYPE_CHECKING

from claw_r1._names import lazy_attributes

if TYPE_CHECKING:
    from penstock.scale.flow_batches import FlowBatchActor as AgentFlowWorker
    from penstock.scale.flow_batches import FlowBatchActors as AgentFlowManager
    from penstock.sdk.flow import AgentFlowBase, register
    from penstock.sdk.flows.batches import FlowBatchRunner as AgentFlowWorkerBase
    from penstock.sdk.flows.step import SubmittedStep as Step

__all__ = ["AgentFlowBase", "AgentFlowManager", "AgentFlowWorker", "AgentFlowWorkerBase", "Step", "register"]

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(("AgentFlowBase", "register"), "penstock.sdk.flow")
    | {
        "AgentFlowManager": "penstock.scale.flow_batches:FlowBatchActors",
        "AgentFlowWorker": "penstock.scale.flow_batches:FlowBatchActor",
    }
    | {"AgentFlowWorkerBase": "penstock.sdk.flows.batches:FlowBatchRunner"}
    | {"Step": "penstock.sdk.flows.step:SubmittedStep"},
)
