"""Agent Flow, as an author imports it."""

from penstock.sdk.flows.base import AgentFlowBase, ComputedReward, GeneratedReply
from penstock.sdk.flows.blackbox import BlackBoxAgentFlowBase
from penstock.sdk.flows.builtin import MultiStepAgentFlow, SingleStepSingleTurnAgentFlow
from penstock.sdk.flows.step import SubmittedStep
from penstock.sdk.flows.table import register

# Names that authors' flows imported before the classes were renamed.
Generated, Judged = GeneratedReply, ComputedReward

__all__ = [
    "AgentFlowBase",
    "BlackBoxAgentFlowBase",
    "ComputedReward",
    "Generated",
    "GeneratedReply",
    "Judged",
    "MultiStepAgentFlow",
    "SingleStepSingleTurnAgentFlow",
    "SubmittedStep",
    "register",
]
