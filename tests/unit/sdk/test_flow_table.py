"""Flows by name: registered, listed in YAML, built in; targets from the user's project and installed packages alone."""

import sys

import pytest

from penstock.errors import ConfigError
from penstock_compat.flow import AgentFlowBase, MultiStepAgentFlow, SingleStepSingleTurnAgentFlow, register
from penstock_compat.flows.table import REGISTERED, FlowEntry, FlowTable, read_flows, registered_names

FLOWS = """
from penstock_compat.flow import AgentFlowBase

class Mine(AgentFlowBase):
    def __init__(self, depth=1, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth

    async def run(self, sampling_params, **kwargs):
        return 1

    class Inner(AgentFlowBase):
        async def run(self, sampling_params, **kwargs):
            return 1

class Strict(AgentFlowBase):
    def __init__(self, *, depth, trainer_config, gateway_url, tokenizer, processor, dataset_cls, dataset_config):
        pass

    async def run(self, sampling_params, **kwargs):
        return 1

class Unfinished(AgentFlowBase):
    pass

class Blocking(AgentFlowBase):
    def run(self, sampling_params, **kwargs):
        return 1

def no_flow():
    raise SystemExit
"""


@pytest.fixture
def project(tmp_path, monkeypatch, request):
    """A project with its own module name, so that no test finds another's."""
    name = f"flows_of_{abs(hash(request.node.name)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(FLOWS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path, name


def read(folder, text):
    path = folder / "flows.yaml"
    path.write_text(text)
    return read_flows(path, [folder])


def refused(folder, text):
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(folder / "flows.yaml"))
    return message


def test_list_names_classes_and_gives_them_further_keys(project):
    folder, module = project
    flows = read(folder, f"- name: one\n  _target_: {module}.Mine\n  depth: 4\n- {{name: two, _target_: '{module}:Mine.Inner'}}\n")
    flow = flows["one"].cls(**flows["one"].options)
    assert (list(flows), flow.depth, flows["two"].cls.__name__) == (["one", "two"], 4, "Inner")


def test_flow_of_an_installed_package_can_be_named(tmp_path):
    flows = read(tmp_path, "- name: multi\n  _target_: penstock_compat.flows.builtin.MultiStepAgentFlow\n")
    assert flows["multi"].cls is MultiStepAgentFlow


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("os.system", "'os', a module of Python itself"),
        ("subprocess.Popen", "'subprocess', a module of Python itself"),
        ("builtins.eval", "'builtins', a module of Python itself"),
        ("penstock_compat.flows.table.sys.exit", "no subclass of AgentFlowBase"),
        ("{module}.no_flow", "no subclass of AgentFlowBase"),
        ("{module}.Unfinished", "Unfinished still lacks run"),
        ("{module}.Blocking", "Blocking.run is not async"),
        ("{module}.Min", "there is no 'Min' in it"),
        ("{module}", "is no dotted path"),
        ("{module}.Mine()", "is no dotted path"),
        ("no_such_module_anywhere.Flow", "there is no module 'no_such_module_anywhere'"),
        ("yaml.YAMLObject", "no subclass of AgentFlowBase"),
        ("{module}.Strict", "missing a required argument: 'depth'"),
    ],
)
def test_target_that_is_not_flow_is_rejected_with_its_entry(project, target, words):
    folder, module = project
    message = refused(folder, f"- name: x\n  _target_: {target.format(module=module)}\n")
    assert "entry 1 ('x')" in message and words in message


def test_module_elsewhere_is_refused_before_it_is_imported(project, tmp_path_factory, monkeypatch):
    folder, _ = project
    other = tmp_path_factory.mktemp("elsewhere")
    (other / "stranger_flows.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(other)
    message = refused(folder, "- name: x\n  _target_: stranger_flows.Flow\n")
    assert "neither an installed package nor under" in message
    assert "stranger_flows" not in sys.modules


def test_module_that_fails_on_import_costs_one_line(project):
    folder, module = project
    (folder / f"{module}_bad.py").write_text("1 / 0")
    assert "cannot be imported: ZeroDivisionError" in refused(folder, f"- name: x\n  _target_: {module}_bad.Flow\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a list of flows is expected"),
        ("name: x", "a list of flows is expected"),
        ("- just text", "entry 1: str instead of a table"),
        ("- [a", "not valid YAML"),
        ("- _target_: a.b", "entry 1: no name"),
        ("- name: x", "entry 1 ('x'): no _target_"),
        ("- {name: x, _target_: M.Mine}\n- {name: x, _target_: M.Mine}", "entry 2 ('x'): an entry before it has the same name"),
        ("- {name: x, _target_: M.Mine, tokenizer: evil}", "key 'tokenizer' cannot be given here"),
        ("- {name: x, _target_: M.Mine, _partial_: true}", "key '_partial_' cannot be given here"),
        ("- {name: x, _target_: M.Mine, 3: true}", "key 3 cannot be given here"),
        ("- {name: x, _target_: M.Strict, depth: 1, colour: red}", "unexpected keyword argument"),
        ("- {name: x, _target_: M.Mine.Inner, depth: 1}", "Inner has no use for 'depth'"),
        ("- !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_list_that_cannot_be_used_is_named_with_its_entry(project, text, words):
    folder, module = project
    assert words in refused(folder, text.replace("M.", f"{module}."))


def test_list_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        read_flows(tmp_path / "gone.yaml", [tmp_path])


def test_decorator_names_a_class_and_gives_it_back(monkeypatch):
    monkeypatch.setattr("penstock_compat.flows.table.REGISTERED", REGISTERED.copy())

    class One(SingleStepSingleTurnAgentFlow):
        pass

    class Two(SingleStepSingleTurnAgentFlow):
        pass

    assert register("a flow")(One) is One
    assert (registered_names(One), registered_names(Two)) == (["a flow"], ["Two"])
    register("a flow")(Two)
    assert FlowTable({}).pick("a flow").cls is Two
    with pytest.raises(ConfigError, match="@register"):
        register(One)


def test_listed_names_come_before_built_in_ones():
    class Mine(SingleStepSingleTurnAgentFlow):
        pass

    table = FlowTable({"multi_step_agent": FlowEntry(Mine)})
    assert table.pick("multi_step_agent").cls is Mine
    assert table.pick("single_step_single_turn_agent").cls is SingleStepSingleTurnAgentFlow
    assert issubclass(table.pick("blackbox_gsm8k_agent").cls, AgentFlowBase)


def test_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ConfigError, match="multistep_agent"):
        FlowTable({"my_flow": FlowEntry(MultiStepAgentFlow)}).pick("multistep_agent")
    with pytest.raises(ConfigError, match="single_step"):
        FlowTable({}).check(["multi_step_agent", "q:os"])
