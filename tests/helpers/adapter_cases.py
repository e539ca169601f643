"""Adapters with random weights, and a workload of several policies."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engine_workloads import SHAPE, Workload, make_weights

from penstock.config import LORA_MODULES
from penstock.engines.checkpoint_files import AdapterConfig
from penstock.engines.embedded.core import DrawnChunk, Request
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.engines.embedded.lora import Adapter
from penstock.records import Sampling

POLICIES = {"": 0, "planner": 4, "executor": 3}
"""The rank of each one's adapter; the first is the base alone."""
TARGETS = {"planner": LORA_MODULES, "executor": ("v_proj", "o_proj", "up_proj")}


def random_adapter(
    shape: DecoderShape = SHAPE, *, rank: int = 4, targets: tuple[str, ...] = LORA_MODULES, seed: int = 0, size: float = 0.2,
    base: Path = Path("base"), digest: str = "",
) -> Adapter:  # fmt: skip
    """An adapter that adds about as much as the base gives."""
    adapter = Adapter(shape, AdapterConfig(rank, 2.0 * rank, targets, base, digest))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.normal_(0.0, size, generator=generator)
    return adapter


def policy_adapter(policy: str, version: int) -> Adapter:
    return random_adapter(rank=POLICIES[policy], targets=TARGETS[policy], seed=100 * len(policy) + version)


@dataclass
class PolicyWorkload(Workload):
    """Requests of several policies, each with an adapter that changes while the others continue."""

    versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POLICIES, 0))
    late: bool = False
    """Whether the adapters come later; until then, all requests are of the base."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.late:
            self.add_adapters()

    def add_adapters(self) -> None:
        self.record(self.core.drain())
        for policy in TARGETS:
            self.core.adapters.put(policy, policy_adapter(policy, 0))
        self.core.reset(TARGETS)
        self.late = False

    def ask(self, prompt: list[int] | tuple[int, ...], sampling: Sampling) -> Request:  # pyright: ignore[reportIncompatibleMethodOverride]
        key = len(self.requests)
        policy = "" if self.late else self.rng.choice(list(POLICIES))
        stop = frozenset(sampling.stop_ids)
        request = Request(key, list(prompt), len(prompt), sampling, stop, random.Random(key).random, policy)
        self.requests.append(request)
        self.sampled[request] = []
        self.core.submit(request)
        return request

    def record(self, chunks: "list[DrawnChunk] | tuple[DrawnChunk, ...]") -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for chunk in chunks:
            self.version = self.versions[chunk.request.policy]
            super().record([chunk])

    def swap(self) -> None:
        policy = self.rng.choice(list(TARGETS))
        self.record(self.core.drain())
        self.versions[policy] += 1
        self.core.adapters.put(policy, policy_adapter(policy, self.versions[policy]))
        self.core.reset([policy])

    def check(self) -> int:
        checked = 0
        for policy, last in self.versions.items():
            mine = {request: drawn for request, drawn in self.sampled.items() if request.policy == policy}
            for version in range(last + 1):
                oracle = Decoder(SHAPE)
                oracle.load_state_dict(make_weights(0))
                if policy in TARGETS:
                    policy_adapter(policy, version).attach(oracle)
                for request, drawn in mine.items():
                    if any(v == version for _, v in drawn):
                        checked += self._check_request(oracle, version, request, drawn)
        return checked
