"""Optimizers by name, of `torch.optim` or AdamW on its fused kernel, and learning-rate schedules."""

import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from penstock.config import TrainSection
from penstock.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


def lr_share(update: int, *, schedule: Schedule, warmup: int, total: int, floor: float) -> float:
    """Returns the share for `update`, counted from 0: rising to 1 over `warmup` updates, then falling to `floor` at the last.

    Beyond `total`, as in a run that is continued, it stays at `floor`.
    """
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    done = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (1.0 - floor) * left


BETAS, EPSILON = (0.9, 0.95), 1e-8
KINDS = ("step", "exp_avg", "exp_avg_sq")
"""The state of a weight: its steps so far, and the means of its gradients and of their squares."""


@dataclass(slots=True)
class AdamW:
    """Updates `weights` in place from their gradients; one without a gradient is left alone."""

    weights: Mapping[str, Tensor]
    lr: float
    weight_decay: float
    betas: tuple[float, float] = BETAS
    eps: float = EPSILON
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    """By weight and kind; a weight has none before its first step."""

    @property
    def updates(self) -> int:
        return max((int(kinds["step"]) for kinds in self.state.values()), default=0)

    @torch.no_grad()
    def step(self) -> None:
        names = [name for name, weight in self.weights.items() if weight.grad is not None]
        for name in names:
            if name not in self.state:
                weight = self.weights[name]
                fresh = torch.zeros((), device=weight.device), torch.zeros_like(weight), torch.zeros_like(weight)
                self.state[name] = dict(zip(KINDS, fresh, strict=True))
        weights = [self.weights[name] for name in names]
        steps, means, squares = ([self.state[name][kind] for name in names] for kind in KINDS)
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            weights,
            [weight.grad for weight in weights if weight.grad is not None],
            means,
            squares,
            [],
            steps,
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces the state by copies of `state`."""
        self.state = {
            name: {kind: value.to(self.weights[name].device, torch.float32, copy=True) for kind, value in kinds.items()}
            for name, kinds in state.items()
        }


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
