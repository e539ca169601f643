"""A gateway without a training run: its settings and folder, and how to open it with its pool and engine."""

import secrets
import socket
from collections.abc import AsyncGenerator, Collection, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import Field, create_model

from penstock.config import (
    EmbeddedSection,
    EngineSection,
    GatewaySection,
    ModelSection,
    PoolSection,
    SamplingSection,
    Section,
    engine_section,
    override,
    validate,
)
from penstock.engines import ENGINES
from penstock.engines.base import Engine, open_engine
from penstock.errors import ConfigError
from penstock.events import Events
from penstock.gateway.app import Gateway
from penstock.gateway.auth import Access, GatewayTokens
from penstock.gateway.observability import open_tracer
from penstock.gateway.request import GatewayLimits
from penstock.gateway.sources import load_renderer
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.rows import PictureStore
from penstock.records import NO_LIMIT, Sampling
from penstock.system.files import exclusive_lock, load_key, write_file

CONFIG, SECRET, TOKENS = "config.json", "secret", "tokens.json"


class GatewaySampling(SamplingSection):
    """`[sampling]` of a gateway without a run: without a limit here, the caller's applies."""

    max_tokens: int | None = Field(default=None, ge=1)  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    """Default and cap of one reply; None leaves both to the caller and to the model's context."""


class Settings(Section):
    """The sections of a run's config file that a gateway needs."""

    model: ModelSection = ModelSection()
    sampling: GatewaySampling = GatewaySampling()
    engine: EngineSection = EmbeddedSection()
    pool: PoolSection = PoolSection()
    gateway: GatewaySection = GatewaySection()

    def defaults(self) -> Sampling:
        """Return the sampling defaults of calls."""
        given = self.sampling
        limit = given.max_tokens or NO_LIMIT
        return Sampling(max_tokens=limit, temperature=given.temperature, top_p=given.top_p, top_k=given.top_k, min_p=given.min_p)


class ModelFiles(NamedTuple):
    """A model on the local disk. An HTTP engine needs only its tokenizer, an endpoint that returns text none of its files."""

    name: str
    path: Path


class OpenGateway(NamedTuple):
    """A running gateway with its pool and engine."""

    gateway: Gateway
    pool: Pool
    engine: Engine


def read_settings(tree: dict[str, Any], overrides: Iterable[str] = ()) -> Settings:
    """Apply `overrides` to `tree` and check all that needs no model. Raises ConfigError, which says what to change."""
    override(tree, overrides)
    name = str(tree.get("engine", {}).get("name", EngineSection().name))
    ENGINES.check(name)
    kind = engine_section(name)
    settings = validate(create_model("Settings", __base__=Settings, engine=(kind, ...)), tree, "the gateway's settings")
    POOLS.check(settings.pool.name)
    return settings


@asynccontextmanager
async def open_gateway(
    settings: Settings,
    model: ModelFiles,
    *,
    folder: Path,
    secret: bytes,
    sock: socket.socket,
    is_open: bool = False,
    sessions: bool = False,
    closed: Collection[Access] = (),
) -> AsyncGenerator[OpenGateway]:
    """Open pool, engine and gateway, without `closed` routes. A clean exit waits for answers under way, then closes all three."""
    async with AsyncExitStack() as stack:
        events = stack.enter_context(Events(folder / "events.jsonl"))
        pool: Pool = POOLS.load(settings.pool.name)(folder, url=settings.pool.url)
        stack.push_async_callback(pool.close)
        renderer = await load_renderer(settings.engine, model.path)
        decode = renderer and renderer.tokenizer.decode
        engine = await open_engine(settings.engine, model.path, name=model.name, seed=secrets.randbits(31), decode=decode)
        stack.push_async_callback(engine.close)
        tracer = await stack.enter_async_context(open_tracer(settings.gateway.otel, model=engine.model))
        gateway = Gateway(
            engine,
            renderer,
            pool,
            secret=secret,
            host=settings.gateway.host,
            hosts=settings.gateway.hosts,
            events=events,
            sampling={"": settings.defaults()},
            limits=GatewayLimits.of(settings.gateway),
            sock=sock,
            tracer=tracer,
            is_open=is_open,
            sessions=sessions,
            closed=closed,
            pictures=PictureStore(folder),
            has_run=False,
        )
        yield OpenGateway(await stack.enter_async_context(gateway), pool, engine)


def make_folder(folder: Path, settings: Settings, model: ModelFiles) -> None:
    """Create the folder, or reuse one with the same model and pool. Other commands read it as a run's folder."""
    file = folder / CONFIG
    config = _run_config(folder, settings, model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = orjson.loads(file.read_bytes())["config"] if file.exists() else None
        if known is None:
            write_file(file, orjson.dumps({"config": config, "datasets": {}}, option=orjson.OPT_INDENT_2))
    except (OSError, ValueError, LookupError, TypeError) as cause:
        raise ConfigError(f"{folder}: cannot be used as a folder to record into: {cause}; choose another with --folder") from cause
    for section in ("model", "pool"):
        before, now = (known or config)[section]["name"], config[section]["name"]
        if before != now:
            raise ConfigError(f"{folder} was recorded with {section} {before!r}, not {now!r}; choose another with --folder")


@contextmanager
def hold_folder(folder: Path) -> Generator[None]:
    """Lock the folder for this gateway: two would not see each other's calls. The lock ends with the process."""
    refusal = ConfigError(f"{folder}: another gateway serves it; stop that one, or choose another with --folder")
    with exclusive_lock(folder / ".gateway.lock", refusal):
        yield


def load_secret(folder: Path) -> bytes:
    """Return the key that signs the folder's tokens. The first call creates it, readable by the owner only."""
    return load_key(folder / SECRET, loss="give callers the new tokens")


def write_tokens(folder: Path, secret: bytes, *, sessions: bool = False) -> Path:
    """Write the control token, the admin token and the secret to a file that only the owner can read; return its path.

    With `sessions`, the session key too.
    """
    tokens = GatewayTokens(secret)
    content = {"control": tokens.control, "admin": tokens.admin, "secret": secret.hex()}
    content |= {"sessions": tokens.session_key} if sessions else {}
    return write_file(folder / TOKENS, orjson.dumps(content), private=True)


def _run_config(folder: Path, settings: Settings, model: ModelFiles) -> dict[str, Any]:
    """Return the settings as a run's config, with a placeholder for its dataset."""
    sections = settings.model_dump(mode="json")
    if settings.sampling.max_tokens is None:
        del sections["sampling"]["max_tokens"]
    if Path(settings.model.name).expanduser().exists():
        sections["model"]["name"] = str(model.path)
    return {"run": {"name": folder.resolve().name}, "dataset": {"train": "none"}, **sections}
