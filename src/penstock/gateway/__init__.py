"""The gateway: OpenAI-style calls in, token-exact steps in the pool."""

from penstock.gateway.app import Gateway
from penstock.gateway.call import GatewayLimits
from penstock.gateway.policies import ServedPolicy
from penstock.gateway.session import Session

__all__ = ["Gateway", "GatewayLimits", "ServedPolicy", "Session"]
