"""Whose fault a failure was: an error of the author's code to one of the protocol's four categories."""

from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from urllib.parse import urlsplit

from penstock.errors import ConfigError, EngineError, GraderError
from penstock.rollout.guests import leaves
from penstock.rollout.server.wire import RolloutErrorCategory

HTTP_ERRORS = {
    ("aiohttp", "ClientError"),
    ("anthropic", "APIError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("openai", "APIError"),
    ("requests", "RequestException"),
}
"""Package and class from which a client's errors of status and connection descend; told by name, so that nothing is imported."""

MISUSE = (ValueError, TypeError, AssertionError, GraderError, ConfigError)

_LONGEST_CHAIN = 16


def category_of(error: BaseException, policy_url: str | None = None) -> RolloutErrorCategory:
    """The category of what `Work` raised. With `policy_url`, an HTTP error that led to it counts unless it was another host's."""
    if isinstance(error, TimeoutError):
        return RolloutErrorCategory.TIMEOUT
    if isinstance(error, EngineError):
        return RolloutErrorCategory.HTTP_ERROR
    first = next(leaves(error.__cause__)) if error.__cause__ is not None else error
    if policy_url is not None and any(_is_http(each) and _is_from(each, policy_url) for each in _chain(first)):
        return RolloutErrorCategory.HTTP_ERROR
    if isinstance(first, TimeoutError):
        return RolloutErrorCategory.TIMEOUT
    return RolloutErrorCategory.VALIDATION_ERROR if isinstance(first, MISUSE) else RolloutErrorCategory.AGENT_ERROR


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, through groups too."""
    waiting: list[BaseException] = [error]
    for _ in range(_LONGEST_CHAIN):
        if not waiting:
            return
        for leaf in leaves(waiting.pop(0)):
            yield leaf
            before = leaf.__cause__ or (None if leaf.__suppress_context__ else leaf.__context__)
            if before is not None:
                waiting.append(before)


def _is_http(error: BaseException) -> bool:
    return any((cls.__module__.partition(".")[0], cls.__name__) in HTTP_ERRORS for cls in type(error).__mro__)


def _is_from(error: BaseException, policy_url: str) -> bool:
    """Whether the request that failed went to the policy; also where the error does not say where it went."""
    for place in ("request.url", "request_info.real_url"):
        with suppress(Exception):  # another package's attributes: absent, or properties that raise
            return _address(str(attrgetter(place)(error))) == _address(policy_url)
    with suppress(Exception):
        host, port = attrgetter("host", "port")(error)
        return (host, port) == _address(policy_url)
    return True


def _address(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
