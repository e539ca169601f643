"""`[agent]` to an Agent, whichever way it is written: a workflow, a flow, or a program in any language."""

from collections.abc import Mapping
from typing import Any

from penstock.config import AgentSection
from penstock.sdk.discovery import Agent, load_agent


def open_agent(source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Agent:
    """What `source` names, ready to run; `workflow` and `grader` are the TOML tables of that name."""
    return load_agent(source, workflow, grader)
