"""What came of a rollout to the bodies of its two callbacks, as bytes that any peer can read."""

import json
import math
from typing import Any, cast

import orjson

from penstock.errors import GraderError
from penstock.rollout.server.backend import ExecutionResult
from penstock.rollout.server.protocol import (
    GraderCompleteRequest,
    GraderStatus,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutStatus,
    SampleBody,
)
from penstock.sdk.context import finite_reward
from penstock.sdk.samples import RolloutSample, plain

OURS = ("strays", "reward", "step_rewards", "filled", "end")
"""Fields that peers of the plain protocol do not know: left out where they say nothing."""


def completion_body(request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    """How the workflow ended."""
    body = RolloutCompleteRequest(
        rollout_id=request.rollout_id,
        status=result.status,
        extra_fields=request.extra_fields,
        err_message=result.err_message,
        err_category=result.err_category,
        strays=list(result.strays) or None,
        end=result.end,
    )
    return encode(body.model_dump())


def grade_body(request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    """How the grader ended; see `checked`."""
    body = GraderCompleteRequest(
        rollout_id=request.rollout_id,
        status=GraderStatus(result.status),
        samples={name: _sample(sample) for name, sample in result.samples.items()},
        err_message=result.err_message,
        err_category=result.err_category,
        reward=result.reward,
        step_rewards=result.step_rewards or None,
        filled=list(result.filled) or None,
        end=result.end,
    )
    return encode(body.model_dump())


def checked(result: ExecutionResult) -> ExecutionResult:
    """A grader's result that can be sent: where a reward is no finite number, a failure that says so, without rewards."""
    try:
        for sample in result.samples.values():
            sample.reward = None if sample.reward is None else finite_reward(sample.reward)
        result.reward = None if result.reward is None else finite_reward(result.reward)
        result.step_rewards = {step: finite_reward(value) for step, value in result.step_rewards.items()}
        return result
    except GraderError as error:
        for sample in result.samples.values():
            sample.reward = None
        return failure(str(error), RolloutErrorCategory.VALIDATION_ERROR, samples=result.samples)


def failure(message: str, category: RolloutErrorCategory, *, samples: dict[str, RolloutSample] | None = None) -> ExecutionResult:
    """A result of something that did not end well."""
    return ExecutionResult(status=RolloutStatus.FAILURE, samples=samples or {}, err_message=message, err_category=category)


def encode(body: dict[str, Any]) -> bytes:
    """JSON, whatever an author's messages and metrics hold: numbers that JSON lacks become null, half characters a mark."""
    told = {name: value for name, value in body.items() if value is not None or name not in OURS}
    try:
        return orjson.dumps(told, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(_clean(told), ensure_ascii=False, default=str).encode()


def _sample(sample: RolloutSample) -> SampleBody:
    return SampleBody(
        id=sample.id,
        messages=plain(sample.messages),
        label=sample.label,
        reward=sample.reward,
        remove_sample=sample.remove_sample,
        metrics=cast("dict[str, Any]", plain(sample.metrics)),
        extra_fields=cast("dict[str, Any]", plain(sample.extra_fields)),
    )


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_clean(str(key)): _clean(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in cast("list[Any]", value)]
    return value
