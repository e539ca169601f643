"""`[agent]` to an Agent, whichever way it is written: a workflow, a flow, or a program in any language."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.registry import Registry
from penstock.sdk.discovery import Agent, find_agent, import_entry, subclasses
from penstock.sdk.workflow import AgentWorkflow

KINDS = Registry(
    "kind of agent",
    {
        "command": "penstock.sdk.command:command_agent",
        "flow": "penstock.sdk.flows.agent:flow_agent",
    },
)
FLOWS = "penstock.sdk.flows.base"
"""Where the base of all flows is: a file without flows has not imported it, and need not wait for it."""


def open_agent(source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Agent:
    """What `source` names, ready to run; `workflow` and `grader` are the TOML tables of that name."""
    if source.command and (source.flow or source.flows):
        raise ConfigError("[agent] has both a command and flows; keep one of them")
    if source.command:
        return KINDS.load("command")(source, workflow, grader)
    if source.flow or source.flows:
        return KINDS.load("flow")(source, workflow, grader)
    module = import_entry(source.entry)
    if _is_of_flows(module):
        return KINDS.load("flow")(source, workflow, grader, module)
    return find_agent(module, source, workflow, grader)


def _is_of_flows(module: ModuleType) -> bool:
    """Whether an entry file is written with flows, and without a workflow."""
    if any(True for _ in subclasses(module, AgentWorkflow)):
        return False
    return any(base.__module__ == FLOWS for member in subclasses(module, object) for base in member.__mro__)
