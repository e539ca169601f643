"""What a rollout server needs of a back end."""

from penstock.rollout.server.backend import ExecutionBackend

__all__ = ["ExecutionBackend"]
