"""What `claw_r1` offers: the names at their paths, each the core's own, and nothing loaded before its use."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from claw_r1.agent_flow.agent_flow import AgentFlowBase, register
from claw_r1.blackbox_agent.blackbox_agent_flow import BlackBoxAgentFlowBase
from claw_r1.data_pool import Step

FACADE = Path(__file__).parents[2] / "facades" / "src" / "claw_r1"
NAMES = {
    "claw_r1": ["__version__"],
    "claw_r1.agent_flow": [
        *(
            "AgentFlowBase",
            "AgentFlowManager",
            "AgentFlowWorker",
            "MultiStepAgentFlow",
            "SingleStepSingleTurnAgentFlow",
            "register",
        ),
    ],
    "claw_r1.agent_flow.agent_flow": [
        "AgentFlowBase",
        "AgentFlowManager",
        "AgentFlowWorker",
        "AgentFlowWorkerBase",
        "Step",
        "register",
    ],
    "claw_r1.agent_flow.single_step_single_turn_agent_flow": ["SingleStepSingleTurnAgentFlow"],
    "claw_r1.agent_flow.multi_step_agent_flow": ["MultiStepAgentFlow"],
    "claw_r1.blackbox_agent": ["BlackBoxAgentFlowBase", "BlackBoxGSM8KAgentFlow", "GSM8KAgent"],
    "claw_r1.blackbox_agent.blackbox_agent_flow": ["BlackBoxAgentFlowBase"],
    "claw_r1.blackbox_agent.gsm8k_agent_flow": ["BlackBoxGSM8KAgentFlow"],
    "claw_r1.blackbox_agent.gsm8k_agent": ["GSM8KAgent"],
    "claw_r1.async_rollouter": ["AsyncRollouter"],
    "claw_r1.data_pool": ["DataPool", "DataPoolConfig", "Step"],
    "claw_r1.data_pool.data_pool": ["DataPool", "DataPoolConfig"],
    "claw_r1.data_pool.data_model": ["Step"],
}
COMMANDS = ["claw_r1.async_main", "claw_r1.main_agent_ppo", "claw_r1.gateway.gateway"]
HEAVY = ["agents", "strands", "openai", "anthropic", "starlette", "uvicorn", "aiohttp", "transformers", "torch", "ray"]


@pytest.mark.parametrize("path", NAMES)
def test_each_path_offers_its_names_and_no_others(path):
    module = importlib.import_module(path)
    assert {name for name in NAMES[path] if not hasattr(module, name)} == set()
    assert sorted(module.__all__) == sorted(NAMES[path])


def test_a_name_at_two_paths_is_one_thing():
    found = {}
    for path, names in NAMES.items():
        for name in names:
            found.setdefault(name, set()).add(id(getattr(importlib.import_module(path), name)))
    assert [name for name, ids in found.items() if len(ids) > 1] == []


@pytest.mark.parametrize("path", [path for path in NAMES if path != "claw_r1"])
def test_what_authors_subclass_and_build_is_the_cores_own(path):
    module = importlib.import_module(path)
    assert {getattr(module, name).__module__.partition(".")[0] for name in NAMES[path]} == {"penstock"}


@pytest.mark.parametrize("module", ["claw_r1.agent_flow", "claw_r1.agent_flow.agent_flow", "claw_r1.data_pool"])
def test_a_name_that_there_is_not_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = importlib.import_module(module).nothing


@pytest.mark.parametrize("name", ["TrainingBackend", "VerlBackend"])
def test_what_is_not_offered_says_what_to_use(name):
    with pytest.raises(AttributeError, match="penstock pool"):
        getattr(importlib.import_module("claw_r1.data_pool"), name)


def loaded_after(line):
    """Which of the heavy packages a fresh interpreter has loaded after a line of imports."""
    code = f"import sys\n{line}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("import claw_r1, claw_r1.agent_flow, claw_r1.agent_flow.agent_flow, claw_r1.blackbox_agent, claw_r1.data_pool", []),
        ("from claw_r1.data_pool import Step", []),
        ("from claw_r1.agent_flow.agent_flow import AgentFlowBase, register", ["aiohttp"]),
        ("from claw_r1.agent_flow import SingleStepSingleTurnAgentFlow, MultiStepAgentFlow", ["aiohttp"]),
        ("import claw_r1.async_main, claw_r1.main_agent_ppo", []),
    ],
)
def test_nothing_is_loaded_that_was_not_named(line, heavy):
    assert set(loaded_after(line)) <= set(heavy)


def test_a_step_has_the_fields_and_defaults_of_the_reference():
    made = Step(prompt_ids=[1], response_ids=[2, 3])
    defaults = {"reward": None, "multi_modal_data": None, "rollout_log_probs": None, "routed_experts": None, "trajectory_uid": ""}
    defaults |= {"prompt_uid": "", "step_index": 0, "policy_version": 0, "is_last": False, "metadata": None}
    assert dataclasses.asdict(made) == {"prompt_ids": [1], "response_ids": [2, 3], **defaults}


def test_a_flow_is_made_with_the_references_keywords():
    class Flow(AgentFlowBase):
        async def run(self, sampling_params, **kwargs):
            return 1

    given = dict.fromkeys(("tokenizer", "processor", "dataset_cls", "dataset_config"))
    made = Flow(trainer_config=type("Wrapped", (), {"config": {"a": 1}}), gateway_url="http://g:1/", extra=1, **given)
    assert (made.config, made.gateway_url, made.processor, made.apply_chat_template_kwargs) == ({"a": 1}, "http://g:1", None, {})
    helpers = ("gateway_generate", "gateway_submit_steps", "gateway_compute_reward", "apply_chat_template", "process_vision_info")
    assert all(inspect.iscoroutinefunction(getattr(Flow, name)) for name in ("run", *helpers))
    assert BlackBoxAgentFlowBase.__abstractmethods__ == {"_run_agent"} and AgentFlowBase.__abstractmethods__ == {"run"}
    assert register("a_name")(Flow) is Flow


def test_the_packaged_yaml_names_a_flow_that_there_is():
    (entry,) = yaml.safe_load((FACADE / "blackbox_agent" / "agent_flow_config.yaml").read_text())
    module, _, name = entry["_target_"].rpartition(".")
    assert (entry["name"], name) == ("blackbox_gsm8k_agent", "BlackBoxGSM8KAgentFlow")
    assert issubclass(getattr(importlib.import_module(module), name), BlackBoxAgentFlowBase)


@pytest.mark.parametrize("module", COMMANDS)
def test_each_command_explains_itself(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") and module.rpartition(".")[0] in done.stdout


def test_files_of_the_facade_are_short():
    assert {file.name: lines for file in FACADE.rglob("*.py") if (lines := len(file.read_text().splitlines())) > 150} == {}
