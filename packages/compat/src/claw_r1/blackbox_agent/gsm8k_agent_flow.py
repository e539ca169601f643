"""The GSM8K agent as a black-box flow."""

from penstock_compat.flows.gsm8k import BlackBoxGSM8KAgentFlow

__all__ = ["BlackBoxGSM8KAgentFlow"]
