"""The config tree that a flow reads as attributes: `self.config.actor_rollout_ref.rollout.temperature`."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from penstock.records import Sampling

PROMPT_LENGTH = 32_768
"""The default is generous: the gateway refuses a prompt that does not fit."""
MAX_TURNS = 3


class ConfigTree(Mapping[str, Any]):
    """Read-only. Keys are attributes too; nested tables are trees."""

    def __init__(self, table: Mapping[str, Any], name: str = "") -> None:
        self._table = {key: _subtree(value, f"{name}.{key}" if name else key) for key, value in table.items()}
        self._name = name

    def __getitem__(self, key: str) -> Any:
        return self._table[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        try:
            return self._table[key]
        except KeyError:
            where = f"[workflow.{self._name}]" if self._name else "[workflow]"
            raise AttributeError(
                f"the flow's config has no {key!r}; set it under {where} of the TOML, or use .get({key!r})"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        return f"ConfigTree({self._table})"


def flow_config(table: Mapping[str, Any], sampling: Sampling | None, *, group_size: int = 1, flow: str = "") -> ConfigTree:
    """Returns the run's settings under the names that flows use, overridden by `table`."""
    sampling = sampling or Sampling()
    rollout = {
        "n": group_size,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "prompt_length": PROMPT_LENGTH,
        "response_length": sampling.max_tokens,
        "max_turns": MAX_TURNS,
        "calculate_log_probs": True,
        "agent": {"default_agent_flow": flow},
    }
    return ConfigTree(_merged({"actor_rollout_ref": {"rollout": rollout}}, table))


def _merged(defaults: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for key, value in table.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", value)) if both else value
    return merged


def _subtree(value: Any, name: str) -> Any:
    return ConfigTree(cast("Mapping[str, Any]", value), name) if isinstance(value, Mapping) else value
