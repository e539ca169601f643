"""How many tokens of a pass fit into a GPU's memory, and how many of its layers must be checkpointed."""

import resource
import sys

import torch

from penstock.engines.embedded.decoder import Decoder, DecoderShape

MOST_TOKENS = 32768
"""More tokens in a pass are not faster."""
FEWEST_TOKENS = 2048
"""Passes are not made smaller than this while checkpoints can make room instead."""
USED = 0.8
"""The share of free memory that is planned with: the rest is for what backward passes hold for a moment."""
MOST_LOGITS, FEWEST_LOGITS = 2**29, 2**22
"""Bounds on the elements of one chunk of logits."""


class PassMemory:
    """Plans the passes of a decoder on a GPU."""

    def __init__(self, decoder: Decoder) -> None:
        self.shape, self._device = decoder.shape, decoder.device
        self._width = decoder.embed.weight.element_size()
        self.halvings = 0
        """How often memory ran out. Each time halves what is planned with."""

    def tokens_per_pass(self, reserved: int) -> int:
        """Returns how many tokens fit without checkpoints, if `reserved` bytes of the free memory are for something else."""
        fit = int(self._room(reserved)) // (self.shape.layers * layer_bytes(self.shape, self._width))
        return max(FEWEST_TOKENS >> self.halvings, min(MOST_TOKENS >> self.halvings, fit), 1)

    def checkpointed(self, tokens: int, reserved: int) -> int:
        """Returns how many layers a pass of `tokens` must checkpoint."""
        inputs = tokens * self.shape.layers * self.shape.hidden * self._width
        kept = int(max(0.0, self._room(reserved) - inputs)) // (tokens * layer_bytes(self.shape, self._width))
        return self.shape.layers - min(self.shape.layers, kept)

    def logits_rows(self, reserved: int) -> int:
        """Returns how many rows of logits may exist at once."""
        bound = int(self._free(reserved)) // (16 * self._width)
        return max(1, min(MOST_LOGITS, max(FEWEST_LOGITS, bound)) // self.shape.vocab_size)

    def _room(self, reserved: int) -> float:
        """Free memory for activations, in bytes."""
        logits = self.logits_rows(reserved) * self.shape.vocab_size * 2 * self._width
        head = self.shape.vocab_size * self.shape.hidden * (4 + self._width)
        return USED * self._free(reserved) - logits - head

    def _free(self, reserved: int) -> float:
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return max(0, free + cached - reserved) / 2**self.halvings


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes that this process has taken so far: of the GPU or, on a CPU, of memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def layer_bytes(shape: DecoderShape, width: int) -> int:
    """Returns about how many bytes a layer keeps for each token until the backward pass, for numbers of `width` bytes."""
    attention = 4 * (shape.heads + shape.kv_heads) * shape.head_dim  # of tokens, and as much again of their copies on paths
    return width * (4 * shape.hidden + attention + 3 * shape.inner) + 4 * shape.heads
