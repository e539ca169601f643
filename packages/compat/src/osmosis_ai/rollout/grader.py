"""The base class of graders."""

from penstock.sdk.workflow import Grader

__all__ = ["Grader"]
