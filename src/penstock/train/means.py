"""What a loss is a mean over: as its paper has it, or that of its advantage, unless `train.mean` says otherwise."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

Mean = Literal["rollout", "token", "constant"]

F = TypeVar("F", bound=Callable[..., Any])


def mean_over(mean: Mean) -> Callable[[F], F]:
    """Marks an advantage or a loss whose paper takes another mean than that over each rollout's tokens; the loss's counts first."""

    def mark(function: F) -> F:
        function.mean = mean  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


def marked_mean(function: Callable[..., Any]) -> Mean | None:
    return getattr(function, "mean", None)
