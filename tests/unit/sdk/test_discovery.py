"""Discovery: an author's file gives one workflow, one grader and their configs, or one line that says what to change."""

import sys
import textwrap

import pytest

from penstock.errors import ConfigError
from penstock.sdk.discovery import load_agent

WORKFLOW = """
from penstock import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, Grader, GraderConfig

class Work(AgentWorkflow):
    async def run(self, ctx):
        pass
"""
GRADER = """
class Judge(Grader):
    async def grade(self, ctx):
        pass
"""
CONFIG = """
class WorkConfig(AgentWorkflowConfig):
    name: str = "work"
    max_turns: int = 8
    concurrency: ConcurrencyConfig = ConcurrencyConfig(max_concurrent=4)
"""


def load(folder, text, workflow=None, grader=None):
    entry = folder / "agent.py"
    entry.write_text(textwrap.dedent(text))
    return load_agent(entry, workflow or {}, grader or {})


def refused(folder, text, **tables):
    with pytest.raises(ConfigError) as caught:
        load(folder, text, **tables)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


def test_one_workflow_and_one_grader_are_found_without_configs(tmp_path):
    agent = load(tmp_path, WORKFLOW + GRADER)
    assert (agent.workflow.__name__, agent.grader.__name__) == ("Work", "Judge")
    assert (agent.workflow_config, agent.grader_config) == (None, None)


def test_abstract_bases_and_aliases_do_not_count(tmp_path):
    text = WORKFLOW + GRADER + "class Base(AgentWorkflow):\n    pass\n\nSame = Work\nAlso = Judge\n"
    assert load(tmp_path, text).workflow.__name__ == "Work"


def test_siblings_are_importable_both_ways(tmp_path):
    (tmp_path / "sibling_of_agent.py").write_text("ANSWER = 42\n")
    text = "import sibling_of_agent\nfrom .sibling_of_agent import ANSWER\nassert sibling_of_agent.ANSWER == ANSWER\n"
    assert load(tmp_path, text + WORKFLOW + GRADER).workflow.__name__ == "Work"


def test_config_objects_are_taken_from_the_file(tmp_path):
    text = WORKFLOW + GRADER + CONFIG + "chosen = WorkConfig(max_turns=3)\ngrading = GraderConfig(name='strict', floor=0.5)\n"
    agent = load(tmp_path, text)
    assert agent.workflow_config.max_turns == 3
    assert agent.grader_config.floor == 0.5


def test_table_sets_fields_and_leaves_the_others(tmp_path):
    text = WORKFLOW + GRADER + CONFIG + "chosen = WorkConfig(max_turns=3, hint='python side')\n"
    config = load(tmp_path, text, workflow={"concurrency": {"max_concurrent": 2}, "hint": "toml"}).workflow_config
    assert (config.max_turns, config.concurrency.max_concurrent, config.hint) == (3, 2, "toml")


def test_table_builds_the_class_that_the_workflow_names(tmp_path):
    text = WORKFLOW.replace("class Work(AgentWorkflow)", CONFIG + "class Work(AgentWorkflow[WorkConfig])") + GRADER
    config = load(tmp_path, text, workflow={"max_turns": 2}).workflow_config
    assert (type(config).__name__, config.name, config.max_turns) == ("WorkConfig", "work", 2)


def test_table_without_any_config_class_becomes_plain_fields(tmp_path):
    agent = load(tmp_path, WORKFLOW + GRADER, grader={"floor": 0.5})
    assert (agent.grader_config.name, agent.grader_config.floor) == ("Judge", 0.5)


def test_unknown_key_names_the_nearest(tmp_path):
    message = refused(tmp_path, WORKFLOW + GRADER + CONFIG, workflow={"max_turn": 2})
    assert message == "[workflow] for WorkConfig: unknown key 'max_turn'; did you mean 'max_turns'?"


def test_wrong_type_and_nested_unknown_key_are_one_line(tmp_path):
    text = WORKFLOW + GRADER + CONFIG
    assert "max_turns = 'many': " in refused(tmp_path, text, workflow={"max_turns": "many"})
    assert "did you mean 'max_concurrent'?" in refused(tmp_path, text, workflow={"concurrency": {"max_concurent": 2}})
    assert "greater than or equal to 1" in refused(tmp_path, text, workflow={"concurrency": {"max_concurrent": 0}})


FLAWS = {
    "no workflow": (
        GRADER.replace("class", "from penstock import Grader\nclass", 1),
        "agent.py: no concrete AgentWorkflow subclass",
    ),
    "no grader": (WORKFLOW, "agent.py: no concrete Grader subclass"),
    "abstract only": (WORKFLOW.replace("def run", "def ruin") + GRADER, "Work still lacks run"),
    "two workflows": (WORKFLOW + GRADER + "class Again(Work):\n    pass\n", "several AgentWorkflow subclasses: Again, Work;"),
    "two graders": (WORKFLOW + GRADER + "class Other(Judge):\n    pass\n", "several Grader subclasses: Judge, Other;"),
    "two configs": (
        WORKFLOW + GRADER + "a = AgentWorkflowConfig(name='a')\nb = AgentWorkflowConfig(name='a')\n",
        "several AgentWorkflowConfig objects: a, b; keep one",
    ),
    "not async": (WORKFLOW.replace("async ", "") + GRADER, "Work.run is not async; write `async def run(self, ctx)`"),
    "generator": (WORKFLOW.replace("pass", "yield 1") + GRADER, "Work.run is not async"),
    "grader not async": (WORKFLOW + GRADER.replace("async ", ""), "Judge.grade is not async"),
    "syntax": ("x = 1\ndef broken(:\n", "agent.py, line 2: SyntaxError: "),
    "missing module": (
        "\nimport no_such_module_here\n",
        "agent.py, line 2: ModuleNotFoundError: No module named 'no_such_module_here';",
    ),
    "missing name": ("from penstock import NoSuchName\n", "agent.py, line 1: ImportError: "),
    "raises": ("def f():\n    raise ValueError('two\\nlines')\n\nf()\n", "agent.py, line 2: ValueError: two lines;"),
    "exits": ("import sys\nsys.exit(3)\n", "agent.py, line 2: the file exits when it is imported"),
    "uncopyable": (
        WORKFLOW + GRADER + "import threading\nconfig = AgentWorkflowConfig(name='a', lock=threading.Lock())\n",
        "AgentWorkflowConfig cannot be copied for each rollout",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_is_one_line_with_a_remedy(tmp_path, flaw):
    text, expected = FLAWS[flaw]
    assert expected in refused(tmp_path, text)


def test_failure_in_a_sibling_names_the_importing_line(tmp_path):
    (tmp_path / "broken_sibling.py").write_text("1 / 0\n")
    assert "agent.py, line 3: ZeroDivisionError" in refused(tmp_path, "\n\nimport broken_sibling\n")


@pytest.mark.parametrize("name", ["none.py", "agent.txt", ""])
def test_entry_that_is_no_python_file_is_refused(tmp_path, name):
    (tmp_path / "agent.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"\[agent\]"):
        load_agent(tmp_path / name, {}, {})


MISSING = {
    "import strands": "pip install strands-agents, or put strands.py next to agent.py",
    "import no_such_thing.inside": "pip install no-such-thing, or put no_such_thing.py next to agent.py",
    "import email.no_such_part": "check the name, or install a release of its package that has it",
    "from .no_sibling import x": "No module named '.no_sibling'; put no_sibling.py next to agent.py",
}


@pytest.mark.parametrize("line", MISSING)
def test_missing_module_says_what_to_install(tmp_path, line, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in str(finder)])
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    monkeypatch.delitem(sys.modules, "strands", raising=False)
    assert MISSING[line] in refused(tmp_path, line)


@pytest.mark.parametrize("name", ["", "  ", "x" * 257])
def test_name_that_nobody_can_read_is_refused(tmp_path, name):
    text = WORKFLOW + GRADER + f"config = AgentWorkflowConfig(name={name!r})\n"
    assert f"AgentWorkflowConfig.name has {len(name)} characters; give it 1 to 256" in refused(tmp_path, text)


def test_longest_name_and_lazy_proxies_are_fine(tmp_path):
    proxy = "class Proxy:\n    @property\n    def __class__(self):\n        raise RuntimeError\n\nproxy = Proxy()\n"
    agent = load(tmp_path, WORKFLOW + GRADER + proxy + f"config = AgentWorkflowConfig(name='{'x' * 256}')\n")
    assert len(agent.workflow_config.name) == 256


def test_error_that_is_no_exception_is_one_line_too(tmp_path):
    assert "agent.py, line 1: GeneratorExit: x;" in refused(tmp_path, "raise GeneratorExit('x')\n")
