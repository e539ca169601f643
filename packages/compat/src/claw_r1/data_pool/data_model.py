"""The record of one model call that a flow submits."""

from penstock_compat.flows.step import SubmittedStep as Step

__all__ = ["Step"]
