"""The audit of a run: every recorded step checked, and recomputed where the weights that sampled it are still here."""

import asyncio
from collections.abc import Callable

from penstock.records import Attempt, Group
from penstock.train import policy
from penstock.train.audit import Audit
from penstock.train.exactness import Graph
from penstock.train.probes import probe, versions
from penstock.train.recompute import Weights, recompute
from penstock.train.recorded import Recorded

TOLERANCES = {"float32": 1e-3, "bfloat16": 2.0}
"""How far a recomputed log-probability may be off, by what the engine computed in; the audit itself computes in float32.

Of a model with 135 million parameters, float32 is off by 2e-4 at most; bfloat16 by 4e-2 on average and 1.5 on the rarest tokens.
"""

Heard = Callable[[int, int], None]
"""Called with how many groups are done, and of how many."""


async def verify(recorded: Recorded, heard: Heard, *, tolerance: float | None = None) -> Audit:
    """Read the run from its first group to its last and account for every token. Nothing is written."""
    limit = TOLERANCES[_precision(recorded)] if tolerance is None else tolerance
    audit = Audit(run=recorded.config.run.name, channel=recorded.channel, tolerance=limit)
    weights = Weights(recorded.start, recorded.folder.checkpoints)
    total = recorded.last_seq + 1 - recorded.first_seq
    heard(0, total)
    async for groups in recorded.pages():
        await _check(groups, audit, weights, tokens_per_pass=recorded.config.train.tokens_per_pass)
        heard(audit.groups, total)
    return audit


async def _check(groups: list[Group], audit: Audit, weights: Weights, *, tokens_per_pass: int) -> None:
    read: list[tuple[Attempt, Graph]] = [one for group in groups for one in audit.add(group)]
    for version, count in sorted(versions(read).items()):
        decoder = await asyncio.to_thread(weights.load, version)
        if decoder is None:
            audit.gone[version] += count
            continue
        passes = recompute(decoder, probe(read, version), audit, tokens_per_pass=tokens_per_pass)
        while await asyncio.to_thread(next, passes, None) is not None:  # one pass at a time, so that Ctrl-C does not wait long
            pass


def _precision(recorded: Recorded) -> str:
    """What the engine computed in: as the run says, else as its checkpoints were written."""
    chosen = recorded.config.engine.dtype
    if chosen == "auto":
        chosen = "bfloat16" if policy.is_half(recorded.folder.checkpoints) else "float32"
    return chosen
