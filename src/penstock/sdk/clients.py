"""Clients of the two vendors' packages, bound to a rollout: its own token, its own headers, nothing from the environment."""

import asyncio
import importlib
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from penstock.sdk.routing import RolloutContext


class Clients:
    """Connections that the rollouts of one event loop share; made when first asked for, closed by whoever made this."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bool], Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def of(self, package: str, secure: bool) -> Any:
        """The shared connections for clients of `package`; None in another event loop, where they could not be used."""
        loop = _running_loop()
        self._loop = self._loop or loop
        if loop is None or loop is not self._loop:
            return None
        if (package, secure) not in self._made:
            self._made[package, secure] = _connections(package, secure)
        return self._made[package, secure]

    async def close(self) -> None:
        """Close them all, for everyone."""
        for connections in self._made.values():
            await connections.shut()
        self._made.clear()


def openai_client(context: "RolloutContext", transcript: str) -> "AsyncOpenAI":
    """An `openai` client for one transcript of a rollout."""
    try:
        from openai import AsyncOpenAI
    except ImportError as cause:
        raise ConfigError("ctx.openai() needs the `openai` package: pip install openai") from cause
    client = AsyncOpenAI(
        api_key=context.api_key,
        base_url=context.base_url,
        organization="",
        project="",
        http_client=_shared(context, "openai"),
    )
    return _headed(client, context, transcript)


def anthropic_client(context: "RolloutContext", transcript: str) -> "AsyncAnthropic":
    """An `anthropic` client for one transcript of a rollout."""
    try:
        from anthropic import AsyncAnthropic
    except ImportError as cause:
        raise ConfigError("ctx.anthropic() needs the `anthropic` package: pip install anthropic") from cause
    base_url = context.base_url.removesuffix("/").removesuffix("/v1")
    client = AsyncAnthropic(api_key=context.api_key, base_url=base_url, http_client=_shared(context, "anthropic"))
    return _headed(client, context, transcript)


T = TypeVar("T")


def _headed(client: T, context: "RolloutContext", transcript: str) -> T:
    """The client with the rollout's headers, instead of those that OPENAI_CUSTOM_HEADERS and its like hold for the vendor."""
    setattr(client, "_custom_headers", context.headers(transcript))  # noqa: B010  # the constructors only add to the environment's
    return client


def _shared(context: "RolloutContext", package: str) -> Any:
    secure = context.base_url.startswith("https:")
    shared = context.clients.of(package, secure) if context.clients else None
    return shared if shared is not None else _connections(package, secure, lasting=False)


def _connections(package: str, secure: bool, *, lasting: bool = True) -> Any:
    """An HTTP client as the package likes it. The gateway is ours, so proxies from the environment are left out."""
    base: Any = importlib.import_module(package).DefaultAsyncHttpxClient

    class Connections(base):
        """Stays open when a workflow closes its client, as it may: its neighbours are still calling."""

        async def aclose(self) -> None:
            if not lasting:
                await super().aclose()

        async def shut(self) -> None:
            await super().aclose()

    return Connections(trust_env=False, verify=secure)  # without TLS there is no need to read the machine's certificates


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
