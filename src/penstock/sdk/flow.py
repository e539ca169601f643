"""Agent Flow, as an author imports it."""

from penstock.sdk.flow_answers import Generated, Judged
from penstock.sdk.flow_base import AgentFlowBase
from penstock.sdk.flow_blackbox import BlackBoxAgentFlowBase
from penstock.sdk.flow_multi import MultiStepAgentFlow
from penstock.sdk.flow_single import SingleStepSingleTurnAgentFlow
from penstock.sdk.flow_step import SubmittedStep
from penstock.sdk.flow_table import register

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
