"""Optimizers by name: AdamW of our own, or any of `torch.optim` that steps by gradients alone."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.config import TrainSection
from penstock.errors import ConfigError
from penstock.train.adamw import AdamW

OPTIMIZERS = (
    *("adamw", "muon", "sgd", "adafactor", "adam", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop", "asgd"),
)
MATRICES_ONLY = ("muon",)
"""Optimizers that take matrices; norms, embedding and head are left to AdamW, as Muon's author does."""
OWN_SETTINGS = ("betas", "eps")
SET_ELSEWHERE = {"params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable", "maximize"}


class Optimizer(Protocol):
    """Updates weights in place from their gradients."""

    @property
    def lr(self) -> float: ...

    @lr.setter
    def lr(self, value: float) -> None: ...

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """By weight and kind; a weight has none before its first step."""
        ...

    @property
    def updates(self) -> int: ...

    def step(self) -> None: ...

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces the state by copies of `state`."""
        ...


def make_optimizer(weights: Mapping[str, Tensor], section: TrainSection) -> Optimizer:
    """Returns the optimizer that the section names. ConfigError for a name or settings that there are not."""
    name, given = section.optimizer, section.optimizer_settings
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OPTIMIZERS)}"
        raise ConfigError(f"train.optimizer = {name!r}: there is no such optimizer; {known}")
    if name == "adamw":
        _refuse_unknown(name, given, OWN_SETTINGS)
        return _adamw(weights, section, given)
    if name in MATRICES_ONLY:
        matrices = {key: weight for key, weight in weights.items() if is_matrix(key, weight)}
        rest = {key: weight for key, weight in weights.items() if key not in matrices}
        return SplitOptimizer(_torch_optimizer(name, matrices, section), _adamw(rest, section, {}))
    return _torch_optimizer(name, weights, section)


def refuse_optimizer(section: TrainSection) -> None:
    """Raises ConfigError as `make_optimizer` would."""
    make_optimizer({"weight": torch.zeros(1, 1)}, section)


def is_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and not name.startswith(("embed.", "head."))


def _adamw(weights: Mapping[str, Tensor], section: TrainSection, given: Mapping[str, Any]) -> AdamW:
    return AdamW(weights, lr=section.lr, weight_decay=section.weight_decay, **given)


def _torch_optimizer(name: str, weights: Mapping[str, Tensor], section: TrainSection) -> "TorchOptimizer":
    kind: Any = next(getattr(torch.optim, each) for each in dir(torch.optim) if each.lower() == name)
    takes = inspect.signature(kind).parameters
    _refuse_unknown(name, section.optimizer_settings, [key for key in takes if key not in SET_ELSEWHERE])
    decay = {"weight_decay": section.weight_decay} if "weight_decay" in takes else {}
    if section.weight_decay and not decay:
        raise ConfigError(f"train.weight_decay has no meaning for train.optimizer = {name!r}; leave it out")
    try:
        return TorchOptimizer(weights, kind(list(weights.values()), lr=section.lr, **decay, **_tuples(section.optimizer_settings)))
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"[train.optimizer_settings]: {name} does not take them: {cause}") from cause


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _refuse_unknown(name: str, given: Mapping[str, Any], known: "list[str] | tuple[str, ...]") -> None:
    for key in given:
        if key in ("lr", "weight_decay"):
            raise ConfigError(f"[train.optimizer_settings] {key}: set train.{key}")
        if key not in known:
            raise ConfigError(f"[train.optimizer_settings]: {name} has no setting {key!r}; it has {', '.join(known)}")


class TorchOptimizer:
    """One of `torch.optim`, whose state is kept by the names of the weights."""

    def __init__(self, weights: Mapping[str, Tensor], optimizer: Any) -> None:
        self._weights, self._optimizer, self._count = weights, optimizer, 0

    @property
    def lr(self) -> float:
        return self._optimizer.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = value

    @property
    def updates(self) -> int:
        return self._count

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """With the number of updates, `count`, at the first weight: not every optimizer keeps one."""
        kept = {name: dict(self._optimizer.state.get(weight, {})) for name, weight in self._weights.items()}
        if self._count and kept:
            next(iter(kept.values()))["count"] = torch.tensor(float(self._count))
        tensors = {name: {kind: value for kind, value in kinds.items() if value is not None} for name, kinds in kept.items()}
        return {name: kinds for name, kinds in tensors.items() if kinds}

    def step(self) -> None:
        self._optimizer.step()
        self._count += 1

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._optimizer.state.clear()
        for name, kinds in state.items():
            weight = self._weights[name]
            self._count = max(self._count, int(kinds.get("count", 0)))
            self._optimizer.state[weight] = {
                kind: value.clone() if kind == "step" else value.to(weight.device, copy=True)  # torch keeps its steps on the CPU
                for kind, value in kinds.items()
                if kind != "count"
            }


class SplitOptimizer:
    """Matrices under one optimizer, all other weights under AdamW."""

    def __init__(self, matrices: TorchOptimizer, others: AdamW) -> None:
        self._parts: tuple[TorchOptimizer, AdamW] = (matrices, others)

    @property
    def lr(self) -> float:
        return self._parts[0].lr

    @lr.setter
    def lr(self, value: float) -> None:
        for part in self._parts:
            part.lr = value

    @property
    def updates(self) -> int:
        return self._parts[0].updates

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        return {**self._parts[0].state, **self._parts[1].state}

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        others = self._parts[1].weights
        self._parts[0].load({name: kinds for name, kinds in state.items() if name not in others})
        self._parts[1].load({name: kinds for name, kinds in state.items() if name in others})
