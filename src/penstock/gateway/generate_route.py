"""`/generate` names its rollout in the body: it must be the token's own, and without a token it says whose call it is."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import RequestError
from penstock.gateway.auth import Tokens
from penstock.gateway.endpoint import VISIT
from penstock.gateway.routes import DEFAULT_PROMPT
from penstock.http.asgi import header, parse_json, read_body


class GenerateRoute:
    """Reads whose call it is, and hands it on with its body unread."""

    def __init__(self, model: ASGIApp, tokens: Tokens, *, body_bytes: int) -> None:
        self._model = model
        self._tokens = tokens
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await read_body(receive, self._body_bytes)
        if body is None:
            return
        self._attribute(scope, _ids(body))
        unread = [body]

        async def again() -> Message:
            return {"type": "http.request", "body": unread.pop()} if unread else await receive()

        await self._model(scope, again, send)

    def _attribute(self, scope: Scope, ids: dict[str, Any]) -> None:
        named, held = ids.get("trajectory_uid") or "", scope["rollout_id"]
        if not isinstance(named, str):
            raise RequestError("trajectory_uid must be a string", status=422, code="invalid_value", param="trajectory_uid")
        if held and named and self._tokens.rollout_of(named) != held:
            text = f"trajectory_uid names {named[:200]}, but the caller's is {held}; leave it out"
            raise RequestError(text, status=403, code="rollout_mismatch", param="trajectory_uid")
        if not held:
            named = named or header(scope["headers"], b"x-rollout-id")
            scope["rollout_id"] = self._tokens.rollout_of(named) if named else self._tokens.trajectory()
        if scope[VISIT] == DEFAULT_PROMPT and isinstance(ids.get("prompt_uid"), str):
            scope[VISIT] = ids["prompt_uid"] or DEFAULT_PROMPT


def _ids(body: bytes) -> dict[str, Any]:
    try:
        return parse_json(body)
    except RequestError as error:
        raise RequestError(str(error), status=422, code=error.code) from error
