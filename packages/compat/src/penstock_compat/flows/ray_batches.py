"""Batches of rows through flows on Ray: worker actors, and the object that splits a batch among them."""

from typing import Any

from penstock.scale.package import RayError, ray
from penstock_compat.flows.batches import ROLLOUT, FlowBatchRunner, find, read_batch

WORKERS = 8
NAME = "agent_flow_worker"

FlowBatchActor: Any = ray.remote(FlowBatchRunner)
"""`FlowBatchActor.options(name=…).remote(config, gateway_url)`; its methods are called with `.remote`."""


class FlowBatchActors:
    """Starts `actor_rollout_ref.rollout.agent.num_workers` actors, named by number, and splits batches among them in order."""

    def __init__(self, config: Any = None, gateway_url: str = "") -> None:
        count = int(find(config, *ROLLOUT, "agent", "num_workers") or WORKERS)
        if not ray.is_initialized():
            ray.init(ignore_reinit_error=True)
        spread = {"scheduling_strategy": "SPREAD", "num_cpus": 0}
        self.workers = [
            FlowBatchActor.options(name=f"{NAME}_{number}", **spread).remote(config, gateway_url) for number in range(count)
        ]

    def generate_sequences(self, batch: Any) -> dict[str, Any]:
        """See `FlowBatchRunner.generate_sequences`; waits for all. Rows of a worker that dies count as failed."""
        rows, validates = read_batch(batch)
        size = max(1, -(-len(rows) // len(self.workers)))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        asked = [worker.run_rows.remote(part, validates) for worker, part in zip(self.workers, parts, strict=False)]
        steps, errors, seconds = list[int](), dict[int, str](), [0.0]
        for part, reference in zip(parts, asked, strict=True):
            try:
                answer: dict[str, Any] = _answer(reference)
            except RayError as error:
                answer = {"num_steps": [0] * len(part), "errors": dict.fromkeys(range(len(part)), str(error).splitlines()[0])}
            errors |= {len(steps) + place: text for place, text in answer["errors"].items()}
            steps += answer["num_steps"]
            seconds.append(answer.get("timing", {}).get("agent_flow/total_time", 0.0))
        return {"num_steps": steps, "timing": {"agent_flow/total_time": max(seconds)}, "errors": errors}

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            ray.kill(worker)


def _answer(reference: Any) -> dict[str, Any]:
    return ray.get(reference)  # pyright: ignore[reportUnknownVariableType]
