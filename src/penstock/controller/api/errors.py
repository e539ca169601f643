"""What a caller is told of an error: a status, a code, one line, and every issue where there are several. Never a traceback."""

import errno
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.controller.api.bodies import reply
from penstock.errors import ConfigError, ControllerError, DatasetError, ModelError, PenstockError, PoolError, RequestError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
RETRY_AFTER = {429: "30", 503: "10"}
"""Seconds after which a caller may try again."""

log = logging.getLogger(__name__)


def refusal(error: Exception) -> Response:
    """What no one here expected is logged with its traceback, and told without."""
    known = _known(error)
    if known is None:
        log.error("a request failed", exc_info=error)
        known = ControllerError("the controller failed on this request; its log says how", code="INTERNAL", status=500)
    status = known.status or 500
    headers = {"retry-after": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
    return reply({**known.details, "error": str(known), "code": known.code}, status, **headers)


async def no_route(request: Request, error: Exception) -> Response:
    """Of a path or a method that is not served."""
    assert isinstance(error, HTTPException)
    code = {404: "ROUTE_UNKNOWN", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "REFUSED")
    text = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return reply({"error": text, "code": code}, error.status_code, **error.headers or {})


def _known(error: Exception) -> ControllerError | None:
    if isinstance(error, ControllerError):
        return error
    if isinstance(error, ConfigError):
        return ControllerError(str(error), code=_code(error), status=400, details=_issues(error))
    if isinstance(error, RequestError):
        return ControllerError(str(error), code=error.code.upper(), status=error.status)
    if isinstance(error, PoolError) or (isinstance(error, OSError) and error.errno in FULL):
        text = str(error) if isinstance(error, PenstockError) else f"the controller cannot write: {error.strerror}; free disk space"
        return ControllerError(text, code="STORE_FAILED", status=503)
    return None


def _code(error: ConfigError) -> str:
    if isinstance(error, DatasetError):
        return "DATASET_INVALID"
    return "MODEL_INVALID" if isinstance(error, ModelError) else "CONFIG_INVALID"


def _issues(error: ConfigError) -> dict[str, Any]:
    if not error.issues:
        return {}
    issues = [{"key": issue.key, "message": issue.message, "key_correction": issue.correction} for issue in error.issues]
    return {"issues": issues, "field": error.issues[0].key}
