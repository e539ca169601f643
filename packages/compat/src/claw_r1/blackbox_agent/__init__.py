"""Black-box flows: agents that use a `base_url` and the OpenAI API and know nothing about training."""

from typing import TYPE_CHECKING

from penstock_compat.lazy import lazy_attributes

if TYPE_CHECKING:
    from claw_r1.blackbox_agent.blackbox_agent_flow import BlackBoxAgentFlowBase
    from claw_r1.blackbox_agent.gsm8k_agent import GSM8KAgent
    from claw_r1.blackbox_agent.gsm8k_agent_flow import BlackBoxGSM8KAgentFlow

__all__ = ["BlackBoxAgentFlowBase", "BlackBoxGSM8KAgentFlow", "GSM8KAgent"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "BlackBoxAgentFlowBase": f"{__name__}.blackbox_agent_flow",
        "BlackBoxGSM8KAgentFlow": f"{__name__}.gsm8k_agent_flow",
        "GSM8KAgent": f"{__name__}.gsm8k_agent",
    },
)
