"""How a request in an OpenAI dialect asks to be sampled: fields that are honoured, and fields that are refused by name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import RequestError
from penstock.gateway.dialects import fields
from penstock.records import Sampling

SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed"})
"""What `sampling` reads, besides the limit."""


def sampling(body: dict[str, Any], defaults: Sampling, limit: str) -> Sampling:
    """What the request says, and `defaults` for the rest; `limit` is the field that holds the most tokens to sample."""
    if body.get(limit) is None and not body.keys() & SAMPLING:
        return defaults
    seed = body.get("seed")
    return replace(
        defaults,
        max_tokens=fields.integer(body, limit, defaults.max_tokens, low=1),
        temperature=fields.number(body, "temperature", defaults.temperature, low=0, high=100),
        top_p=fields.number(body, "top_p", defaults.top_p, low=1e-6, high=1),
        top_k=max(fields.integer(body, "top_k", defaults.top_k, low=-1), 0),
        min_p=fields.number(body, "min_p", defaults.min_p, low=0, high=1),
        stop=fields.strings(body, "stop") or defaults.stop,
        stop_ids=(*defaults.stop_ids, *fields.integers(body, "stop_token_ids")),
        seed=defaults.seed if seed is None else fields.integer(body, "seed", 0, low=-(2**53)),
    )


def refuse(body: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse the first field whose value would change the answer in a way that is not offered."""
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and value not in values:
            raise unsupported(name, value)


def unsupported(name: str, value: Any) -> RequestError:
    """A field that is understood and not offered."""
    return RequestError(f"{name}={fields.shown(value)} is not supported; leave it out", code="unsupported_parameter", param=name)
