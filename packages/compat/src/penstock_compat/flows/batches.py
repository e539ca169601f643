"""Runs a batch of rows through flows, all at once, against a gateway that is there already."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from penstock_compat.flows.agent import AGENT_NAME
from penstock_compat.flows.config import ConfigTree
from penstock_compat.flows.table import FlowTable, read_flows

ROLLOUT = ("actor_rollout_ref", "rollout")
DEFAULT_FLOW = "single_step_single_turn_agent"

log = logging.getLogger(__name__)


class FlowBatch(NamedTuple):
    """The rows of a batch, whichever form it has."""

    rows: list[dict[str, Any]]
    validates: bool = False


class FlowBatchRunner:
    """Runs each row's flow; a row that fails counts as 0 steps and leaves the others alone. `config` is a tree or nested tables."""

    def __init__(self, config: Any = None, gateway_url: str = "") -> None:
        self.config: Any = ConfigTree(cast("Mapping[str, Any]", config or {})) if isinstance(config, Mapping | None) else config
        self.gateway_url = gateway_url.rstrip("/")
        listed = find(self.config, *ROLLOUT, "agent", "agent_flow_config_path")
        path = Path(listed) if listed else None
        self._flows = FlowTable(read_flows(path, [path.parent]) if path else {})
        self._default = find(self.config, *ROLLOUT, "agent", "default_agent_flow") or DEFAULT_FLOW

    async def generate_sequences(self, batch: Any) -> dict[str, Any]:
        """Returns `num_steps` of each row, `timing`, and `errors` by the number of the row."""
        started, (rows, validates) = time.perf_counter(), read_batch(batch)
        self._flows.check({str(row.get(AGENT_NAME) or self._default) for row in rows})
        errors: dict[int, str] = {}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run(number, row, validates, errors)) for number, row in enumerate(rows)]
        timing = {"agent_flow/total_time": time.perf_counter() - started}
        return {"num_steps": [task.result() for task in tasks], "timing": timing, "errors": errors}

    async def run_rows(self, rows: list[dict[str, Any]], validates: bool) -> dict[str, Any]:
        """See `generate_sequences`, for rows that were read already."""
        return await self.generate_sequences(SimpleNamespace(non_tensor_batch=rows, meta_info={"validate": validates}))

    async def _run(self, number: int, row: dict[str, Any], validates: bool, errors: dict[int, str]) -> int:
        columns = {name: value for name, value in row.items() if name != AGENT_NAME}
        entry = self._flows.pick(str(row.get(AGENT_NAME) or self._default))
        try:
            flow = entry.cls(trainer_config=SimpleNamespace(config=self.config), gateway_url=self.gateway_url, **entry.options)
            more = {"channel": "val"} if validates else {}
            return await flow.run(self._sampling(validates), **{**columns, **more})
        except Exception as error:  # whatever an author's flow raises ends its row alone
            errors[number] = f"{type(error).__name__}: {error}"
            log.error("the flow of row %d failed: %s", number, errors[number])
            return 0

    def _sampling(self, validates: bool) -> dict[str, Any]:
        place = (*ROLLOUT, "val_kwargs") if validates else ROLLOUT
        given = {name: find(self.config, *place, name) for name in ("temperature", "top_p")}
        given["max_tokens"] = find(self.config, *ROLLOUT, "response_length")
        known = {name: value for name, value in given.items() if value is not None}
        return {**known, "repetition_penalty": 1.0, "logprobs": bool(find(self.config, *ROLLOUT, "calculate_log_probs"))}


def read_batch(batch: Any) -> FlowBatch:
    """Reads a list of rows, a table of columns, or an object with `non_tensor_batch` and `meta_info`."""
    meta: Any = getattr(batch, "meta_info", None) or {}
    columns: Any = getattr(batch, "non_tensor_batch", batch)
    if isinstance(columns, Mapping):
        table = cast("Mapping[str, Sequence[Any]]", columns)
        sizes = {len(column) for column in table.values()}
        if len(sizes) > 1:
            raise ValueError(f"the batch has columns of {sorted(sizes)} rows; give each as many")
        rows = [{name: column[place] for name, column in table.items()} for place in range(max(sizes, default=0))]
    else:
        rows = [dict(cast("Mapping[str, Any]", row)) for row in columns]
    return FlowBatch(rows, bool(meta.get("validate")))


def find(config: Any, *path: str) -> Any:
    """Returns the value at a path of attributes or keys; None if there is none."""
    for name in path:
        found: Any = config
        config = cast("Mapping[str, Any]", found).get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return config
