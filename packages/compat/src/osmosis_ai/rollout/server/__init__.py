"""The rollout server. The web server is imported on first use of `create_rollout_server`."""

from typing import TYPE_CHECKING

from penstock_compat.lazy import lazy_attributes

if TYPE_CHECKING:
    from osmosis_ai.rollout.server.auth import ControllerAuth
    from penstock_compat.rollout_server.app import create_rollout_server

__all__ = ["ControllerAuth", "create_rollout_server"]

__getattr__ = lazy_attributes(
    __name__,
    {"ControllerAuth": "osmosis_ai.rollout.server.auth", "create_rollout_server": "penstock_compat.rollout_server.app"},
)
