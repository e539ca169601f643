"""Agent Flow, as an author imports it."""

from penstock.sdk.flows.answers import Generated, Judged
from penstock.sdk.flows.base import AgentFlowBase
from penstock.sdk.flows.blackbox import BlackBoxAgentFlowBase
from penstock.sdk.flows.multi import MultiStepAgentFlow
from penstock.sdk.flows.single import SingleStepSingleTurnAgentFlow
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
