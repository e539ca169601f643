"""The learner: computes gradients from a batch, and updates the weights in place.

Trainer and engine share the decoder's parameters. `compute` only reads them, so it may run in a thread while the engine decodes.
Only `apply` writes them; call it inside `engine.swap`.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import TrainSection
from penstock.engines.embedded.decoder import Decoder
from penstock.errors import TrainError
from penstock.train.batches import Batch, Pass, PassSet
from penstock.train.forward import hidden_states, logits_chunks, pass_logprobs, score_chunk, trunk_states
from penstock.train.losses import LOSSES
from penstock.train.losses.base import Loss, LossTokens, k3


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """Metrics of one update. Means are over trained tokens."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    ratio: float = 1.0
    importance: float = 1.0
    clip_fraction: float = 0.0
    kl_behaviour: float = 0.0
    """KL between the sampling policy and the trained one: from staleness, and from differences between engine and trainer."""
    kl_reference: float = 0.0
    """KL to the start policy; 0 if `train.kl` is 0, as it is not measured then."""
    logprob_gap: float = 0.0
    """The largest difference between engine and trainer in the log-probability of a token."""
    entropy: float = 0.0
    trained_tokens: int = 0
    forwarded_tokens: int = 0


class UpdateResult(NamedTuple):
    """The result of `compute`."""

    metrics: UpdateMetrics
    proximal: Tensor
    """[trained tokens]: log-probabilities before the first update on this batch. Pass them to `compute` for the next update."""


class Learner:
    """AdamW over the decoder's parameters. Weights in half precision have float32 copies, the masters, which are trained instead.

    If `train.kl` > 0, the decoder at construction is copied as the start policy, so construct before restoring a checkpoint.
    """

    def __init__(self, decoder: Decoder, section: TrainSection) -> None:
        self.decoder, self.section = decoder, section
        self._loss: Callable[[LossTokens, TrainSection], Loss] = LOSSES.load(section.loss)
        self._start = copy.deepcopy(decoder).requires_grad_(False) if section.kl > 0 else None
        self._weights = dict(decoder.named_parameters())
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()), lr=section.lr, betas=(0.9, 0.95), weight_decay=section.weight_decay, fused=True
        )

    def compute(self, batch: Batch, proximal: Tensor | None = None) -> UpdateResult:
        """Computes the gradients of the batch's loss and clips them, for `apply`. Raises TrainError if they are not finite.

        `proximal` comes from the first update on this batch; None for that first update.
        """
        self.zero()
        parts: list[_ChunkResult] = []
        for pass_set in batch.pass_sets:
            parts += self._backward_set(pass_set, batch, proximal, done=sum(len(part.tokens.new) for part in parts))
        if not parts:
            return UpdateResult(UpdateMetrics(), torch.zeros(0))
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), self.section.grad_clip)
        metrics = _metrics(parts, batch, grad_norm=float(norm))
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            self.zero()
            raise TrainError(
                f"the update has loss {metrics.loss} and gradient norm {metrics.grad_norm}, so the weights were left as they are; "
                "resume from the last checkpoint with a lower train.lr"
            )
        return UpdateResult(metrics, torch.cat([part.tokens.new for part in parts]) if proximal is None else proximal)

    def apply(self) -> None:
        """Takes one optimizer step in place; does nothing without gradients."""
        apart = [(weight, master) for weight, master in zip(*self._both(), strict=True) if master is not weight]
        for weight, master in apart:
            master.grad = None if weight.grad is None else weight.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in apart:
                weight.copy_(master)
        self.zero()

    def is_finite(self) -> bool:
        """Returns whether all weights are numbers. If not, every update fails, whatever it is computed from."""
        return all(bool(torch.isfinite(weight).all()) for weight in self._weights.values())

    def zero(self) -> None:
        for weight, master in zip(*self._both(), strict=True):
            weight.grad = master.grad = None

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint needs besides the weights: the optimizer's state, and masters that are not the weights."""
        tensors = {f"master.{name}": master for name, master in self._masters.items() if master is not self._weights[name]}
        for name, master in self._masters.items():
            for kind, value in self._optimizer.state[master].items():
                tensors[f"{kind}.{name}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`. Restore the weights first."""
        names = list(self._masters)
        saved = self._optimizer.state_dict()
        kinds = ("step", "exp_avg", "exp_avg_sq")
        saved["state"] = {
            at: {kind: tensors[f"{kind}.{name}"] for kind in kinds} for at, name in enumerate(names) if f"step.{name}" in tensors
        }
        self._optimizer.load_state_dict(saved)
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._weights[name]:
                    master.copy_(tensors[f"master.{name}"])

    def _both(self) -> tuple[list[Tensor], list[Tensor]]:
        return list(self._weights.values()), list(self._masters.values())

    def _backward_set(self, pass_set: PassSet, batch: Batch, proximal: Tensor | None, *, done: int) -> "list[_ChunkResult]":
        """Runs backward from each pass into the trunk's keys and values, then once through the trunk.

        So memory holds the autograd graphs of the trunk and of one pass, never of two passes.
        """
        references = self._references(pass_set, flat=batch.flat)
        trunk = trunk_states(self.decoder, pass_set.trunk)
        leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in trunk]
        parts: list[_ChunkResult] = []
        for at, one in enumerate(pass_set.passes):
            hidden = hidden_states(self.decoder, one, leaves, flat=batch.flat)
            old = None if proximal is None else proximal[done : done + len(one.terms)]
            parts += self._backward_pass(hidden, one, old, references[at] if references else None, rollouts=batch.rollouts)
            done += len(one.terms)
        if trunk:
            gradients = [leaf.grad for pair in leaves for leaf in pair]
            torch.autograd.backward([end for pair in trunk for end in pair], gradients)
        return parts

    def _backward_pass(
        self, hidden: Tensor, one: Pass, proximal: Tensor | None, reference: Tensor | None, *, rollouts: int
    ) -> "list[_ChunkResult]":
        """Computes loss and gradients of one pass. Logits exist for one chunk at a time; `leaf` sums the gradients of all."""
        leaf = hidden.detach().requires_grad_()
        parts: list[_ChunkResult] = []
        done = 0
        for chunk in logits_chunks(one, self.decoder.shape.vocab_size):
            span = slice(done, done + len(chunk.terms))
            done = span.stop
            scores = score_chunk(self.decoder, leaf, chunk)
            new = scores.logprobs  # [terms], as all below
            columns = torch.tensor([(t.logprob, t.advantage, t.weight / rollouts) for t in chunk.terms], device=leaf.device)
            behaviour, advantages, weights = columns.unbind(1)
            tokens = LossTokens(new, new.detach() if proximal is None else proximal[span], behaviour, advantages)
            loss = self._loss(tokens, self.section)
            penalty = torch.zeros_like(new) if reference is None else k3(new, reference[span])
            total = weights @ (loss.values + self.section.kl * penalty)
            total.backward()
            parts.append(_ChunkResult(tokens._replace(new=new.detach()), loss, penalty.detach(), scores.entropy, total.detach()))
        hidden.backward(leaf.grad)
        return parts

    def _references(self, pass_set: PassSet, *, flat: bool) -> list[Tensor]:
        """Returns the start policy's log-probabilities for each pass, [terms], or [] if there is no KL penalty."""
        if self._start is None:
            return []
        with torch.no_grad():
            trunk = trunk_states(self._start, pass_set.trunk)
        return [pass_logprobs(self._start, one, trunk, flat=flat) for one in pass_set.passes]


def is_machine_error(error: Exception) -> bool:
    """Returns whether memory, a disk or a device failed, rather than the computation."""
    if isinstance(error, MemoryError | OSError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "CUDA error" in str(error))


class _ChunkResult(NamedTuple):
    """The result of one chunk. Tensors are [terms], except `total`; only those in `loss` may carry a gradient."""

    tokens: LossTokens
    loss: Loss
    penalty: Tensor
    entropy: Tensor
    total: Tensor
    """[]: the chunk's share of the loss."""


def _master(weight: Tensor) -> Tensor:
    return weight if weight.dtype in (torch.float32, torch.float64) else weight.detach().float()


def _metrics(parts: list[_ChunkResult], batch: Batch, *, grad_norm: float) -> UpdateMetrics:
    new = torch.cat([part.tokens.new for part in parts])
    gap = new - torch.cat([part.tokens.behaviour for part in parts])

    def mean(values: list[Tensor]) -> float:
        return float(torch.cat(values).mean())

    return UpdateMetrics(
        loss=float(torch.stack([part.total for part in parts]).sum()),
        grad_norm=grad_norm,
        ratio=mean([part.loss.ratio for part in parts]),
        importance=mean([part.loss.importance for part in parts]),
        clip_fraction=mean([part.loss.clipped for part in parts]),
        kl_behaviour=mean([torch.exp(gap) - 1.0 - gap]),
        kl_reference=mean([part.penalty for part in parts]),
        logprob_gap=float(gap.abs().max()),
        entropy=mean([part.entropy for part in parts]),
        trained_tokens=batch.trained_tokens,
        forwarded_tokens=batch.forwarded_tokens,
    )
