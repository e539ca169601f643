"""Flows as an Agent: a workflow that makes the flow that a row names and runs it on the row's columns."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from penstock.config import AgentSection, validate
from penstock.errors import ConfigError, WorkflowError
from penstock.records import Message, Sampling, Task
from penstock.sdk.context import AgentWorkflowContext
from penstock.sdk.discovery import (
    GRADERS,
    Agent,
    AgentKind,
    LoadedGrader,
    find_grader,
    import_entry,
    load_built_in_grader,
    names_built_in_grader,
    subclasses,
)
from penstock.sdk.routing import RolloutContext, running_rollout
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, Grader
from penstock_compat.flows.base import AgentFlowBase
from penstock_compat.flows.config import flow_config
from penstock_compat.flows.table import FlowEntry, FlowTable, check_options, read_flows, registered_names
from penstock_compat.graders import RULES
from penstock_compat.graders.rule import RuleGrader

AGENT_NAME = "agent_name"
"""The column that names a row's flow."""
RUN_TABLE = "penstock"
"""The table under `[workflow]` that holds the run's `model` (a folder) and `group_size`, for its flows."""


class FlowWorkflow(AgentWorkflow[AgentWorkflowConfig]):
    """Runs one flow for one rollout. Each agent has its own subclass, which holds its flows."""

    flows: ClassVar[FlowTable]
    default: ClassVar[str]
    """The flow of rows that name none."""

    async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> None:
        """Raises WorkflowError if the flow returns 0."""
        rollout = running_rollout("a flow")
        columns = dict(ctx.metadata or {})
        name = columns.pop(AGENT_NAME, None) or self.default
        flow = self._make_flow(str(name), rollout)
        steps = await flow.run(sampling_params(rollout.sampling), **flow_kwargs(columns, ctx.prompt, rollout))
        if steps == 0:
            raise WorkflowError(f"flow {name!r} returned 0, which says that it failed; return the number of its steps")

    def _make_flow(self, name: str, rollout: RolloutContext) -> AgentFlowBase:
        flow = self.flows.pick(name)
        table = dict((self.config and self.config.model_extra) or {})
        run: dict[str, Any] = table.pop(RUN_TABLE, {})
        tree = flow_config(table, rollout.sampling, group_size=run.get("group_size", 1), flow=self.default)
        return flow.cls(
            trainer_config=SimpleNamespace(config=tree),
            gateway_url=rollout.base_url.rstrip("/").removesuffix("/v1"),
            tokenizer=run.get("model"),
            processor=None,
            dataset_cls=None,
            dataset_config=tree.get("data"),
            **flow.options,
        )


def sampling_params(sampling: Sampling | None) -> dict[str, Any]:
    """Returns the run's sampling under the names that flows use; empty if unknown here."""
    if sampling is None:
        return {}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "max_tokens": sampling.max_tokens,
    }


def flow_kwargs(columns: Mapping[str, Any], prompt: list[Message], rollout: RolloutContext) -> dict[str, Any]:
    """Returns the keywords of a flow's `run`: the row's columns, its prompt, and the ids of rollout and group."""
    row: dict[str, Any] = {
        **columns,
        "raw_prompt": prompt,
        "uid": rollout.group_id,
        "prompt_uid": rollout.group_id,
        "trajectory_uid": rollout.rollout_id,
    }
    return row if rollout.channel == "train" else {**row, "channel": rollout.channel}


def flow_agent(
    source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any], module: ModuleType | None = None
) -> Agent:
    """Returns the agent with the flows of the entry file and of the YAML list, either of which may be absent.

    `module` is the entry file if it is imported already. The grader is the entry file's, else the function that `[grader] path`
    names, else the rule of the row's data source.
    """
    if module is None and source.entry.is_file():
        module = import_entry(source.entry)
    own = _entry_flows(module, source.entry)
    if source.flows:
        own |= read_flows(source.flows, _projects(source))
    table = FlowTable(own)
    default = _default(source, own)
    table.check([default])
    config = validate(AgentWorkflowConfig, {"name": default, **workflow}, "[workflow]")
    loaded = _load_grader(module, grader, source.entry)
    return Agent(
        entry=source.entry,
        workflow=type("FlowWorkflow", (FlowWorkflow,), {"flows": table, "default": default, "__module__": __name__}),
        workflow_config=config,
        grader=loaded.grader,
        grader_config=loaded.config,
        source=source,
        tables=(workflow, grader),
        trusted=True,
        kind=FlowKind(),
    )


class FlowKind(AgentKind):
    """Agents that are made of flows."""

    keeps_columns = True

    def check_rows(self, agent: Agent, tasks: Iterable[Task], where: Path) -> None:
        """Raises ConfigError if a row names an unknown flow."""
        assert issubclass(agent.workflow, FlowWorkflow)
        try:
            agent.workflow.flows.check({str(name) for task in tasks if (name := (task.metadata or {}).get(AGENT_NAME))})
        except ConfigError as cause:
            raise ConfigError(f"{where}: column {AGENT_NAME!r}: {cause}") from cause

    def with_run_settings(self, agent: Agent, *, model: Path, group_size: int) -> Agent:
        """Adds the run's model and group size, for the tokenizer and the config of its flows."""
        if agent.workflow_config is None:
            return agent
        # A model behind an endpoint has no folder, so its flows have no tokenizer.
        files = {} if model == Path() else {"model": str(model.resolve())}
        run = {RUN_TABLE: {**files, "group_size": group_size}}
        workflow, grader = agent.tables
        config = agent.workflow_config.model_copy(update=run)
        return replace(agent, workflow_config=config, tables=({**workflow, **run}, grader))

    def grader_by_rule(self, tasks: Iterable[Task]) -> type[Grader] | None:
        """Returns the grader by rule if every row's data source has one: most flows grade by it."""
        return RuleGrader if all(str((task.metadata or {}).get("data_source")) in RULES for task in tasks) else None


def _projects(source: AgentSection) -> list[Path]:
    """Returns the folders of the entry file and of the YAML list."""
    return list(dict.fromkeys([source.entry.parent, *([source.flows.parent] if source.flows else [])]))


def _own_flows(module: ModuleType) -> list[type[AgentFlowBase]]:
    """Returns the flows in a file, without those that it imports only as base classes."""
    found = [flow for flow in subclasses(module, AgentFlowBase) if not flow.__module__.startswith("penstock_compat.")]
    built_on = {base for flow in found for base in flow.__mro__[1:] if base.__module__ != module.__name__}
    return [flow for flow in found if flow not in built_on and not getattr(flow, "__abstractmethods__", None)]


def _entry_flows(module: ModuleType | None, entry: Path) -> dict[str, FlowEntry]:
    own = {name: FlowEntry(flow) for flow in (_own_flows(module) if module else []) for name in registered_names(flow)}
    for flow in own.values():
        check_options(flow, str(entry))
    return own


def _default(source: AgentSection, own: Mapping[str, FlowEntry]) -> str:
    if source.flow:
        return source.flow
    if len(own) == 1:
        return next(iter(own))
    where = source.flows or source.entry
    if own:
        raise ConfigError(f"{where}: several flows: {', '.join(sorted(own))}; set agent.flow to the one for rows that name none")
    raise ConfigError(f"{where}: no flow; define a subclass of AgentFlowBase, or set agent.flow")


def _load_grader(module: ModuleType | None, table: Mapping[str, Any], entry: Path) -> LoadedGrader:
    if module is not None and not names_built_in_grader(table) and any(True for _ in subclasses(module, Grader)):
        return find_grader(module, table, entry)
    name = table["name"] if names_built_in_grader(table) else "function" if "path" in table else "rule"
    return load_built_in_grader(name, table, entry) if table else LoadedGrader(GRADERS.load(name), None)
