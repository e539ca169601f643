"""Clients of the two vendors' packages, bound to a rollout: its own token, its own headers, nothing from the environment."""

import asyncio
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

    from penstock.sdk.routing import RolloutContext


T = TypeVar("T")

NO_KEY = "none"
"""Sent to an endpoint that asks for no key: an empty one would make the packages look for the user's own."""


DIRECT: dict[str, None] = {"all://": None, "http://": None, "https://": None}
"""No proxy, whatever the environment says: `anthropic` reads it even where httpx is told not to."""


class Clients:
    """Connections that the rollouts of one event loop share; made when first asked for, closed by whoever made this.

    The loop is the one that this is made in; made outside of any, the first one that asks.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, bool], Any] = {}
        self._loop = _running_loop()

    def of(self, package: str, secure: bool) -> Any:
        """The shared connections for clients of `package`; None in another event loop, where they could not be used."""
        return self.kept((package, secure), lambda: _connections(package, secure))

    def kept(self, key: tuple[str, bool], make: Callable[[], T]) -> T | None:
        """What `make` made when `key` was first asked for; it is closed by its `shut`. None in another event loop."""
        loop = _running_loop()
        self._loop = self._loop or loop
        if loop is None or loop is not self._loop:
            return None
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

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
        api_key=context.api_key or NO_KEY,
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
    client = AsyncAnthropic(api_key=context.api_key or NO_KEY, base_url=base_url, http_client=_shared(context, "anthropic"))
    return _headed(client, context, transcript)


def openai_blocking_client(context: "RolloutContext", transcript: str) -> "OpenAI":
    """The same without `async`, for frameworks that call from threads of their own."""
    from openai import DefaultHttpxClient, OpenAI

    class Connections(DefaultHttpxClient):
        """One for each call, so that none is left open when nobody closes the client."""

        def send(self, request: Any, **options: Any) -> Any:
            refuse_to_block("a call without await", "the framework's async form, such as `ainvoke`")
            request.headers["connection"] = "close"
            return super().send(request, **options)

    connections = Connections(trust_env=False, verify=context.base_url.startswith("https:"), follow_redirects=False)
    key = context.api_key or NO_KEY
    client = OpenAI(api_key=key, base_url=context.base_url, organization="", project="", http_client=connections)
    return _headed(client, context, transcript)


def refuse_to_block(what: str, instead: str) -> None:
    """RuntimeError where an event loop runs in this thread: stopped, it could not serve the answer that is waited for."""
    if _running_loop() is not None:
        raise RuntimeError(
            f"{what} would hold up the event loop, and with it the gateway that must answer; use {instead}, or asyncio.to_thread"
        )


def _headed(client: T, context: "RolloutContext", transcript: str) -> T:
    """The client with the rollout's headers, instead of those that OPENAI_CUSTOM_HEADERS and its like hold for the vendor."""
    setattr(client, "_custom_headers", context.headers(transcript))  # noqa: B010  # the constructors only add to the environment's
    return client


def _shared(context: "RolloutContext", package: str) -> Any:
    if not context.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"the rollout's base_url is {context.base_url!r}; give the policy's address, as http://host:port/v1")
    secure = context.base_url.startswith("https:")
    shared = context.clients.of(package, secure) if context.clients else None
    return shared if shared is not None else _connections(package, secure, lasting=False)


def _connections(package: str, secure: bool, *, lasting: bool = True) -> Any:
    """An HTTP client as the package likes it. The gateway is ours, so proxies from the environment are left out."""
    vendor: Any = importlib.import_module(package)
    away: Any = vendor.DefaultAsyncHttpxClient
    base: Any = _aiohttp_client(vendor) if lasting else away
    home = _running_loop() if lasting else None
    timeout = vendor.Timeout(600.0, connect=60.0)  # the vendors' 5 s to connect pass while a crowd of rollouts holds the event loop
    settings: dict[str, Any] = {
        "trust_env": False,
        "verify": secure,
        "mounts": DIRECT,
        "timeout": timeout,
        "follow_redirects": False,
    }

    class Connections(base):
        """Stays open when a workflow closes its client, as it may: its neighbours are still calling.

        Connections belong to an event loop. A call made in another, as by a tool in a thread, opens one and closes it; so does
        each call where nobody would close what is kept.
        """

        async def send(self, request: Any, **options: Any) -> Any:
            at_home = _running_loop() is home
            if not at_home:
                request.headers["connection"] = "close"
            sender: Any = super() if at_home else away(**settings)
            return await sender.send(request, **options)

        async def aclose(self) -> None:
            if not lasting:
                await super().aclose()

        async def shut(self) -> None:
            await super().aclose()

    return Connections(**settings)  # without TLS there is no need to read the machine's certificates


def _aiohttp_client(vendor: Any) -> Any:
    """The package's client on aiohttp where it has one: httpx looks through all its connections for each call that it makes."""
    kind: Any = getattr(vendor, "DefaultAioHttpClient", None)
    installed = kind is not None and any("httpx_aiohttp" in each.__module__ for each in kind.__mro__)
    return kind if installed else vendor.DefaultAsyncHttpxClient


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
