"""The names of `osmosis_ai` and `claw_r1`: each is there, is one thing at every path, and loads nothing before its use."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/unit/golden/names.json").read_text())
NAMES = {path: names for path, names in GOLDEN.items() if path.startswith(("osmosis_ai", "claw_r1"))}
HEAVY = ["agents", "strands", "openai", "anthropic", "litellm", "langchain", "starlette", "uvicorn", "aiohttp", "transformers"]
HEAVY += ["torch", "ray"]


@pytest.mark.parametrize("path", NAMES)
def test_each_name_is_there(path):
    module = importlib.import_module(path)
    assert [name for name in NAMES[path] if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", ["osmosis_ai", "claw_r1"])
def test_name_at_two_paths_is_one_thing(package):
    found = {}
    for path, names in NAMES.items():
        # `OsmosisRolloutModel` of each framework is another class
        if path.startswith(package) and not path.endswith("openai_agents"):
            for name in names:
                found.setdefault(name, set()).add(id(getattr(importlib.import_module(path), name)))
    assert [name for name, ids in found.items() if len(ids) > 1] == []


@pytest.mark.parametrize(
    "module", ["osmosis_ai", "osmosis_ai.rollout", "osmosis_ai.rollout.types", "claw_r1.agent_flow", "claw_r1.data_pool"]
)
def test_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="nothing"):
        _ = importlib.import_module(module).nothing


@pytest.mark.parametrize("path", [path for path in NAMES if path.startswith("claw_r1.")])
def test_names_of_claw_are_our_own_classes(path):
    module = importlib.import_module(path)
    assert {getattr(module, name).__module__.partition(".")[0] for name in NAMES[path]} <= {"penstock", "penstock_compat"}


def loaded_after(line):
    """Which of the heavy packages a fresh interpreter has loaded after a line of imports."""
    code = f"import sys\n{line}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("import osmosis_ai, osmosis_ai.rollout, osmosis_ai.rollout.server", []),
        ("from osmosis_ai.rollout import AgentWorkflow, Grader, RolloutContext, RolloutSample, get_rollout_context", []),
        ("from osmosis_ai.rollout.types import BaseConfig, RolloutInitRequest", []),
        ("import claw_r1, claw_r1.agent_flow, claw_r1.agent_flow.agent_flow, claw_r1.blackbox_agent, claw_r1.data_pool", []),
        ("from claw_r1.data_pool import Step", []),
        ("from claw_r1.agent_flow.agent_flow import AgentFlowBase, register", ["aiohttp"]),
        ("from claw_r1.agent_flow import SingleStepSingleTurnAgentFlow, MultiStepAgentFlow", ["aiohttp"]),
        ("import claw_r1.async_main, claw_r1.main_agent_ppo", []),
    ],
)
def test_import_loads_only_what_it_names(line, heavy):
    assert loaded_after(line) <= set(heavy)


def test_framework_import_loads_only_that_framework():
    strands = loaded_after("from osmosis_ai.rollout import OsmosisStrandsAgent")
    assert {"strands", "openai"} <= strands and strands.isdisjoint({"agents", "litellm", "torch"})
    agents = loaded_after("import osmosis_ai.rollout.integrations.agents.openai_agents")
    assert "agents" in agents and agents.isdisjoint({"strands", "litellm", "torch"})
