"""Agent Flow, as an author imports it."""

from penstock.sdk.flows.base import AgentFlowBase, Generated, Judged
from penstock.sdk.flows.blackbox import BlackBoxAgentFlowBase
from penstock.sdk.flows.builtin import MultiStepAgentFlow, SingleStepSingleTurnAgentFlow
from penstock.sdk.flows.step import SubmittedStep
from penstock.sdk.flows.table import register

__all__ = [
    "AgentFlowBase",
    "BlackBoxAgentFlowBase",
    "Generated",
    "Judged",
    "MultiStepAgentFlow",
    "SingleStepSingleTurnAgentFlow",
    "SubmittedStep",
    "register",
]
