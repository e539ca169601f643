"""The rollout server. The web server is imported on first use of `create_rollout_server`."""

from typing import TYPE_CHECKING

from osmosis_ai.rollout._names import lazy_attributes

if TYPE_CHECKING:
    from osmosis_ai.rollout.server.auth import ControllerAuth
    from penstock.rollout.server.app import create_rollout_server

__all__ = ["ControllerAuth", "create_rollout_server"]

__getattr__ = lazy_attributes(
    __name__,
    {"ControllerAuth": "osmosis_ai.rollout.server.auth", "create_rollout_server": "penstock.rollout.server.app"},
)
