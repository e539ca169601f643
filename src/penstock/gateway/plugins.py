"""Routes that other wheels add to the gateway."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from starlette.types import ASGIApp

from penstock.gateway.auth import GatewayTokens
from penstock.gateway.named_rollouts import NamedRollouts
from penstock.gateway.pipeline import CallPipeline
from penstock.gateway.request import GatewayLimits
from penstock.gateway.routes import Route
from penstock.gateway.session import Sessions
from penstock.pool.base import Pool
from penstock.records import Message
from penstock.registry import Registry

ROUTES = Registry("gateway routes", {})
"""Classes that follow `RoutePlugin`, from the entry points of the group `penstock.gateway_routes`."""


class RewardFunction(Protocol):
    def __call__(self, rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> Awaitable[float]:
        """`rollout_id` is empty if unknown; `fields` are of the dataset row. GraderError if there is no reward."""
        ...


class GatewayParts(NamedTuple):
    """What a plug-in gets of the gateway."""

    pool: Pool
    sessions: Sessions
    named: NamedRollouts
    """Opens rollouts that callers name themselves."""
    pipeline: CallPipeline
    tokens: GatewayTokens
    limits: GatewayLimits
    reward_function: Callable[[], RewardFunction | None]
    """Returns the run's grader as a function; None if rewards cannot be computed."""
    has_run: bool
    """Whether a run uses this gateway, and grades its rollouts."""


class RoutePlugin(Protocol):
    """Further routes of a gateway. It is made once, with the gateway; nothing is started or closed."""

    def __init__(self, parts: GatewayParts) -> None: ...

    def routes(self) -> list[Route]:
        """Returns the routes to add, each with the token that it needs."""
        ...

    def model_route(self, dialect: str, route: ASGIApp) -> ASGIApp:
        """Returns the endpoint of a dialect's model route: `route`, or one that changes the request and then calls `route`."""
        ...
