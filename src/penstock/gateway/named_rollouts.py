"""Rollouts that callers name themselves, in a path or by a session id. The first request opens one in the pool."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, cast

import orjson

from penstock.errors import RequestError
from penstock.gateway.session import RESERVED_PREFIX, Session, Sessions, open_adhoc, pool_refusals
from penstock.http.asgi import Headers, header
from penstock.pool.base import Pool
from penstock.records import ADHOC_CHANNEL

PROMPT_KEY = "prompt_uid"
"""In the metadata of a task: the caller's name for the group."""
NAMED_KEY = f"{RESERVED_PREFIX}flow"
"""In the metadata of a task: a caller named its rollout."""
DEFAULT_CHANNEL, DEFAULT_TASK = "train", "flow"
ROLLOUT_NAME = re.compile(r"(?![mfca]k-)[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
"""Safe in paths, and never mistaken for a token."""
MAX_PROMPT_UID = 1000
"""Characters."""


class NamedRollouts:
    def __init__(self, pool: Pool, sessions: Sessions) -> None:
        self._pool = pool
        self._sessions = sessions

    async def session(self, rollout_id: str, prompt_uid: str | None, *, is_retry: bool = False) -> Session:
        """See `Sessions.get`. With a `prompt_uid`, an unknown rollout is opened."""
        try:
            return await self._sessions.get(rollout_id, is_retry=is_retry)
        except RequestError as error:
            if prompt_uid is None or error.code != "unknown_rollout":
                raise
        await self.open(rollout_id, prompt_uid, channel=ADHOC_CHANNEL if prompt_uid == SESSION_PROMPT else DEFAULT_CHANNEL)
        return await self._sessions.get(rollout_id)

    async def open(
        self,
        rollout_id: str,
        prompt_uid: str = "",
        *,
        channel: str = DEFAULT_CHANNEL,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the rollout in the pool; RequestError 422 if its name cannot be used, 409 if the pool refuses it."""
        if not ROLLOUT_NAME.fullmatch(rollout_id):
            text = f"{rollout_id[:60]!r} cannot name a trajectory; use up to 200 letters, digits and . _ : -"
            raise RequestError(text, status=422, code="invalid_value", param="trajectory_uid")
        if len(prompt_uid) > MAX_PROMPT_UID:
            text = f"prompt_uid is longer than {MAX_PROMPT_UID} characters"
            raise RequestError(text, status=422, code="invalid_value", param="prompt_uid")
        with pool_refusals(status=409, code="rollout_exists"):
            await open_adhoc(
                self._pool,
                rollout_id=rollout_id,
                task_id=prompt_uid or DEFAULT_TASK,
                channel=channel,
                sampling=sampling or {},
                metadata={**(metadata or {}), PROMPT_KEY: prompt_uid, NAMED_KEY: True},
            )


# Sessions of clients

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
