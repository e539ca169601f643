"""The interface between a rollout server and its back end."""

from penstock_compat.rollout_server.backend import ExecutionBackend

__all__ = ["ExecutionBackend"]
