"""`[agent]` to an agent: flows are separated from workflows and commands, and bring their own grader or the rules."""

import sys

import pytest

from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.records import Task
from penstock.sdk.discovery import AgentSpec, check_constructors, open_agent
from penstock_compat.flows.agent import FlowWorkflow
from penstock_compat.flows.table import REGISTERED
from penstock_compat.graders.rule import RuleGrader

ONE = """
from penstock_compat.flow import SingleStepSingleTurnAgentFlow, BlackBoxAgentFlowBase, register

@register("mine")
class Mine(SingleStepSingleTurnAgentFlow):
    pass
"""
TWO = ONE + "\nclass Other(SingleStepSingleTurnAgentFlow):\n    pass\n"
GRADER = "\nfrom penstock import Grader\nclass Judge(Grader):\n    async def grade(self, ctx):\n        return 1.0\n"
WORKFLOW = "\nfrom penstock import AgentWorkflow\nclass Work(AgentWorkflow):\n    async def run(self, ctx):\n        pass\n"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """What one test registers or makes importable is gone for the next."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(known)


def opened(folder, text=None, workflow=None, grader=None, **section):
    entry = folder / "agent.py"
    if text is not None:
        entry.write_text(text)
    return open_agent(AgentSection(entry=entry, **section), workflow or {}, grader or {})


def listed(folder, module="listed_flows"):
    (folder / f"{module}.py").write_text(TWO)
    path = folder / "flows.yaml"
    path.write_text(f"- {{name: a, _target_: {module}.Mine}}\n- {{name: b, _target_: {module}.Other}}\n")
    return path


def test_file_with_one_flow_may_submit_steps(tmp_path):
    agent = opened(tmp_path, ONE)
    assert (agent.workflow.default, agent.trusted, agent.grader) == ("mine", True, RuleGrader)
    assert issubclass(agent.workflow, FlowWorkflow) and agent.kind.keeps_columns
    check_constructors(agent)


def test_files_own_grader_goes_before_the_rules(tmp_path):
    agent = opened(tmp_path, ONE + GRADER, grader={"name": "strict"})
    assert (agent.grader.__name__, agent.grader_name) == ("Judge", "strict")
    assert opened(tmp_path, ONE, grader={"name": "by rule"}).grader_name == "by rule"


def test_file_with_workflow_is_read_as_one_whatever_it_imports(tmp_path):
    agent = opened(tmp_path, "from penstock_compat.flow import AgentFlowBase\n" + WORKFLOW + GRADER)
    assert (agent.workflow.__name__, agent.trusted, agent.kind.keeps_columns) == ("Work", False, False)


def test_flow_that_is_only_built_upon_is_not_another_one(tmp_path):
    (tmp_path / "built_upon.py").write_text(ONE)
    agent = opened(tmp_path, "from built_upon import Mine\nclass Better(Mine):\n    pass\n")
    assert agent.workflow.default == "Better"


def test_several_flows_need_a_default(tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.flow"):
        opened(tmp_path, TWO)
    assert opened(tmp_path, TWO, flow="Other").workflow.default == "Other"


def test_list_alone_is_enough(tmp_path):
    agent = opened(tmp_path, flows=listed(tmp_path), flow="b")
    assert (agent.workflow.default, agent.workflow.flows.pick("a").cls.__name__) == ("b", "Mine")
    with pytest.raises(ConfigError, match="several"):
        opened(tmp_path, flows=listed(tmp_path))


def test_built_in_flow_needs_no_file_at_all(tmp_path):
    assert opened(tmp_path, flow="single_step_single_turn_agent").workflow.default == "single_step_single_turn_agent"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"flow": "min"}, "unknown flow 'min'; did you mean 'mine'"),
        ({"flow": "mine", "command": ("true",)}, "both a command and flows"),
    ],
)
def test_what_names_no_flow_is_refused(tmp_path, section, words):
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path, ONE, **section)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from penstock_compat.flow import AgentFlowBase\n", "no flow; define a subclass of AgentFlowBase"),
        (ONE + "    def __init__(self):\n        pass\n", r"agent.py: Mine\(…\) got an unexpected keyword argument"),
        (ONE + "    def run(self, sampling_params, **kwargs):\n        return 1\n", "Mine.run is not async"),
        ("from penstock_compat.flow import AgentFlowBase as B\nclass Half(B):\n    pass\n", "no flow"),
    ],
)
def test_file_whose_flow_cannot_run_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path, text)


def test_free_table_becomes_config_and_limits(tmp_path):
    agent = opened(tmp_path, ONE, workflow={"concurrency": {"max_concurrent": 2}, "data": {"k": 1}})
    assert (agent.workflow_config.concurrency.max_concurrent, agent.workflow_config.model_extra) == (2, {"data": {"k": 1}})


def test_another_interpreter_loads_the_same_flows_and_knows_the_run(tmp_path):
    agent = opened(tmp_path, ONE, flows=listed(tmp_path, "far_flows"), flow="b")
    agent = agent.kind.with_run_settings(agent, model=tmp_path, group_size=4)
    again = AgentSpec.read(AgentSpec.of(agent).write()).load()
    assert (again.workflow.default, again.trusted) == ("b", True)
    assert again.workflow_config.model_extra["penstock"] == {"model": str(tmp_path.resolve()), "group_size": 4}


def test_rows_that_name_unknown_flow_are_rejected_before_run(tmp_path):
    agent = opened(tmp_path, ONE)
    rows = [Task(id=name or "none", prompt=(), metadata={"agent_name": name}) for name in (None, "mine", "multi_step_agent")]
    agent.kind.check_rows(agent, rows, tmp_path / "rows.jsonl")
    rows.append(Task(id="x", prompt=(), metadata={"agent_name": "os:system"}))
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        agent.kind.check_rows(agent, rows, tmp_path / "rows.jsonl")
