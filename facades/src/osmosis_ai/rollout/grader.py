"""Grader: what an author subclasses to reward a rollout."""

from penstock.sdk.workflow import Grader

__all__ = ["Grader"]
