"""Encodes a rollout's results as the JSON bodies of its two callbacks."""

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
from penstock.sdk.samples import RolloutSample, to_json_values

EXTENSION_FIELDS = ("strays", "reward", "step_rewards", "components", "filled", "misreported", "end")
"""Fields that other implementations of the protocol do not know: left out if unset."""


def completion_body(request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    body = RolloutCompleteRequest(
        rollout_id=request.rollout_id,
        status=result.status,
        extra_fields=request.extra_fields,
        err_message=result.err_message,
        err_category=result.err_category,
        strays=list(result.direct_calls) or None,
        end=result.end,
    )
    return encode(body.model_dump())


def grade_body(request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    """`result` must have passed `validate_grade`."""
    body = GraderCompleteRequest(
        rollout_id=request.rollout_id,
        status=GraderStatus(result.status),
        samples={name: _sample(sample) for name, sample in result.samples.items()},
        err_message=result.err_message,
        err_category=result.err_category,
        reward=result.reward,
        step_rewards=result.step_rewards or None,
        components=result.components or None,
        filled=list(result.filled) or None,
        misreported=list(result.misreported) or None,
        end=result.end,
    )
    return encode(body.model_dump())


def validate_grade(result: ExecutionResult) -> ExecutionResult:
    """Returns `result` if all its rewards are finite numbers; else a failure that says so, without rewards."""
    try:
        for sample in result.samples.values():
            sample.reward = None if sample.reward is None else finite_reward(sample.reward)
        result.reward = None if result.reward is None else finite_reward(result.reward)
        result.step_rewards = {step: finite_reward(value) for step, value in result.step_rewards.items()}
        return result
    except GraderError as error:
        for sample in result.samples.values():
            sample.reward = None
        return failure_result(str(error), RolloutErrorCategory.VALIDATION_ERROR, samples=result.samples)


def failure_result(
    message: str, category: RolloutErrorCategory, *, samples: dict[str, RolloutSample] | None = None
) -> ExecutionResult:
    return ExecutionResult(status=RolloutStatus.FAILURE, samples=samples or {}, err_message=message, err_category=category)


def encode(body: dict[str, Any]) -> bytes:
    """Encodes any value of an author's messages and metrics: NaN and infinity become null, lone surrogates a question mark."""
    fields = {name: value for name, value in body.items() if value is not None or name not in EXTENSION_FIELDS}
    try:
        return orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # lone surrogates, integers beyond 64 bits, objects
        return json.dumps(_clean(fields), ensure_ascii=False, default=str).encode()


def _sample(sample: RolloutSample) -> SampleBody:
    return SampleBody(
        id=sample.id,
        messages=to_json_values(sample.messages),
        label=sample.label,
        reward=sample.reward,
        remove_sample=sample.remove_sample,
        metrics=cast("dict[str, Any]", to_json_values(sample.metrics)),
        extra_fields=cast("dict[str, Any]", to_json_values(sample.extra_fields)),
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
