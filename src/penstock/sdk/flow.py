"""Agent Flow, as an author imports it."""

from penstock.sdk.flows.base import AgentFlowBase, ComputedReward, GeneratedReply
from penstock.sdk.flows.blackbox import BlackBoxAgentFlowBase
from penstock.sdk.flows.builtin import MultiStepAgentFlow, SingleStepSingleTurnAgentFlow
from penstock.sdk.flows.step import SubmittedStep
from penstock.sdk.flows.table import register

__all__ = [
    "AgentFlowBase",
    "BlackBoxAgentFlowBase",
    "ComputedReward",
    "GeneratedReply",
    "MultiStepAgentFlow",
    "SingleStepSingleTurnAgentFlow",
    "SubmittedStep",
    "register",
]
