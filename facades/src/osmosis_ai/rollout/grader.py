"""Grader: what an author subclasses to reward a rollout."""

from penstock.sdk.grader import Grader

__all__ = ["Grader"]
