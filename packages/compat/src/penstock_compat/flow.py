"""Agent Flow, as an author imports it."""

from penstock_compat.flows.base import AgentFlowBase, BlackBoxAgentFlowBase, ComputedReward, GeneratedReply
from penstock_compat.flows.builtin import MultiStepAgentFlow, SingleStepSingleTurnAgentFlow
from penstock_compat.flows.step import SubmittedStep
from penstock_compat.flows.table import register

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
