"""Checks of a workflow and a grader before a back end is made of them: everything that is wrong at once, each with a code."""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.rollout.guests import one_line
from penstock.sdk.grader import Grader
from penstock.sdk.workflow import AgentWorkflow

LONGEST_NAME = 256


class Problem(NamedTuple):
    """One thing that is wrong."""

    code: str
    message: str


def validate_backend(
    workflow_cls: Any, workflow_config: Any = None, grader_cls: Any = None, grader_config: Any = None
) -> list[Problem]:
    """What keeps these from being run; empty where nothing does."""
    return [*_workflow(workflow_cls, workflow_config), *_grader(grader_cls, grader_config)]


def _workflow(cls: Any, config: Any) -> Iterator[Problem]:
    if not _derives(cls, AgentWorkflow):
        yield Problem("INVALID_WORKFLOW_CLASS", f"{_name(cls)} is no AgentWorkflow; give a class that derives from it")
        return
    if not _is_async(cls, "run"):
        yield Problem("WORKFLOW_RUN_NOT_ASYNC", f"{_name(cls)}.run is not async; write `async def run(self, ctx)`")
    if failure := _init_failure(cls, config):
        yield Problem("WORKFLOW_INIT_FAILED", f"{_name(cls)} cannot be made with its config: {failure}")
    name = getattr(config, "name", None) if config is not None else cls.__name__
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
        length = f"has {len(name)} characters" if isinstance(name, str) else f"is {type(name).__name__}, no string"
        yield Problem("INVALID_AGENT_NAME", f"the workflow's name {length}; use 1 to {LONGEST_NAME} characters")


def _grader(cls: Any, config: Any) -> Iterator[Problem]:
    if cls is None:
        yield Problem("MISSING_GRADER", "there is no grader; define a concrete Grader subclass next to the workflow")
        return
    if not _derives(cls, Grader):
        yield Problem("INVALID_GRADER_CLASS", f"{_name(cls)} is no Grader; give a class that derives from it")
        return
    if not _is_async(cls, "grade"):
        yield Problem("GRADER_GRADE_NOT_ASYNC", f"{_name(cls)}.grade is not async; write `async def grade(self, ctx)`")
    if failure := _init_failure(cls, config):
        yield Problem("GRADER_INIT_FAILED", f"{_name(cls)} cannot be made with its config: {failure}")


def _derives(cls: Any, base: type[Any]) -> bool:
    return inspect.isclass(cls) and issubclass(cls, base)


def _is_async(cls: type[Any], method: str) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(getattr(cls, method)))


def _init_failure(cls: type[Any], config: Any) -> str:
    try:
        cls(config)
    except Exception as cause:  # the author's code: anything may come
        return one_line(cause)
    return ""


def _name(cls: Any) -> str:
    return cls.__name__ if inspect.isclass(cls) else repr(cls)[:80]
