"""The value head: what a rollout is expected to earn from here on, read from the policy's last hidden states by one linear layer.

Hidden states pass no gradient on, so the policy is trained by its own loss alone. The targets are the rewards themselves, summed
to the end: a head that is trained on its own guesses starts from nothing and is slow (VC-PPO, arXiv 2503.01491).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.train.adamw import KINDS, AdamW


class ValueHead:
    """Starts at 0 everywhere, and trains in float32."""

    def __init__(self, hidden: int, *, lr: float, updates: int, device: torch.device) -> None:
        self.weights = {"weight": torch.zeros(hidden, device=device), "bias": torch.zeros(1, device=device)}
        self._optimizer, self._updates = AdamW(self.weights, lr=lr, weight_decay=0.0), updates

    def __call__(self, states: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens]."""
        return states.float() @ self.weights["weight"] + self.weights["bias"]

    def fit(self, states: Tensor, returns: Tensor) -> float:
        """Takes its updates towards `returns`; returns the mean squared error before the first."""
        first = 0.0
        for update in range(self._updates):
            error = self(states) - returns
            first = float(error.square().mean()) if update == 0 else first
            self.weights["weight"].grad = error @ states.float() / len(error)
            self.weights["bias"].grad = error.mean().unsqueeze(0)
            self._optimizer.step()
        return first

    def state(self) -> dict[str, Tensor]:
        kept = {f"value.{name}": weight for name, weight in self.weights.items()}
        return kept | {f"value.{kind}.{name}": t for name, kinds in self._optimizer.state.items() for kind, t in kinds.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`; leaves the head as it is if there is none."""
        if "value.weight" not in tensors:
            return
        for name, weight in self.weights.items():
            weight.copy_(tensors[f"value.{name}"])
        started = [name for name in self.weights if f"value.step.{name}" in tensors]
        self._optimizer.load({name: {kind: tensors[f"value.{kind}.{name}"] for kind in KINDS} for name in started})
