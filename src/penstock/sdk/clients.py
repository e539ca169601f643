"""Clients of the `openai` and `anthropic` packages, bound to a rollout: its token, its headers, nothing from the environment."""

import asyncio
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import ConfigError
from penstock.sdk.routing import RolloutContext

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI
    from starlette.types import ASGIApp

    from penstock.sdk.routing import RolloutContext

    LocalApp = tuple[str, ASGIApp, asyncio.AbstractEventLoop]

T = TypeVar("T")

CLOSE_S = 5.0
NO_KEY = "none"
"""Sent to an endpoint without keys: with an empty one, the packages would look for the user's own."""
NO_PROXIES: dict[str, None] = {"all://": None, "http://": None, "https://": None}
"""`anthropic` reads proxies from the environment even with `trust_env=False`."""


class Clients:
    """HTTP clients that the rollouts of one event loop share; each is made on first use.

    The loop is the first one that asks. `app` is the gateway, if it runs in the loop that this is made in: calls of it need no
    socket.
    """

    def __init__(self, app: "ASGIApp | None" = None) -> None:
        self._app = app
        self._shared: dict[tuple[str, bool], Any] = {}
        self._unbound: dict[tuple[str, str], Any] = {}
        """The vendors' clients that those of rollouts are copied from, by package and base URL. They make no calls themselves."""
        self._app_loop = _running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None

    def of(self, package: str, base_url: str) -> Any:
        """Returns the shared HTTP client for `package`; None in another event loop, where it could not be used."""
        secure = base_url.startswith("https:")
        app, loop = self._app, self._app_loop
        local = None if app is None or loop is None else (base_url.removesuffix("/v1"), app, loop)
        return self.get_or_make((package, secure), lambda: _make_http_client(package, secure, local=local))

    def get_or_make(self, key: tuple[str, bool], make: Callable[[], T]) -> T | None:
        """Returns the shared client of `key`, which must have `shut`; None in another event loop."""
        if not self._at_home():
            return None
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def copy_of(self, package: str, base_url: str, make: Callable[[], T]) -> T:
        """Returns a copy of the client that `make` made for the first rollout: making a new one takes as long as a call."""
        key = (package, base_url)
        if not self._at_home():
            return make()
        if key not in self._unbound:
            self._unbound[key] = _with_platform(make(), package)
        return copy(self._unbound[key])

    def _at_home(self) -> bool:
        loop = _running_loop()
        self._loop = self._loop or loop
        return loop is not None and loop is self._loop

    async def close(self) -> None:
        """Closes the connections in the loop that they belong to, unless author code blocks it."""
        if self._loop is None or self._loop is asyncio.get_running_loop():
            await self._shut()
        elif self._loop.is_running():
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._shut(), self._loop))

    async def _shut(self) -> None:
        for client in self._shared.values():
            await client.shut()
        self._shared.clear()
        self._unbound.clear()


def openai_client(context: "RolloutContext", transcript: str) -> "AsyncOpenAI":
    try:
        from openai import AsyncOpenAI
    except ImportError as cause:
        raise ConfigError("ctx.openai() needs the `openai` package: pip install openai") from cause

    def make() -> AsyncOpenAI:
        http_client = _http_client(context, "openai")
        return AsyncOpenAI(api_key=NO_KEY, base_url=context.base_url, organization="", project="", http_client=http_client)

    return _bound(make, "openai", context, transcript)


def anthropic_client(context: "RolloutContext", transcript: str) -> "AsyncAnthropic":
    try:
        from anthropic import AsyncAnthropic
    except ImportError as cause:
        raise ConfigError("ctx.anthropic() needs the `anthropic` package: pip install anthropic") from cause

    def make() -> AsyncAnthropic:
        base_url = context.base_url.removesuffix("/").removesuffix("/v1")
        return AsyncAnthropic(api_key=NO_KEY, base_url=base_url, http_client=_http_client(context, "anthropic"))

    return _bound(make, "anthropic", context, transcript)


def openai_blocking_client(context: "RolloutContext", transcript: str) -> "OpenAI":
    """As `openai_client`, without `async`: for frameworks that call from threads of their own."""
    from openai import DefaultHttpxClient, OpenAI

    class BlockingHttpClient(DefaultHttpxClient):
        """Closes the connection after each call, since nobody closes the client."""

        def send(self, request: Any, **options: Any) -> Any:
            refuse_to_block("a call without await", "the framework's async form, such as `ainvoke`")
            request.headers["connection"] = "close"
            return super().send(request, **options)

    http_client = BlockingHttpClient(trust_env=False, verify=context.base_url.startswith("https:"), follow_redirects=False)
    key = context.api_key or NO_KEY
    client = OpenAI(api_key=key, base_url=context.base_url, organization="", project="", http_client=http_client)
    return _with_headers(client, context, transcript)


def refuse_to_block(what: str, instead: str) -> None:
    """Raises RuntimeError if an event loop runs in this thread: while blocked, it could not serve the awaited reply."""
    if _running_loop() is not None:
        raise RuntimeError(
            f"{what} would hold up the event loop, and with it the gateway that must answer; use {instead}, or asyncio.to_thread"
        )


def _bound(make: Callable[[], T], package: str, context: "RolloutContext", transcript: str) -> T:
    client = context.clients.copy_of(package, context.base_url, make) if context.clients else make()
    setattr(client, "api_key", context.api_key or NO_KEY)  # noqa: B010
    return _with_headers(client, context, transcript)


def _with_platform(client: T, package: str) -> T:
    """Finds out now what the packages tell of the platform: each client would do it again, in a thread."""
    find: Any = getattr(importlib.import_module(f"{package}._base_client"), "get_platform", None)
    setattr(client, "_platform", find and find())  # noqa: B010
    return client


def _with_headers(client: T, context: "RolloutContext", transcript: str) -> T:
    # The constructors would add the headers to those of OPENAI_CUSTOM_HEADERS and the like, which are for the vendor.
    setattr(client, "_custom_headers", context.headers(transcript))  # noqa: B010
    return client


def _http_client(context: "RolloutContext", package: str) -> Any:
    if not context.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"the rollout's base_url is {context.base_url!r}; give the policy's address, as http://host:port/v1")
    shared = context.clients.of(package, context.base_url) if context.clients else None
    return shared if shared is not None else _make_http_client(package, context.base_url.startswith("https:"), lasting=False)


def _make_http_client(package: str, secure: bool, *, lasting: bool = True, local: "LocalApp | None" = None) -> Any:
    """Makes an HTTP client for `package` that ignores proxies. A `lasting` one keeps its connections, until `shut`.

    `local` is an address with the app that serves it and the app's event loop.
    """
    vendor: Any = importlib.import_module(package)
    one_off: Any = vendor.DefaultAsyncHttpxClient
    base: Any = _aiohttp_client(vendor) if lasting else one_off
    home_loop = _running_loop() if lasting else None
    timeout = vendor.Timeout(
        600.0, connect=60.0
    )  # the default 5 s to connect are too short when many rollouts share the event loop
    settings: dict[str, Any] = {
        "trust_env": False,
        "verify": secure,  # without TLS, the machine's certificates need not be read
        "mounts": NO_PROXIES,
        "timeout": timeout,
        "follow_redirects": False,
    }

    class SharedHttpClient(base):
        """Stays open when a workflow closes its client: other rollouts use it too.

        Connections belong to an event loop. A call in another loop, as from a tool in a thread, opens and closes its own
        connection; so does each call of a client that is not `lasting`, since nobody would close it.
        """

        async def send(self, request: Any, **options: Any) -> Any:
            at_home = _running_loop() is home_loop
            if not at_home:
                request.headers["connection"] = "close"
            sender: Any = super() if at_home else one_off(**settings)
            return await sender.send(request, **options)

        async def aclose(self) -> None:
            if not lasting:
                await super().aclose()

        async def shut(self) -> None:
            await super().aclose()

    mounts: dict[str, Any] = {**NO_PROXIES}
    if local is not None:
        from penstock.http.asgi import in_process_transport  # loads starlette

        httpx: Any = importlib.import_module(one_off.__mro__[1].__module__)  # the vendor's, whichever that is
        mounts[local[0]] = in_process_transport(httpx, *local[1:])
    return SharedHttpClient(**{**settings, "mounts": mounts})


def _aiohttp_client(vendor: Any) -> Any:
    """Returns the package's client on aiohttp if installed: httpx scans all its connections for each call."""
    kind: Any = getattr(vendor, "DefaultAioHttpClient", None)
    installed = kind is not None and any("httpx_aiohttp" in each.__module__ for each in kind.__mro__)
    return kind if installed else vendor.DefaultAsyncHttpxClient


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


ROUTES = {"openai": ("chat.completions", "responses"), "anthropic": ("messages",)}
"""By package: attributes of its client whose modules are loaded on first access."""
ANYIO_BACKEND = "anyio._backends._asyncio"
"""Loaded by both packages' connections when they are first used in an event loop."""


def preload_clients(home: Path) -> None:
    """Makes a client of each package that the author's files in `home` mention or have imported; no call is made."""
    modules = list(sys.modules.values())
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None)) and file.endswith(".py")}
    text = "".join(file.read_text(errors="replace") for file in files if file.parent == home)
    context = RolloutContext(base_url="http://127.0.0.1/v1", api_key="none")
    for package, parts in ROUTES.items():
        if package in text or package in sys.modules:
            with suppress(Exception):  # if this fails, the author's own call will fail and say so
                attrgetter(*parts)(getattr(context, package)())
                importlib.import_module(ANYIO_BACKEND)
