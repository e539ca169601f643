"""The base of black-box flows: begins, registers and completes the rollout around `_run_agent`."""

from penstock.sdk.flow import BlackBoxAgentFlowBase

__all__ = ["BlackBoxAgentFlowBase"]
