"""Master weights: float32 copies of weights that are served in bfloat16. They are what the optimizer trains.

Gradients are summed in float32 too, however many passes an update takes. See `docs/design/precision.md`.

Masters are rounded so that small updates survive in expectation. An update of 2e-5 is a twentieth of the distance between two
neighbouring bfloat16 numbers near 0.1; rounding to the nearest loses it until a dozen of them add up. Here each weight has its own
threshold between 0 and 1, drawn once by the run's seed: it is rounded away from zero if the part of it that bfloat16 cannot hold,
as a share of that distance, is above the threshold. So a twentieth of the weights moves by a whole distance, and the sum of all is
right.

The thresholds do not change between versions: served weights are a function of masters and seed, on any device, and differ from one
version to the next by the update alone. A weight that bfloat16 can hold is never changed.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engines.embedded.fused import add_into
from penstock.train.device import compile_once, is_compile_error

LOW_BITS = 16
"""Bits of a float32 that bfloat16 lacks."""
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
"""Odd numbers that spread every bit of a 32-bit integer over all others; signed."""


def round_to_bfloat16(values: Tensor, *, seed: int, first: int, compiled: bool = False) -> Tensor:
    """Returns float32 `values` [n] rounded to numbers that bfloat16 can hold, still in float32.

    `first` is the index of the first value among all weights of the model.
    """
    rounded = compile_once(_rounded) if compiled else _rounded
    return rounded(values, _scalar(first, values.device), _scalar(seed * 0x9E3779B1, values.device))


def thresholds(count: int, *, seed: int, first: int, device: torch.device) -> Tensor:
    """Returns int32 numbers in [0, 2**16), [count]: those of the weights from `first` on."""
    return _thresholds(count, _scalar(first, device), _scalar(seed * 0x9E3779B1, device))


def _rounded(values: Tensor, first: Tensor, key: Tensor) -> Tensor:
    bits = values.view(torch.int32) + _thresholds(len(values), first, key)
    return bits.bitwise_and_(-(1 << LOW_BITS)).view(torch.float32)


def _thresholds(count: int, first: Tensor, key: Tensor) -> Tensor:
    x = _mix(torch.arange(count, dtype=torch.int32, device=first.device).add_(first))
    return _mix(x.bitwise_xor_(key)).bitwise_and_((1 << LOW_BITS) - 1)


def _mix(x: Tensor) -> Tensor:
    """Hashes each integer in place, so that neighbours have nothing in common."""
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        x.bitwise_xor_(_shifted(x, shift)).mul_(multiplier)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)  # without the copies of the sign


def _scalar(x: int, device: torch.device) -> Tensor:
    """Returns the lowest 32 bits as a signed number: a tensor, as compiled code would compute with 64 bits of a plain one."""
    return torch.full((), (x + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=device)


ROUNDED_AT_ONCE = 2**25
"""Rounding takes 12 bytes of memory for each weight that is rounded at once."""
SAMPLE = 2**20
"""About this many weights are compared to measure the share of an update that was served."""

log = logging.getLogger(__name__)


class MasterSpan(NamedTuple):
    """Parameters whose masters lie side by side."""

    start: int
    stop: int
    names: list[str]


class MasterWeights:
    """Masters of `served`, which are in bfloat16. They start at the values in `exact`, else at the served ones."""

    def __init__(self, served: Mapping[str, Tensor], *, exact: Mapping[str, Tensor], seed: int) -> None:
        self._served, self._seed, self._compilable = served, seed, True
        sizes = [weight.numel() for weight in served.values()]
        self._flat = torch.empty(sum(sizes), device=next(iter(served.values())).device)
        self._every = max(1, len(self._flat) // SAMPLE)
        self._spans = list(_spans(served))
        self.values = {name: piece.view_as(served[name]) for name, piece in zip(served, _split(self._flat, sizes), strict=True)}
        self.load(exact)
        for name, weight in served.items():
            weight.register_post_accumulate_grad_hook(_sum_into(self.values[name]))

    @torch.no_grad()
    def load(self, exact: Mapping[str, Tensor]) -> None:
        """Sets the masters to `exact`, or to the served weights where that has none. Changes no served weight."""
        for name, master in self.values.items():
            master.copy_(exact.get(name, self._served[name]))
        self._sampled = self._sample(self._rounded())

    @torch.no_grad()
    def publish(self, *, compiled: bool = False) -> Tensor:
        """Rounds the masters into the served weights, in place, `compiled` or not.

        Returns the share of the masters' change since the last call that reached the served weights, []: 1 if all of it
        did, 0 if rounding swallowed it, NaN if there was no change.
        """
        try:
            sampled = self._sample(self._write(self._rounded(compiled and self._compilable)))
        except Exception as cause:
            if not is_compile_error(cause):
                raise
            self._compilable = False
            log.warning("rounding cannot be compiled here, so it is slower: %s", str(cause).strip().partition("\n")[0])
            sampled = self._sample(self._write(self._rounded()))
        (master, served), self._sampled = self._sampled, sampled
        change = self._sampled[0] - master
        return (self._sampled[1] - served) @ change / (change @ change)

    def _rounded(self, compiled: bool = False) -> Iterator[Tensor]:
        """Yields the rounded masters of each span, [stop - start]."""
        for span in self._spans:
            yield round_to_bfloat16(self._flat[span.start : span.stop], seed=self._seed, first=span.start, compiled=compiled)

    def _write(self, rounded: Iterator[Tensor]) -> Iterator[Tensor]:
        """Copies each span to the served weights, and yields it."""
        for span, values in zip(self._spans, rounded, strict=True):
            served = [self._served[name] for name in span.names]
            pieces = _split(values, [weight.numel() for weight in served])
            _copy(served, [piece.view_as(weight) for weight, piece in zip(served, pieces, strict=True)])
            yield values

    def _sample(self, rounded: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns every n-th master, and the same places of `rounded`, each [sampled] in float64."""
        spans = zip(self._spans, rounded, strict=True)
        places = [values[-span.start % self._every :: self._every].double() for span, values in spans]
        return self._flat[:: self._every].double(), torch.cat(places)


@torch.no_grad()
def round_as_served(weights: Mapping[str, Tensor], *, seed: int) -> None:
    """Rounds float32 weights in place to those that masters of the same values and seed are served as."""
    first = 0
    for weight in weights.values():
        weight.copy_(round_to_bfloat16(weight.flatten(), seed=seed, first=first).view_as(weight))
        first += weight.numel()


def _split(flat: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return torch.split(flat, sizes)  # pyright: ignore[reportReturnType, reportUnknownVariableType]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies all in a few launches."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def _sum_into(master: Tensor) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        if gradient is not None:
            master.grad = gradient.float() if master.grad is None else add_into(master.grad, gradient)

    return add


def _spans(served: Mapping[str, Tensor]) -> Iterator[MasterSpan]:
    start, stop, names = 0, 0, list[str]()
    for name, weight in served.items():
        if names and stop + weight.numel() - start > ROUNDED_AT_ONCE:
            yield MasterSpan(start, stop, names)
            start, names = stop, []
        names.append(name)
        stop += weight.numel()
    yield MasterSpan(start, stop, names)
