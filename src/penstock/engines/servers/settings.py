"""Settings of engines behind HTTP: `[engine]` with addresses, a key, retries and timeouts."""

import os
from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from penstock.config import EngineSection
from penstock.errors import ConfigError

EMBEDDED_ONLY = ("device", "dtype", "slots", "queue", "cache_tokens")


class HttpEngineSection(EngineSection):
    """`[engine]` for everything that is reached over HTTP."""

    retries: int = Field(default=4, ge=0)
    """How often a request that no server would take is sent again after a wait, before its first token."""
    retry_s: float = Field(default=600.0, gt=0)
    """No attempt at a request begins later than this after its first."""
    first_token_s: float = Field(default=300.0, gt=0)
    """Longest wait for the first token, in the server's queue too; then another attempt is made."""
    stall_s: float = Field(default=120.0, gt=0)
    """Longest silence between two tokens; then the reply is given up."""

    @field_validator(*EMBEDDED_ONLY)
    @classmethod
    def _refuse_embedded_settings(cls, value: object, at: ValidationInfo) -> object:
        if value != EngineSection.model_fields[at.field_name or ""].default:
            raise ValueError("is a setting of the embedded engine; the servers have their own, leave it out")
        return value


class RemoteSection(HttpEngineSection):
    """`[engine]` for vLLM and SGLang servers."""

    needs_url: ClassVar[bool] = True

    url: tuple[str, ...] = Field(min_length=1)
    """Addresses of servers with the same model, such as `http://10.0.0.1:8000`."""
    api_key_env: str = ""
    """The environment variable that holds the servers' key; empty sends none."""
    down_s: float = Field(default=300.0, ge=0)
    """How long requests and publications wait while no server is up, such as during a restart; then they fail."""

    def addresses(self) -> list[str]:
        """The base URLs, without `/v1`; ConfigError if one is invalid or listed twice."""
        urls = [check_url(url).removesuffix("/v1").rstrip("/") for url in self.url]
        if len(set(urls)) < len(urls):
            raise ConfigError("engine.url: an address stands there twice")
        return urls

    def key(self) -> str:
        """The servers' key, from the environment."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise ConfigError(f"engine.api_key_env: the environment has no {self.api_key_env}; set it to the servers' key")
        return key


def check_url(url: str) -> str:
    """Return `url` without a trailing slash; ConfigError if it is not the plain address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"engine.url = {url!r}: write it like http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("engine.url: an address has no user, password, query or fragment; put the key in engine.api_key_env")
    return url.rstrip("/")
