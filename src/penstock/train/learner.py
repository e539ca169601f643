"""The learner: computes gradients from a batch, and updates the weights in place.

Trainer and engine share the decoder's parameters. `compute` only reads them, so it may run in a thread while the engine decodes.
Only `apply` writes them; call it inside `engine.swap`."""

import copy
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config import TrainSection
from penstock.engines.checkpoint_files import AdapterConfig, model_digest
from penstock.engines.embedded.decoder import Decoder, load_decoder, read_weights, save_decoder
from penstock.engines.embedded.lora import Adapter, read_adapter, share_decoder
from penstock.errors import TrainError
from penstock.records import Sequence
from penstock.train.advantages.base import SequenceTokens
from penstock.train.algorithm import Advantage, load_advantage, load_loss
from penstock.train.batches import CPU_TOKENS_PER_PASS, Batch, PassSet, ValueTargets, pack
from penstock.train.device import PassMemory, is_compile_error, to_device
from penstock.train.forward import EagerForward, PassForward, ScoredTerms
from penstock.train.losses.base import ESTIMATORS, Loss, LossTokens
from penstock.train.optim import KINDS, AdamW, lr_share, make_optimizer
from penstock.train.precision import MasterWeights
from penstock.train.teachers import ServedTeacher

MAX_HALVINGS = 6
"""An update fails if memory still runs out after so many halvings of what a pass may take."""
COMPILED_FROM = 1e14
"""Layers are compiled (half a minute, once) for updates of at least so many operations: a third of a second of a fast GPU."""
VALUE_LR, VALUE_UPDATES = 1e-2, 8
"""Of a value head whose advantage says nothing of them."""
MOST_DENSE = 8192
"""Longer passes are compiled too: without, the mask has a number for every pair of tokens."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """Metrics of one update. Means are over trained tokens."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    ratio: float = 1.0
    importance: float = 1.0
    importance_high: float = 0.0
    """Share of the tokens that are at least twice as likely as when they were sampled."""
    clip_fraction: float = 0.0
    kl_behaviour: float = 0.0
    """KL between the sampling policy and the trained one: from staleness, and from differences between engine and trainer."""
    kl_reference: float = 0.0
    """KL to the reference policy; 0 if `train.kl` is 0, as it is not measured then."""
    logprob_gap: float = 0.0
    """The largest difference between engine and trainer in the log-probability of a token."""
    entropy: float = 0.0
    served_share: float = 1.0
    """The share of the update that reached the weights as they are served. Below 1, bfloat16 swallowed some of it."""
    trained_tokens: int = 0
    forwarded_tokens: int = 0
    memory_halvings: int = 0
    """How often the GPU's memory has run out since the run began, so that passes were made smaller."""
    lr: float = 0.0
    """The rate of the update, as its schedule says."""
    value_error: float = 0.0
    """The value head's mean squared error before it was trained on this batch; 0 without one."""


def total_metrics(parts: SequenceOf[UpdateMetrics]) -> UpdateMetrics:
    """The metrics of several policies' updates as those of one: sums, the worst, and means over all trained tokens."""
    if len(parts) < 2:
        return parts[0] if parts else UpdateMetrics()
    tokens = sum(part.trained_tokens for part in parts) or 1

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.trained_tokens for part in parts) / tokens

    means = ("ratio", "importance", "importance_high", "clip_fraction", "kl_behaviour", "kl_reference", "entropy", "value_error")
    return UpdateMetrics(
        loss=sum(part.loss for part in parts),
        grad_norm=math.hypot(*(part.grad_norm for part in parts)),
        logprob_gap=max(part.logprob_gap for part in parts),
        served_share=min(part.served_share for part in parts),
        trained_tokens=sum(part.trained_tokens for part in parts),
        forwarded_tokens=sum(part.forwarded_tokens for part in parts),
        memory_halvings=max(part.memory_halvings for part in parts),
        lr=max(part.lr for part in parts),
        **{name: mean(name) for name in means},
    )


class UpdateResult(NamedTuple):
    """The result of `compute`."""

    metrics: UpdateMetrics
    proximal: Tensor
    """[trained tokens]: log-probabilities before the first update on this batch. Pass them to `compute` for the next update."""
    entropy: Tensor
    """[trained tokens]: of the distributions that this update was computed from."""
    value_targets: ValueTargets | None = None
    """Of a batch's first update: what `apply` trains the value head on."""


class CreditedTokens(NamedTuple):
    sequences: list[Sequence]
    value_targets: ValueTargets | None
    """None without a value head."""


class ValueHead:
    """What a rollout is expected to earn from here on, read from the policy's last hidden states by one linear layer in float32.

    Hidden states pass no gradient on, so the policy is trained by its own loss alone. The targets are the rewards themselves,
    summed to the end: a head that is trained on its own guesses starts from nothing and is slow (VC-PPO, arXiv 2503.01491).
    """

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


class Learner:
    """An optimizer over the decoder's parameters, or over those of an adapter.

    Weights in half precision have float32 copies, the masters, which are trained instead. If `train.kl` > 0, the decoder at
    construction is copied as the reference policy, so construct before restoring a checkpoint.
    """

    def __init__(
        self,
        decoder: Decoder,
        section: TrainSection,
        *,
        adapter: Adapter | None = None,
        exact: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        teacher: Decoder | ServedTeacher | None = None,
    ) -> None:
        """Masters start at the values in `exact`, else at the trained weights. `seed` decides how they are rounded.

        `adapter` is attached to a decoder that shares the tensors of the given one, which then stay as they are.
        """
        self.section, self.adapter, self._teacher = section, adapter, teacher
        self.decoder = decoder if adapter is None else share_decoder(decoder)
        self._loss = load_loss(section)
        self._moving: Mapping[str, Tensor] = {}
        """The weights of a moving reference."""
        self._reference = self._reference_policy() if section.kl > 0 else None
        if adapter is not None:
            adapter.attach(self.decoder)
        self._weights = dict(decoder.named_parameters()) if adapter is None else adapter.parameters
        half = decoder.embed.weight.dtype == torch.bfloat16
        self._rounded = MasterWeights(self._weights, exact=exact or {}, seed=seed) if half else None
        self._masters = self._weights if self._rounded is None else self._rounded.values
        self._served_share = torch.ones(())
        self._memory = PassMemory(decoder) if decoder.device.type == "cuda" else None
        self._compiled, self._compilable = False, True
        self._thread = None if self._memory is None else ThreadPoolExecutor(1, "learner")
        """Always the same one: cuDNN prepares for each shape once per thread."""
        self._optimizer = make_optimizer(self._masters, section)
        self._value_head = self._make_value_head()

    def _reference_policy(self) -> Decoder:
        """A copy of the decoder; without a copy of the weights if these are not trained."""
        moves = self.section.kl_reference == "moving"
        if self.adapter is None:
            reference = copy.deepcopy(self.decoder).requires_grad_(False)
            self._moving = dict(reference.named_parameters()) if moves else {}
            return reference
        reference = share_decoder(self.decoder)
        if moves:
            own = copy.deepcopy(self.adapter)
            own.attach(reference)
            self._moving = {name: weight.requires_grad_(False) for name, weight in own.parameters.items()}
        return reference

    def _make_value_head(self) -> ValueHead | None:
        advantage = load_advantage(self.section)
        if "values" not in advantage.needs:
            return None
        settings = advantage.settings
        lr, updates = getattr(settings, "value_lr", VALUE_LR), getattr(settings, "value_updates", VALUE_UPDATES)
        return ValueHead(self.decoder.shape.hidden, lr=lr, updates=updates, device=self.decoder.device)

    @property
    def rounds(self) -> bool:
        """Whether the decoder's weights are rounded masters."""
        return self._rounded is not None

    @property
    def size(self) -> int:
        """Bytes of the weights that are trained, as they are served."""
        return sum(weight.numel() * weight.element_size() for weight in self._weights.values())

    @property
    def updates(self) -> int:
        """How many updates the weights have had, those before a resume included."""
        return self._optimizer.updates

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        section = self.section
        total = section.steps * section.updates_per_step
        share = lr_share(
            self.updates, schedule=section.schedule, warmup=section.warmup_updates, total=total, floor=section.lr_floor
        )
        return section.lr * share

    @property
    def served_share(self) -> float:
        """The share of the last update that reached the weights as they are served; 1 in float32. See `MasterWeights.publish`."""
        return float(self._served_share)

    def pack(self, sequences: Iterable[Sequence], *, rollouts: int, value_targets: ValueTargets | None = None) -> Batch:
        """Lays out `sequences` for `compute`, in passes that fit into memory."""
        limit, memory = self.section.tokens_per_pass, self._memory
        if limit == "auto":
            limit = CPU_TOKENS_PER_PASS if memory is None else memory.tokens_per_pass(self._reserved())
        elif memory is not None:
            limit = max(1, limit >> memory.halvings)
        made = pack(sequences, rollouts=rollouts, tokens_per_pass=limit, shared_prefix=self.section.shared_prefix)
        return replace(made, value_targets=value_targets)

    def compute(self, batch: Batch, proximal: Tensor | None = None) -> UpdateResult:
        """Computes the gradients of the batch's loss and clips them, for `apply`. Raises TrainError if they are not finite.

        `proximal` comes from the first update on this batch; None for that first update. If a GPU's memory runs out, the passes
        are made smaller from then on.
        """
        if self._thread is None:
            return self._compute_or_halve(batch, proximal)
        return self._thread.submit(self._compute_or_halve, batch, proximal).result()

    def _compute_or_halve(self, batch: Batch, proximal: Tensor | None) -> UpdateResult:
        done, tried = None, batch
        while done is None:
            try:
                done = self._compute(tried, proximal)
            except torch.OutOfMemoryError as cause:
                self._halve(tried, cause)
            except Exception as cause:
                self._stop_compiling(cause)
                continue
            if done is None:  # outside of the except block, so that the failed pass is freed
                smaller = tried.repacked(max(1, tried.tokens_per_pass // 2))
                proximal = None if proximal is None else proximal[_permutation(tried, smaller)]
                tried = smaller
        if tried is batch:
            return done
        order = _permutation(tried, batch)
        return done._replace(proximal=done.proximal[order], entropy=done.entropy[order])

    def _halve(self, batch: Batch, cause: torch.OutOfMemoryError) -> None:
        """Plans with half the memory from now on. Raises TrainError if that does not help any more."""
        self.zero()
        if self._memory is None or self._memory.halvings >= MAX_HALVINGS:
            raise TrainError(
                f"the GPU's memory is too small for this update ({batch.tokens_per_pass} tokens per pass): {cause}; "
                "lower engine.cache_tokens, use shorter rollouts or a smaller model"
            ) from cause
        self._memory.halvings += 1
        torch.cuda.empty_cache()
        log.warning("GPU memory ran out with %d tokens per pass; they are halved from here on", batch.tokens_per_pass)

    def _stop_compiling(self, cause: Exception) -> None:
        """Computes without compiled layers from now on. Raises `cause` if that would not help."""
        self.zero()
        if not self._compiled or not is_compile_error(cause):
            raise cause
        self._compiled, self._compilable = False, False
        log.warning("layers cannot be compiled here, so updates are slower: %s", str(cause).strip().partition("\n")[0])

    def _compute(self, batch: Batch, proximal: Tensor | None) -> UpdateResult:
        self.zero()
        whole = self._whole_loss(batch, proximal) if self._loss.whole_sequences else None
        parts: list[_ChunkResult] = []
        for pass_set in batch.pass_sets:
            parts += self._backward_set(pass_set, batch, proximal, whole, done=sum(len(part.tokens.new) for part in parts))
        if not parts:
            return UpdateResult(UpdateMetrics(), torch.zeros(0), torch.zeros(0))
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self.section.grad_clip)
        halvings = 0 if self._memory is None else self._memory.halvings
        metrics = replace(_metrics(parts, batch, grad_norm=float(norm)), memory_halvings=halvings, lr=self.lr)
        targets = batch.value_targets if proximal is None else None
        if targets is not None:
            metrics = replace(metrics, value_error=targets.error)
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            self.zero()
            raise TrainError(
                f"the update has loss {metrics.loss} and gradient norm {metrics.grad_norm}, so the weights were left as they are; "
                "resume from the last checkpoint with a lower train.lr"
            )
        before = torch.cat([part.tokens.new for part in parts]) if proximal is None else proximal
        return UpdateResult(metrics, before, torch.cat([part.entropy for part in parts]), targets)

    def credit_tokens(
        self, sequences: SequenceOf[Sequence], rewards: SequenceOf[list[float]], advantage: Advantage
    ) -> CreditedTokens:
        """Returns the sequences with the credit that an advantage of tokens gives, from the `rewards` of their trained tokens."""
        if self._thread is None:
            return self._credit_tokens(sequences, rewards, advantage)
        return self._thread.submit(self._credit_tokens, sequences, rewards, advantage).result()

    def _credit_tokens(
        self, sequences: SequenceOf[Sequence], rewards: SequenceOf[list[float]], advantage: Advantage
    ) -> CreditedTokens:
        values, targets = self._expect(sequences, rewards, getattr(advantage.settings, "discount", 1.0))
        judged = self._judge(sequences, advantage.needs)
        tokens = [
            SequenceTokens(
                rollout_id=sequence.rollout_id,
                steps=list(compress(sequence.steps, sequence.trained)),
                rewards=earned,
                logprobs=list(compress(sequence.logprobs, sequence.trained)),
                values=expected,
                teacher=teacher,
                recomputed=list(compress(sequence.recomputed, sequence.trained)),
            )
            for sequence, earned, expected, teacher in zip(sequences, rewards, values, judged, strict=True)
        ]
        credit = zip(sequences, advantage(tokens), strict=True)
        made = [replace(sequence, advantages=_placed(sequence, values)) for sequence, values in credit]
        return CreditedTokens(made, targets)

    def _judge(self, sequences: SequenceOf[Sequence], needs: Collection[str]) -> list[list[float]]:
        """Returns the teacher's log-probabilities of the trained tokens of each sequence, where they are needed."""
        if "teacher" not in needs:
            return [[] for _ in sequences]
        if self._teacher is None:
            raise TrainError(f"train.advantage = {self.section.advantage!r} needs a teacher; give the learner one")
        if isinstance(self._teacher, ServedTeacher):
            return self._teacher.logprobs(sequences)
        batch = self.pack(sequences, rollouts=1)
        return _by_sequence(self.logprobs(batch, self._teacher), batch, sequences)

    def _expect(
        self, sequences: SequenceOf[Sequence], rewards: SequenceOf[list[float]], discount: float
    ) -> tuple[list[list[float]], ValueTargets | None]:
        """Returns what the value head expects at each trained token, and what it is to be trained on."""
        if self._value_head is None:
            return [[] for _ in sequences], None
        batch = self.pack(sequences, rollouts=1)
        order = np.argsort(batch.columns().token)  # trained tokens in the order of the sequences
        states = self._states(batch)[torch.from_numpy(order).to(self.decoder.device)]  # pyright: ignore[reportUnknownMemberType]
        expected = self._value_head(states)
        returns = torch.tensor([value for each in rewards for value in _to_go(each, discount)], device=states.device)
        targets = ValueTargets(states, returns, float((expected - returns).square().mean()))
        flat = iter(cast("list[float]", expected.tolist()))
        return [[next(flat) for _ in each] for each in rewards], targets

    @torch.no_grad()
    def _states(self, batch: Batch) -> Tensor:
        """Returns the hidden states that predict the terms, [trained tokens, hidden]."""
        parts: list[Tensor] = []
        for pass_set in batch.pass_sets:
            forward = self._forward(self.decoder, batch, states=True)
            trunk, length = forward.trunk_states(pass_set.trunk), len(pass_set.trunk)
            parts += [
                terms.states for one in pass_set.passes for terms in forward.scored(one, trunk, length) if terms.states is not None
            ]
        return torch.cat(parts)

    def reference_gaps(self, sequences: SequenceOf[Sequence]) -> list[list[float]]:
        """Returns estimates of the divergence from the reference policy, for the trained tokens of each sequence."""
        if self._reference is None or not sequences:
            return [[] for _ in sequences]
        batch = self.pack(sequences, rollouts=1)
        sampled = torch.from_numpy(batch.columns().logprob).to(self.decoder.device).float()  # pyright: ignore[reportUnknownMemberType]
        gaps = ESTIMATORS[self.section.kl_estimator](sampled, self.logprobs(batch, self._reference))
        return _by_sequence(gaps, batch, sequences)

    def apply(self, update: UpdateResult | None = None) -> None:
        """Takes one optimizer step in place, with the gradients that `compute` left; does nothing without any.

        `update` is what `compute` returned; the value head is trained on its targets.
        """
        if any(master.grad is not None for master in self._masters.values()):
            self._optimizer.lr = self.lr
            self._optimizer.step()
            self.publish()
            self._move_reference()
            if self._value_head is not None and update is not None and update.value_targets is not None:
                self._value_head.fit(update.value_targets.states, update.value_targets.returns)
        self.zero()

    @torch.no_grad()
    def _move_reference(self) -> None:
        if self._moving and self.updates % self.section.reference_every == 0:
            for name, weight in self._moving.items():
                weight.copy_(self._weights[name])

    def publish(self) -> None:
        """Rounds the masters into the decoder's weights, in place; does nothing where those are float32."""
        if self._rounded is not None:
            self._served_share = self._rounded.publish(compiled=self._compiled)

    def is_finite(self) -> bool:
        """Returns whether all weights are numbers. If not, every update fails, whatever it is computed from."""
        return all(bool(torch.isfinite(weight).all()) for weight in self._weights.values())

    def zero(self) -> None:
        """Drops the gradients of an update."""
        for weight, master in zip(self._weights.values(), self._masters.values(), strict=True):
            weight.grad = master.grad = None

    @property
    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is: the trained weights, two means for each, and masters that are not the weights."""
        extra = 8 if self._rounded is None else 12
        return sum(weight.numel() * (weight.element_size() + extra) for weight in self._weights.values())

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint needs besides the weights: the optimizer's state, and masters that are not the weights."""
        tensors = {} if self._rounded is None else {f"master.{name}": master for name, master in self._masters.items()}
        for name, kinds in self._optimizer.state.items():
            tensors |= {f"{kind}.{name}": value for kind, value in kinds.items()}
        tensors |= {f"reference.{name}": weight for name, weight in self._moving.items()}
        return tensors | ({} if self._value_head is None else self._value_head.state())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the result of `state`. Restore the weights first."""
        state, exact = dict[str, dict[str, Tensor]](), dict[str, Tensor]()
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if kind == "reference" and name in self._moving:
                with torch.no_grad():
                    self._moving[name].copy_(value)
            elif kind == "master":
                exact[name] = value
            elif name in self._masters and kind not in ("reference", "value"):
                state.setdefault(name, {})[kind] = value
        self._optimizer.load(state)
        if self._value_head is not None:
            self._value_head.load(tensors)
        if self._rounded is not None:
            self._rounded.load(exact)
        else:  # saved by a run in half precision: its masters are more exact than its weights
            with torch.no_grad():
                for name, value in exact.items():
                    self._weights[name].copy_(value)

    def save_weights(self, folder: Path) -> None:
        """Writes the trained weights: as `model.safetensors`, or as the adapter's files."""
        if self.adapter is None:
            save_decoder(self.decoder, folder)
        else:
            self.adapter.save(folder)

    def load_weights(self, folder: Path) -> None:
        """Reads what `save_weights` wrote, in place. Raises ModelError if it is of another model or adapter."""
        if self.adapter is None:
            self.decoder.load_state_dict(load_decoder(folder).state_dict())
        else:
            self.adapter.load(read_adapter(folder, self.decoder.shape).parameters)

    def _whole_loss(self, batch: Batch, proximal: Tensor | None) -> "_WholeLoss":
        """Computes a loss of whole sequences, of which a chunk has only some tokens. Takes a pass without gradients."""
        device, columns, owners = self.decoder.device, batch.columns(), batch.owners()
        new = self.logprobs(batch).requires_grad_()  # [trained tokens], as all below

        def tensor(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device)  # pyright: ignore[reportUnknownMemberType]

        old = new.detach() if proximal is None else proximal
        unknown = batch.recomputed()
        tokens = LossTokens(
            new,
            old,
            _behaviour(tensor(columns.logprob).float(), old, None if unknown is None else tensor(unknown)),
            tensor(columns.advantage).float(),
            tensor(owners.sequence[columns.token]),
            tensor(owners.turn[columns.token]),
        )
        loss = self._loss(tokens)
        total = (tensor(columns.weight) / batch.rollouts).float() @ loss.values
        (slopes,) = torch.autograd.grad(total, [new])
        return _WholeLoss(loss._replace(values=loss.values.detach()), slopes)

    @torch.no_grad()
    def logprobs(self, batch: Batch, decoder: Decoder | None = None) -> Tensor:
        """Returns the log-probabilities of all terms under the weights being trained, or `decoder`, [trained tokens]."""
        parts = [self._set_logprobs(decoder or self.decoder, pass_set, batch) for pass_set in batch.pass_sets]
        return torch.cat(parts) if parts else torch.zeros(0)

    def _set_logprobs(self, decoder: Decoder, pass_set: PassSet, batch: Batch) -> Tensor:
        forward = self._forward(decoder, batch)
        trunk, length = forward.trunk_states(pass_set.trunk), len(pass_set.trunk)
        return torch.cat([terms.logprobs for one in pass_set.passes for terms in forward.scored(one, trunk, length)])

    def _backward_set(
        self, pass_set: PassSet, batch: Batch, proximal: Tensor | None, whole: "_WholeLoss | None", *, done: int
    ) -> "list[_ChunkResult]":
        """Runs backward from each pass into the trunk's keys and values, then once through the trunk.

        So memory holds the autograd graphs of the trunk and of one pass, never of two passes.
        """
        forward, references = self._forward(self.decoder, batch), self._references(pass_set, batch)
        trunk = forward.trunk_states(pass_set.trunk)
        leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in trunk]
        parts: list[_ChunkResult] = []
        start, unknown = done, batch.recomputed()
        for one in pass_set.passes:
            for terms in forward.scored(one, leaves, len(pass_set.trunk)):
                span = slice(done, done + len(terms.logprobs))
                done = span.stop
                old = None if proximal is None else proximal[span]
                reference = None if references is None else references[span.start - start : span.stop - start]
                part = None if whole is None else whole.part(span)
                if unknown is not None:
                    own = terms.logprobs.detach() if old is None else old
                    terms = terms._replace(behaviour=_behaviour(terms.behaviour, own, to_device(unknown[span], own.device)))
                parts.append(self._backward_terms(terms, old, reference, part, rollouts=batch.rollouts))
        ends = [
            (end, leaf.grad) for pair, copies in zip(trunk, leaves, strict=True) for end, leaf in zip(pair, copies, strict=True)
        ]
        if ends := [(end, gradient) for end, gradient in ends if end.requires_grad]:  # an adapter may begin above the first layer
            torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])
        return parts

    def _backward_terms(
        self,
        terms: ScoredTerms,
        proximal: Tensor | None,
        reference: Tensor | None,
        whole: "_WholeLoss | None",
        *,
        rollouts: int,
    ) -> "_ChunkResult":
        """Computes the loss of a chunk, and its gradients. `whole` has them already, where the loss is one of sequences."""
        new = terms.logprobs  # [terms], as all below
        old = new.detach() if proximal is None else proximal
        tokens = LossTokens(new, old, terms.behaviour, terms.advantages)
        loss = self._loss(tokens) if whole is None else whole.loss
        penalty = torch.zeros_like(new) if reference is None else ESTIMATORS[self.section.kl_estimator](new, reference)
        weights = (terms.weights / rollouts).float()
        others = weights @ (self._kl * penalty - self.section.entropy * terms.entropy)
        total = weights @ loss.values + others
        if whole is None:
            total.backward()
        else:
            (whole.slopes @ new + others).backward()
        return _ChunkResult(tokens._replace(new=new.detach()), loss, penalty.detach(), terms.entropy.detach(), total.detach())

    @torch.no_grad()
    def _references(self, pass_set: PassSet, batch: Batch) -> Tensor | None:
        """Returns the reference policy's log-probabilities for all terms of the set, [terms]; None if there is no KL penalty."""
        return None if self._reference is None else self._set_logprobs(self._reference, pass_set, batch)

    @property
    def _kl(self) -> float:
        """The weight of the penalty in the loss; one in the reward is measured only."""
        return self.section.kl if self.section.kl_in == "loss" else 0.0

    def _forward(self, decoder: Decoder, batch: Batch, *, states: bool = False) -> PassForward:
        slopes = self.section.entropy > 0
        if self._memory is None or batch.flat:
            return EagerForward(decoder, flat=batch.flat, entropy_slopes=slopes, states=states)
        from penstock.train.tree_forward import TreeForward  # takes a second, which a CPU need not spend

        memory, reserved = self._memory, self._reserved()
        self._compiled = self._compiled or (self._compilable and _pays_to_compile(decoder, batch))
        return TreeForward(
            decoder,
            compiled=self._compiled,
            logits_rows=memory.logits_rows(reserved),
            checkpointed=lambda tokens: memory.checkpointed(tokens, reserved),
            entropy_slopes=slopes,
            states=states,
        )

    def _reserved(self) -> int:
        """Returns the bytes that an update still needs for gradients and the optimizer's state."""
        size = sum(master.numel() for master in self._masters.values() if master.grad is None)
        moments = 0 if self._optimizer.state else sum(master.numel() for master in self._masters.values())
        return 4 * size + 8 * moments


def make_learner(
    decoder: Decoder, section: TrainSection, model: Path, *, seed: int, teacher: Decoder | ServedTeacher | None = None
) -> Learner:
    """Make the learner of a policy that starts at the files in `model`. If `decoder` is in bfloat16, its masters are read there."""
    weight = decoder.embed.weight
    if section.method == "lora":
        settings = AdapterConfig(section.rank, section.alpha, section.target_modules, model.absolute(), model_digest(model))
        adapter = Adapter(decoder.shape, settings, device=weight.device, dtype=weight.dtype, seed=seed)
        return Learner(decoder, section, adapter=adapter, seed=seed, teacher=teacher)
    exact = read_weights(model) if weight.dtype == torch.bfloat16 else None
    return Learner(decoder, section, exact=exact, seed=seed, teacher=teacher)


def is_machine_error(error: Exception) -> bool:
    """Returns whether memory, a disk or a device failed, rather than the computation."""
    kinds = MemoryError | OSError | torch.OutOfMemoryError | torch.AcceleratorError
    if isinstance(error, kinds) or isinstance(error.__cause__, kinds):
        return True
    return isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "CUDA error" in str(error))


class _WholeLoss(NamedTuple):
    """A loss of whole sequences. Tensors are [trained tokens]."""

    loss: Loss
    slopes: Tensor
    """Of the batch's loss by each log-probability."""

    def part(self, span: slice) -> "_WholeLoss":
        return _WholeLoss(Loss(*(each[span] for each in self.loss)), self.slopes[span])


def _behaviour(recorded: Tensor, own: Tensor, unknown: Tensor | None) -> Tensor:
    """Returns the recorded log-probabilities, and the learner's own where these are unknown."""
    return recorded if unknown is None else torch.where(unknown, own, recorded)


class _ChunkResult(NamedTuple):
    """The result of one chunk. Tensors are [terms], except `total`; only those in `loss` may carry a gradient."""

    tokens: LossTokens
    loss: Loss
    penalty: Tensor
    entropy: Tensor
    total: Tensor
    """[]: the chunk's share of the loss."""


def _by_sequence(values: Tensor, batch: Batch, sequences: SequenceOf[Sequence]) -> list[list[float]]:
    """Returns values of terms, in the order of computation, by the sequences of the batch and their trained tokens."""
    order = torch.from_numpy(np.argsort(batch.columns().token))  # pyright: ignore[reportUnknownMemberType]
    flat = iter(cast("list[float]", values.cpu()[order].tolist()))
    return [[next(flat) for flag in sequence.trained if flag] for sequence in sequences]


def _placed(sequence: Sequence, values: SequenceOf[float]) -> tuple[float, ...]:
    """Returns the values at the places of trained tokens, 0 at all others."""
    each = iter(values)
    return tuple(next(each) if trained else 0.0 for trained in sequence.trained)


def _to_go(rewards: list[float], discount: float) -> list[float]:
    found, later = [0.0] * len(rewards), 0.0
    for at in range(len(rewards) - 1, -1, -1):
        found[at] = later = rewards[at] + discount * later
    return found


def _pays_to_compile(decoder: Decoder, batch: Batch) -> bool:
    size = sum(weight.numel() for weight in decoder.parameters())
    longest = max((len(one.ids) for pass_set in batch.pass_sets for one in pass_set.passes), default=0)
    return 6 * size * batch.forwarded_tokens >= COMPILED_FROM or longest > MOST_DENSE


def _permutation(given: Batch, wanted: Batch) -> Tensor:
    """Returns [terms]: for each term of `wanted`, its index in `given`, a batch of the same sequences."""
    places = {number: at for at, number in enumerate(given.term_numbers())}
    return torch.tensor([places[number] for number in wanted.term_numbers()])


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
        importance_high=mean([(gap > math.log(2.0)).float()]),
        clip_fraction=mean([part.loss.clipped for part in parts]),
        kl_behaviour=mean([torch.exp(gap) - 1.0 - gap]),
        kl_reference=mean([part.penalty for part in parts]),
        logprob_gap=float(gap.abs().max()),
        entropy=mean([part.entropy for part in parts]),
        trained_tokens=batch.trained_tokens,
        forwarded_tokens=batch.forwarded_tokens,
    )
