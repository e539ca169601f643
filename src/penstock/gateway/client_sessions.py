"""One rollout for each session of a client, by the id that the client sends anyway. The session key opens such rollouts."""

import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from typing import Any, cast

import orjson

from penstock.errors import RequestError
from penstock.http.asgi import Headers, header

ANY_SESSION = "*"
"""The rollout of the session key: the one that the request's session id names."""
SESSION_PROMPT = "penstock-session"
"""The prompt's uid of rollouts that a session opens."""
SESSION_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"x-session-affinity",
    b"conversation-id",
    b"conversation_id",
)
"""Headers of clients that hold a session's id: verifiers, Claude Code, Codex, opencode, and what others use."""
SESSION_FIELDS = ("metadata.session_id", "metadata.user_id of Claude Code", "session_id", "prompt_cache_key")
"""Where a body holds one, for the error."""
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,150}")
CLAUDE_CODE_USER = re.compile(r"_session_([0-9a-f-]{36})$")
"""The end of `metadata.user_id` of older versions of Claude Code."""


def session_rollout(headers: Headers, body: bytes) -> str:
    """The rollout of a request: `session-` and the session's id, or a digest of an id that is not safe in a path."""
    found = next((value for name in SESSION_HEADERS if (value := header(headers, name))), "") or next(_in_body(body), "")
    if not found:
        names, fields = ", ".join(name.decode() for name in SESSION_HEADERS), ", ".join(SESSION_FIELDS)
        text = f"the session key needs a session id, in one of the headers {names}, or a field of the body: {fields}"
        raise RequestError(f"{text}; or use a rollout's model token", code="unknown_caller")
    safe = found if SAFE_ID.fullmatch(found) else sha256(found.encode("utf-8", "replace")).hexdigest()[:32]
    return f"session-{safe}"


def _in_body(body: bytes) -> Iterator[str]:
    try:
        request = _object(orjson.loads(body))
    except orjson.JSONDecodeError:
        return  # the dialect says what is wrong with it
    metadata = _object(request.get("metadata"))
    user = metadata.get("user_id")
    if isinstance(user, str):
        if session := CLAUDE_CODE_USER.search(user):
            yield session[1]
        if user.startswith("{"):  # newer versions of Claude Code
            with suppress(orjson.JSONDecodeError):
                metadata = {**_object(orjson.loads(user)), **metadata}
    for value in (metadata.get("session_id"), request.get("session_id"), request.get("prompt_cache_key")):
        if isinstance(value, str) and value:
            yield value


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
