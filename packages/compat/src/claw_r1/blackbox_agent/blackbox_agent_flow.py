"""The base class of black-box flows. It starts, registers and completes the rollout around `_run_agent`."""

from penstock_compat.flow import BlackBoxAgentFlowBase

__all__ = ["BlackBoxAgentFlowBase"]
