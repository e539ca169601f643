"""Endpoints behind HTTP: their settings, what is said before a run begins, and requests that are sent again while nothing came."""

import asyncio
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, ClassVar

import orjson
from pydantic import Field, field_validator

from penstock.engines.retry import RetryPolicy, RetryState
from penstock.engines.servers.base import HttpEngineSection, check_url
from penstock.engines.text_endpoints.base import TextChunk, TextEndpoint, TextReplyReader, TextRequest
from penstock.errors import ConfigError, EngineBusy, EngineError, RequestError
from penstock.http.client import CancelHandle, HttpClient, RequestTimeouts, UpstreamError

UNAUTHORIZED, NOT_FOUND = (401, 403), 404


class TextEndpointSection(HttpEngineSection):
    """`[engine]` for endpoints that give text."""

    text_only: ClassVar[bool] = True
    trainable: ClassVar[bool] = False
    vendor: ClassVar[str] = ""
    """The address where `vendor_key` is sent, and nowhere else."""
    vendor_key: ClassVar[str] = ""
    """The environment variable that holds it."""

    url: str = ""
    """The API's base, as its clients take it; empty is the vendor's own."""
    api_key_env: str | None = None
    """The environment variable that holds the key; empty sends none. Left out, the vendor's own key goes to the vendor's own
    address, and none goes anywhere else."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of every request, such as `reasoning_effort`."""
    price_in: float | None = Field(default=None, ge=0)
    """Of a million prompt tokens, in whatever currency; None where it is not known."""
    price_out: float | None = Field(default=None, ge=0)
    """Of a million sampled tokens."""

    @field_validator("url", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    @property
    def address(self) -> str:
        """Where requests go, without a slash at the end; ConfigError where that is no address."""
        return check_url(self.url or self.vendor)

    @property
    def key_variable(self) -> str:
        """The environment variable whose value goes there; empty where none does."""
        if self.api_key_env is not None:
            return self.api_key_env
        return self.vendor_key if self.address == self.vendor else ""

    def key(self) -> str:
        """The key, from the environment."""
        variable = self.key_variable
        key = os.environ.get(variable, "") if variable else ""
        if variable and not key:
            what = "set it to the endpoint's key, or engine.api_key_env to '' where it needs none"
            raise ConfigError(f"engine.api_key_env: the environment has no {variable}; {what}")
        return key

    def remedy(self, status: int, model: str) -> str:
        """What to do about an answer that would be the same again."""
        if status in UNAUTHORIZED:
            variable = self.key_variable
            return f"; check the key in {variable}" if variable else "; name the variable that holds its key in engine.api_key_env"
        if status == NOT_FOUND:
            return f"; does it have model.name = {model!r}, and is engine.url its base?"
        return ""


class HttpTextEndpoint(TextEndpoint):
    """One endpoint. A class below says how one kind of API is spoken to."""

    path: ClassVar[str]
    """Where requests go."""

    def __init__(self, name: str, section: TextEndpointSection) -> None:
        super().__init__(name)
        self._section = section
        self._url = self.base(section) + self.path
        self._wire = self._open_wire(section)
        self._patience = RetryPolicy(retries=section.retries, retry_s=section.retry_s)
        self._closed = False

    @classmethod
    @abstractmethod
    def headers(cls, key: str) -> Mapping[str, str]:
        """What shows the key, which may be empty."""

    @classmethod
    @abstractmethod
    def base(cls, section: TextEndpointSection) -> str:
        """What every path of the API is put behind."""

    @abstractmethod
    def body(self, asked: TextRequest) -> dict[str, Any]:
        """What the endpoint is asked, as a stream; RequestError for what it has no word for."""

    @abstractmethod
    def reader(self) -> TextReplyReader: ...

    @classmethod
    def preflight(cls, section: TextEndpointSection, model: str) -> None:
        """ConfigError where nothing answers, or the key is refused. Whether it has the model, only a call tells. Blocks."""
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
            fault = thread.submit(asyncio.run, cls._look(section)).result()
        if fault is not None and (fault.status in (0, *UNAUTHORIZED) or fault.status >= 500):
            remedy = section.remedy(fault.status, model) or "; is engine.url the base of such an API, and is it up?"
            raise ConfigError(f"engine.url: {fault}{remedy}")

    @classmethod
    async def _look(cls, section: TextEndpointSection) -> UpstreamError | None:
        wire = cls._open_wire(section)
        try:
            await wire.ask(f"{cls.base(section)}/models")
        except UpstreamError as fault:
            return fault
        finally:
            await wire.close()
        return None

    @classmethod
    def _open_wire(cls, section: TextEndpointSection) -> HttpClient:
        key = section.key()
        return HttpClient(
            RequestTimeouts(first_token_s=section.first_token_s, stall_s=section.stall_s), key=key, headers=cls.headers(key)
        )

    async def ask(self, asked: TextRequest, *, rollout_id: str = "") -> AsyncGenerator[TextChunk, None]:
        body = orjson.dumps(self.body(asked) | self._section.extra)
        trial, begun = RetryState(self._patience), False
        while not self._closed:
            trial.attempts += 1
            try:
                async with aclosing(self._wire.stream(self._url, body, self.reader(), CancelHandle())) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except UpstreamError as fault:
                wait_s = None if begun or self._is_final(fault) else trial.wait_s(fault, others=False)
                if wait_s is None:
                    raise self._error(fault, trial.attempts, rollout_id) from fault
                await asyncio.sleep(wait_s)
        raise EngineError("the engine is closed")

    async def close(self) -> None:
        self._closed = True
        await self._wire.close()

    def _is_final(self, fault: UpstreamError) -> bool:
        """Whether the same request would get the same answer."""
        return fault.kind in ("refused", "garbled") or fault.status in (*UNAUTHORIZED, NOT_FOUND)

    def _error(self, fault: UpstreamError, attempts: int, rollout_id: str) -> EngineError | RequestError:
        whose = f"rollout {rollout_id}: " if rollout_id else ""
        often = f"; given up after {attempts} attempts" if attempts > 1 else ""
        text = f"{whose}{fault}{often}{self._section.remedy(fault.status, self._name)}"
        if fault.status and self._is_final(fault):
            code = "context_length_exceeded" if "do not fit into" in str(fault) else "engine_error"
            return RequestError(text, status=400, code=code)
        return EngineBusy(text) if fault.kind == "busy" else EngineError(text)
