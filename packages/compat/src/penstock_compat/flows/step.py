"""SubmittedStep: a flow's part of one model call; the gateway adds the rest from its own record of that call."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, cast

from penstock.sdk.context import finite_reward
from penstock.sdk.samples import to_json_values

MAX_TOKEN_ID = 2**31 - 1


@dataclass
class SubmittedStep:
    """One call: its whole context and the tokens that it sampled. ValueError names a field that cannot be used."""

    prompt_ids: list[int]
    """The whole context, as the engine saw it."""
    response_ids: list[int]
    """The sampled tokens, and nothing else."""
    reward: float | None = None
    """The reward of this call; None leaves it to the grader."""
    multi_modal_data: Any = None
    """Must be empty: the gateway takes text."""
    rollout_log_probs: list[float] | None = None
    """The log-probabilities of `response_ids`; None takes those that the gateway recorded."""
    routed_experts: Any = None
    """Must be empty."""
    trajectory_uid: str = ""
    """The rollout; empty is the running one."""
    prompt_uid: str = ""
    """The group; empty is the running one."""
    step_index: int = 0
    policy_version: int = 0
    """Ignored: the version is the one that the engine served."""
    is_last: bool = False
    """Whether the rollout is complete with this call."""
    metadata: dict[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.prompt_ids = _ids(self.prompt_ids, "prompt_ids")
        self.response_ids = _ids(self.response_ids, "response_ids")
        if not self.prompt_ids:
            raise ValueError("Step.prompt_ids is empty; give all the tokens that the model saw")
        if self.reward is not None:
            self.reward = finite_reward(self.reward)
        if self.rollout_log_probs is not None:
            self.rollout_log_probs = _log_probs(self.rollout_log_probs, len(self.response_ids))
        for name in ("multi_modal_data", "routed_experts"):
            if getattr(self, name) is not None and len(getattr(self, name)):
                raise ValueError(f"Step.{name} cannot be trained on here; leave it out")

    def to_json(self) -> dict[str, Any]:
        """Returns the body that the gateway takes."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "multi_modal_data": None, "routed_experts": None, "metadata": cast("Any", to_json_values(self.metadata))}


def _ids(value: Any, name: str) -> list[int]:
    ids = _items(value, f"Step.{name}")
    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise ValueError(f"Step.{name}[{index}] is {token_id!r}; give token ids")
    return ids


def _log_probs(value: Any, length: int) -> list[float]:
    values = _items(value, "Step.rollout_log_probs")
    if len(values) != length:
        raise ValueError(f"Step.rollout_log_probs has {len(values)} values for {length} response_ids; give one for each")
    for index, item in enumerate(values):
        if not isinstance(item, int | float) or not math.isfinite(item):
            raise ValueError(f"Step.rollout_log_probs[{index}] is {item!r}; give finite numbers")
    return [float(value) for value in values]


def _items(value: Any, name: str) -> list[Any]:
    """Returns a list, tuple, array or tensor as a list of plain numbers."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {type(value).__name__}; give a list of numbers")
    return list(cast("Iterable[Any]", values))
