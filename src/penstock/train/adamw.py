"""AdamW on torch's fused kernel, without `torch.optim`: the first use of that imports torch's compiler, seconds of every start."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
