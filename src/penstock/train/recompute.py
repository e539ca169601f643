"""Log-probabilities computed again, under the weights of the version that sampled each token."""

from collections.abc import Iterator
from pathlib import Path

from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.weights import load_decoder
from penstock.errors import ModelError
from penstock.records import Sequence
from penstock.train import policy
from penstock.train.audit import Audit
from penstock.train.batches import pack
from penstock.train.forward import pass_logprobs, trunk_states
from penstock.train.probes import Probes


class Weights:
    """The policy versions that are on disk: the start policy is version 0, the others are checkpoints. Holds one at a time."""

    def __init__(self, start: Path | None, checkpoints: Path) -> None:
        self._start, self._checkpoints = start, checkpoints
        self._version: int | None = None
        self._decoder: Decoder | None = None

    def load(self, version: int) -> Decoder | None:
        """The decoder of `version` in float32, on the CPU; None where its weights are not here, or were removed just now."""
        if version != self._version:
            self._version, self._decoder = None, None  # the one before goes before the next one comes
            self._decoder = self._read(version)
            self._version = version
        return self._decoder

    def _read(self, version: int) -> Decoder | None:
        folder = self._find(version)
        if folder is None:
            return None
        try:
            return load_decoder(folder).requires_grad_(False)
        except ModelError:
            if self._find(version) is None:  # training went on and let go of this checkpoint meanwhile
                return None
            raise

    def _find(self, version: int) -> Path | None:
        return self._start if version == 0 else policy.find(self._checkpoints, version)


def recompute(decoder: Decoder, probes: Probes, audit: Audit, *, tokens_per_pass: int) -> Iterator[int]:
    """Tell `audit` what each probed token's log-probability is now; yields after each pass how many tokens that were."""
    batch = pack(_possible(decoder, probes, audit), rollouts=1, tokens_per_pass=tokens_per_pass)
    for bundle in batch.bundles:
        trunk = trunk_states(decoder, bundle.trunk)
        for one in bundle.passes:
            logprobs: list[float] = pass_logprobs(decoder, one, trunk, flat=batch.flat).tolist()  # pyright: ignore[reportUnknownVariableType]
            for term, logprob in zip(one.terms, logprobs, strict=True):
                audit.compare(probes.tokens[int(term.advantage)], logprob)
            yield len(logprobs)


def _possible(decoder: Decoder, probes: Probes, audit: Audit) -> list[Sequence]:
    """Those that the decoder can take; tokens of the others are refused."""
    shape, possible = decoder.shape, list[Sequence]()
    for sequence in probes.sequences:
        reason = "bad_token" if max(sequence.token_ids) >= shape.vocab_size else None
        if len(sequence.token_ids) - 1 > shape.context_length:
            reason = "context_too_long"
        if reason is None:
            possible.append(sequence)
            continue
        for number, wanted in zip(sequence.advantages, sequence.trained, strict=True):
            if wanted:
                audit.refuse(probes.tokens[int(number)], reason)
    return possible
