"""FunctionGrader: scores by the author's function `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from penstock.errors import ConfigError, GraderError
from penstock.records import Message
from penstock.sdk.context import GraderContext
from penstock.sdk.discovery import import_entry
from penstock.sdk.routing import MAIN
from penstock.sdk.samples import assistant_text, policy_messages
from penstock.sdk.workflow import Grader, GraderConfig


class FunctionGraderConfig(GraderConfig):
    """`[grader]` with `name = "function"`."""

    name: str = "function"
    path: Path
    """The file that holds it."""
    function: str = "compute_score"


class FunctionGrader(Grader):
    """Scores a whole rollout once, with its `assistant_text` as `solution_str`.

    The row's `extra_info` gets two more keys: `num_turns`, of all sides together, and `messages`, the recorded conversation. The
    function returns a number, or a mapping with one under `score`; it may be a coroutine.
    """

    settings = FunctionGraderConfig

    def __init__(self, config: FunctionGraderConfig) -> None:
        super().__init__(config)
        self._function = load_function(config.path, config.function)

    async def grade(self, ctx: GraderContext) -> None:
        sample, fields = ctx.samples.get(MAIN) or ctx.sample, ctx.metadata or {}
        messages = sample.transcript or sample.messages
        extra: Any = fields.get("extra_info") if isinstance(fields.get("extra_info"), Mapping) else {}
        arguments: dict[str, Any] = {
            "data_source": fields.get("data_source"),
            "solution_str": assistant_text(policy_messages(sample)),
            "ground_truth": ctx.label,
            "extra_info": {**extra, "num_turns": count_turns(messages), "messages": messages},
        }
        score = await asyncio.to_thread(self._function, **arguments)  # it may block
        if inspect.isawaitable(score):
            score = await score
        ctx.set_reward(_number(score))


@cache
def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Loads the function `name` of a file; ConfigError if there is none."""
    found = getattr(import_entry(path), name, None)
    if not callable(found):
        raise ConfigError(f"{path}: has no function {name!r}; define {name}(data_source, solution_str, ground_truth, extra_info)")
    return cast("Callable[..., Any]", found)


def count_turns(messages: list[Message]) -> int:
    """Counts the turns: consecutive messages of one role are one turn, and the system prompt is none.

    >>> turns([{"role": "user"}, {"role": "assistant"}, {"role": "tool"}, {"role": "tool"}, {"role": "assistant"}])
    4
    """
    roles = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    return sum(role != before for role, before in zip(roles, [None, *roles], strict=False))


def _number(score: Any) -> float:
    found: Any = cast("Mapping[str, Any]", score).get("score") if isinstance(score, Mapping) else score
    if found is None:
        raise GraderError(f"the function gave {score!r}; return a number, or a mapping with one under 'score'")
    return found
