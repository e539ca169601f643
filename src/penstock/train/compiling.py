"""Functions of the trainer that are compiled on a GPU, each when it is first called there, as that takes seconds."""

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch

MOST_VARIANTS = 64
"""torch compiles a function at most so often, for other dtypes and layouts."""


P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the compiled function: once for all lengths of its arguments."""
    return _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch._dynamo.config as settings

    settings.recompile_limit = max(settings.recompile_limit, MOST_VARIANTS)
    return torch.compile(function, dynamic=True, fullgraph=True)


def is_compile_error(error: Exception) -> bool:
    """Whether it says that torch could not compile something: there is no compiler, or a kernel is too large for the GPU."""
    return any(base.__name__ in ("TorchDynamoException", "FailOnRecompileLimitHit") for base in type(error).__mro__)
