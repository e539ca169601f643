"""Opening an engine behind HTTP: its settings, and what its servers say they serve."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from penstock.config import EngineSection
from penstock.engines.remote import RemoteEngine, Served
from penstock.engines.upstream import Patience
from penstock.engines.wire import Fault, Timers, Wire
from penstock.errors import ConfigError

OF_THE_EMBEDDED = ("device", "dtype", "slots", "queue", "cache_tokens")


class ElsewhereSection(EngineSection):
    """What `[engine]` takes for whatever answers over HTTP."""

    retries: int = Field(default=4, ge=0)
    """How often a request that no server would take is sent again after a wait, before its first token."""
    retry_s: float = Field(default=600.0, gt=0)
    """No attempt at a request begins later than this after its first."""
    first_token_s: float = Field(default=300.0, gt=0)
    """Longest wait for the first token, in the server's queue too; then another attempt is made."""
    stall_s: float = Field(default=120.0, gt=0)
    """Longest silence between two tokens; then the reply is given up."""

    @field_validator(*OF_THE_EMBEDDED)
    @classmethod
    def _not_ours(cls, value: object, at: ValidationInfo) -> object:
        if value != EngineSection.model_fields[at.field_name or ""].default:
            raise ValueError("is a setting of the embedded engine; the servers have their own, leave it out")
        return value


class RemoteSection(ElsewhereSection):
    """`[engine]` for servers elsewhere."""

    url: tuple[str, ...] = Field(min_length=1)
    """Addresses of servers with the same model, such as `http://10.0.0.1:8000`."""
    api_key_env: str = ""
    """The environment variable that holds the servers' key; empty sends none."""

    def addresses(self) -> list[str]:
        """The plain addresses; ConfigError where one is none or stands there twice."""
        urls = [plain_address(url).removesuffix("/v1").rstrip("/") for url in self.url]
        if len(set(urls)) < len(urls):
            raise ConfigError("engine.url: an address stands there twice")
        return urls

    def key(self) -> str:
        """The servers' key, from the environment."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise ConfigError(f"engine.api_key_env: the environment has no {self.api_key_env}; set it to the servers' key")
        return key


E = TypeVar("E", bound=RemoteEngine)


class Survey(NamedTuple):
    """What a fleet of servers says of itself."""

    served: Served
    down: frozenset[str]
    """Addresses that do not answer."""


def open_remote(engine: type[E], folder: Path, *, name: str, section: RemoteSection) -> E:
    """Ask the servers what they serve, and serve it as policy version 0. Blocks: call it in a thread.

    An address that does not answer is left out until it does, as long as another one answers.
    """
    urls, key = section.addresses(), section.key()
    served, down = survey(engine, urls, name, key)
    opened = engine(
        urls,
        name=name,
        served=served,
        folder=folder,
        timers=Timers(first_token_s=section.first_token_s, stall_s=section.stall_s),
        patience=Patience(retries=section.retries, retry_s=section.retry_s),
        key=key,
    )
    for address in opened.upstream.fleet.addresses:
        if address.url in down:
            address.up.clear()
    return opened


def survey(engine: type[RemoteEngine], urls: Sequence[str], name: str, key: str) -> Survey:
    """Ask every server; ConfigError where none answers, or where they differ. Blocks."""
    with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
        found, faults = thread.submit(asyncio.run, _ask_all(engine, urls, name, key)).result()
    if not found:
        raise ConfigError(f"engine.url: {'; '.join(map(str, faults.values()))}; start {engine.kind} there, or change engine.url")
    if len(set(found.values())) > 1:
        told = "; ".join(f"{url} has {served}" for url, served in found.items())
        raise ConfigError(f"engine.url: the servers differ: {told}; start all of them alike")
    return Survey(next(iter(found.values())), frozenset(faults))


async def _ask_all(
    engine: type[RemoteEngine], urls: Sequence[str], name: str, key: str
) -> tuple[dict[str, Served], dict[str, Fault]]:
    wire = Wire(Timers(), key=key)
    found: dict[str, Served] = {}
    faults: dict[str, Fault] = {}
    try:
        for url in urls:
            try:
                found[url] = await engine.inspect(wire, url, name)
            except Fault as fault:
                faults[url] = fault
    finally:
        await wire.close()
    return found, faults


def plain_address(url: str) -> str:
    """`url` without a slash at its end; ConfigError where it is not the plain address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"engine.url = {url!r}: write it like http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("engine.url: an address has no user, password, query or fragment; put the key in engine.api_key_env")
    return url.rstrip("/")
