"""The gateway: OpenAI-style calls in, token-exact steps in the pool."""

from penstock.gateway.app import Gateway
from penstock.gateway.request import GatewayLimits
from penstock.gateway.session import Session
from penstock.gateway.sources import ServedPolicy

__all__ = ["Gateway", "GatewayLimits", "ServedPolicy", "Session"]
