"""Text endpoints over HTTP: their settings, the check before a run, and requests with retries."""

import asyncio
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, ClassVar, cast

import orjson
from pydantic import Field, field_validator

from penstock.engines.retry import RetryPolicy, RetryState
from penstock.engines.servers.settings import HttpEngineSection, check_url
from penstock.engines.text_endpoints.base import TextChunk, TextEndpoint, TextReplyReader, TextRequest
from penstock.errors import ConfigError, EngineBusy, EngineError, RequestError
from penstock.http.client import CancelHandle, HttpClient, RequestTimeouts, UpstreamError

UNAUTHORIZED, NOT_FOUND = (401, 403), 404


class TextEndpointSection(HttpEngineSection):
    """`[engine]` for text endpoints."""

    text_only: ClassVar[bool] = True
    trainable: ClassVar[bool] = False
    vendor: ClassVar[str] = ""
    """The vendor's own address, the only one that `vendor_key` is sent to."""
    vendor_key: ClassVar[str] = ""
    """The environment variable that holds the vendor's key."""

    url: str = ""
    """The API's base URL, as its clients take it; empty for the vendor's own."""
    api_key_env: str | None = None
    """The environment variable that holds the key; empty sends none. By default the vendor's key is sent to the vendor's address,
    and no key to any other."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Additional fields of every request, such as `reasoning_effort`."""
    price_in: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens, in any currency; None if unknown."""
    price_out: float | None = Field(default=None, ge=0)
    """Price of a million sampled tokens."""

    @field_validator("url", mode="before")
    @classmethod
    def _unwrap_single(cls, value: Any) -> Any:
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    @property
    def address(self) -> str:
        """The base URL without a trailing slash; ConfigError if it is invalid."""
        return check_url(self.url or self.vendor)

    @property
    def key_variable(self) -> str:
        """The environment variable whose value is sent to `address`; empty if none is."""
        if self.api_key_env is not None:
            return self.api_key_env
        return self.vendor_key if self.address == self.vendor else ""

    def key(self) -> str:
        variable = self.key_variable
        key = os.environ.get(variable, "") if variable else ""
        if variable and not key:
            remedy = "set it to the endpoint's key, or engine.api_key_env to '' where it needs none"
            raise ConfigError(f"engine.api_key_env: the environment has no {variable}; {remedy}")
        return key

    def remedy(self, status: int, model: str) -> str:
        """What to do about a status that the same request would get again."""
        if status in UNAUTHORIZED:
            variable = self.key_variable
            return f"; check the key in {variable}" if variable else "; name the variable that holds its key in engine.api_key_env"
        if status == NOT_FOUND:
            return f"; does it have model.name = {model!r}, and is engine.url its base?"
        return ""


class HttpTextEndpoint(TextEndpoint):
    """One endpoint. Subclasses implement one API each."""

    path: ClassVar[str]
    """Where requests go."""

    def __init__(self, name: str, section: TextEndpointSection) -> None:
        super().__init__(name)
        self._section = section
        self._url = self.base(section) + self.path
        self._http = self._open_client(section)
        self._policy = RetryPolicy(retries=section.retries, retry_s=section.retry_s)
        self._closed = False

    @classmethod
    @abstractmethod
    def headers(cls, key: str) -> Mapping[str, str]:
        """Headers that carry the key, which may be empty."""

    @classmethod
    @abstractmethod
    def base(cls, section: TextEndpointSection) -> str:
        """The base URL that `path` is appended to."""

    @abstractmethod
    def body(self, request: TextRequest) -> dict[str, Any]:
        """The body of a streamed request; RequestError for settings that the API does not have."""

    @abstractmethod
    def reader(self) -> TextReplyReader: ...

    @classmethod
    def preflight(cls, section: TextEndpointSection, model: str) -> None:
        """ConfigError if nothing answers, or the key is refused. Only a real call shows whether the model exists. Blocks."""
        with ThreadPoolExecutor(1) as thread:  # asyncio.run would fail in this thread if it has a running event loop
            error = thread.submit(asyncio.run, cls._probe(section)).result()
        if error is not None and (error.status in (0, *UNAUTHORIZED) or error.status >= 500):
            remedy = section.remedy(error.status, model) or "; is engine.url the base of such an API, and is it up?"
            raise ConfigError(f"engine.url: {error}{remedy}")

    @classmethod
    async def _probe(cls, section: TextEndpointSection) -> UpstreamError | None:
        http = cls._open_client(section)
        try:
            await http.request_json(f"{cls.base(section)}/models")
        except UpstreamError as error:
            return error
        finally:
            await http.close()
        return None

    @classmethod
    def _open_client(cls, section: TextEndpointSection) -> HttpClient:
        key = section.key()
        return HttpClient(
            RequestTimeouts(first_token_s=section.first_token_s, stall_s=section.stall_s), key=key, headers=cls.headers(key)
        )

    async def complete(self, request: TextRequest, *, rollout_id: str = "") -> AsyncGenerator[TextChunk, None]:
        body = orjson.dumps(self.body(request) | self._section.extra)
        state, begun = RetryState(self._policy), False
        while not self._closed:
            state.attempts += 1
            try:
                async with aclosing(self._http.stream(self._url, body, self.reader(), CancelHandle())) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except UpstreamError as error:
                wait_s = None if begun or self._is_final(error) else state.wait_s(error, others=False)
                if wait_s is None:
                    raise self._error(error, state.attempts, rollout_id) from error
                await asyncio.sleep(wait_s)
        raise EngineError("the engine is closed")

    async def request_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST `body` below the endpoint's path, once; what is no object comes back empty."""
        try:
            answer = await self._http.request_json(self._url + path, body)
        except UpstreamError as error:
            raise self._error(error, 1, "") from error
        return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}

    async def close(self) -> None:
        self._closed = True
        await self._http.close()

    def _is_final(self, error: UpstreamError) -> bool:
        """Whether the same request would get the same answer again."""
        return error.kind in ("refused", "garbled") or error.status in (*UNAUTHORIZED, NOT_FOUND)

    def _error(self, error: UpstreamError, attempts: int, rollout_id: str) -> EngineError | RequestError:
        where = f"rollout {rollout_id}: " if rollout_id else ""
        attempts_text = f"; given up after {attempts} attempts" if attempts > 1 else ""
        text = f"{where}{error}{attempts_text}{self._section.remedy(error.status, self._name)}"
        if error.status and self._is_final(error):
            code = "context_length_exceeded" if "do not fit into" in str(error) else "engine_error"
            return RequestError(text, status=400, code=code)
        if error.kind == "busy":
            return EngineBusy(text, status=429 if error.status == 429 else 503, retry_after_s=error.retry_after_s)
        return EngineError(text)
