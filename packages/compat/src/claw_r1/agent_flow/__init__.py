"""White-box flows: agents that call the gateway themselves and build their own steps."""

from typing import TYPE_CHECKING

from penstock_compat.lazy import lazy_attributes

if TYPE_CHECKING:
    from claw_r1.agent_flow.agent_flow import AgentFlowBase, AgentFlowManager, AgentFlowWorker, register
    from claw_r1.agent_flow.multi_step_agent_flow import MultiStepAgentFlow
    from claw_r1.agent_flow.single_step_single_turn_agent_flow import SingleStepSingleTurnAgentFlow

__all__ = [
    "AgentFlowBase",
    "AgentFlowManager",
    "AgentFlowWorker",
    "MultiStepAgentFlow",
    "SingleStepSingleTurnAgentFlow",
    "register",
]

__getattr__ = lazy_attributes(
    __name__,
    dict.fromkeys(("AgentFlowBase", "AgentFlowManager", "AgentFlowWorker", "register"), f"{__name__}.agent_flow")
    | {
        "MultiStepAgentFlow": f"{__name__}.multi_step_agent_flow",
        "SingleStepSingleTurnAgentFlow": f"{__name__}.single_step_single_turn_agent_flow",
    },
)
