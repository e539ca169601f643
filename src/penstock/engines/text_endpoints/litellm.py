"""Endpoints through the LiteLLM library, by its model names; needs the package `litellm`."""

import asyncio
import importlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.engines.text_endpoints.base import TextChunk, TextEndpoint, TextRequest
from penstock.engines.text_endpoints.http import NOT_FOUND, UNAUTHORIZED, TextEndpointSection
from penstock.engines.text_endpoints.openai import OpenAIReader, chat_request
from penstock.errors import ConfigError, EngineBusy, EngineError, RequestError
from penstock.http.client import QUOTED_CHARS, UpstreamError
from penstock.system.packages import install_command

FINAL_STATUSES = (400, 413, 422, *UNAUTHORIZED, NOT_FOUND)
"""Statuses that the same request would get again."""


class LitellmSection(TextEndpointSection):
    """`[engine]` for `name = "litellm"`. Without `url` and `api_key_env`, the library derives both from the model's name."""

    @property
    def address(self) -> str:
        """Empty leaves the choice to the library."""
        return super().address if self.url else ""

    def preflight(self, model: str) -> None:
        """Checks only that the library is installed and the key is set."""
        _library()
        self.key()


class LitellmEndpoint(TextEndpoint):
    """One model. The library itself retries a request, `engine.retries` times."""

    def __init__(self, name: str, section: LitellmSection) -> None:
        super().__init__(name)
        self._library = _library()
        self._section = section
        self._key = section.key()

    async def complete(self, request: TextRequest, *, rollout_id: str = "") -> AsyncGenerator[TextChunk, None]:
        reader, stream = OpenAIReader(), None
        try:
            async with asyncio.timeout(self._section.first_token_s):
                stream = await self._library.acompletion(**self._request(request))
            chunks = aiter(stream)
            while True:
                async with asyncio.timeout(self._section.stall_s):
                    chunk: Any = await anext(chunks, None)
                if chunk is None:
                    break
                reader.feed_json(chunk.model_dump())
                if (new := reader.take_chunk()) is not None:
                    yield new
            reader.end()
            yield reader.take_chunk() or TextChunk(())
        except Exception as cause:  # the library raises errors of many kinds
            raise self._error(cause, rollout_id) from cause
        finally:
            if (close := getattr(stream, "aclose", None)) is not None:
                await close()

    async def close(self) -> None:
        """Nothing to close: the library keeps its connections."""

    def _request(self, request: TextRequest) -> dict[str, Any]:
        section = self._section
        own = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, "num_retries": section.retries}
        base = {"api_base": section.address} if section.url else {}
        key = {"api_key": self._key} if self._key else {}
        return own | base | key | chat_request(request, limit="max_tokens") | section.extra

    def _error(self, cause: Exception, rollout_id: str) -> EngineError | RequestError:
        where = f"rollout {rollout_id}: " if rollout_id else ""
        status = getattr(cause, "status_code", 0)
        silent = "was silent for too long" if isinstance(cause, TimeoutError) else ""
        reason = silent or (
            str(cause)
            if isinstance(cause, UpstreamError)
            else f"{type(cause).__name__}: {' '.join(str(cause).split())[:QUOTED_CHARS]}"
        )
        text = f"{where}{self.model} {reason.replace(self._key, '…') if self._key else reason}"
        if status in FINAL_STATUSES:
            return RequestError(f"{text}{self._section.remedy(status, self.model)}", code="engine_error")
        return EngineBusy(text) if status == 429 else EngineError(text)


def open_engine(
    folder: Path, *, name: str, section: LitellmSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> LitellmEndpoint:
    return LitellmEndpoint(name, section)


def _library() -> ModuleType:
    try:
        return importlib.import_module("litellm")
    except ImportError as cause:
        raise ConfigError(f"engine.name = 'litellm' needs that library ({cause}); run: {install_command('litellm')}") from cause
