"""The interface between a rollout server and its back end."""

from penstock.rollout.server.backend import ExecutionBackend

__all__ = ["ExecutionBackend"]
