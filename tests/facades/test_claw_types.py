"""The types and commands of `claw_r1`."""

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

FACADE = Path(__file__).parents[2] / "packages" / "compat" / "src" / "claw_r1"
COMMANDS = ["claw_r1.async_main", "claw_r1.main_agent_ppo", "claw_r1.gateway.gateway"]


@pytest.mark.parametrize("name", ["TrainingBackend", "VerlBackend"])
def test_what_is_not_offered_says_what_to_use(name):
    with pytest.raises(AttributeError, match="pool"):
        getattr(importlib.import_module("claw_r1.data_pool"), name)


def test_step_has_the_fields_and_defaults_of_the_reference():
    made = Step(prompt_ids=[1], response_ids=[2, 3])
    defaults = {"reward": None, "multi_modal_data": None, "rollout_log_probs": None, "routed_experts": None, "trajectory_uid": ""}
    defaults |= {"prompt_uid": "", "step_index": 0, "policy_version": 0, "is_last": False, "metadata": None}
    assert dataclasses.asdict(made) == {"prompt_ids": [1], "response_ids": [2, 3], **defaults}


def test_flow_is_made_with_the_references_keywords():
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


def test_packaged_yaml_names_a_flow_that_there_is():
    (entry,) = yaml.safe_load((FACADE / "blackbox_agent" / "agent_flow_config.yaml").read_text())
    module, _, name = entry["_target_"].rpartition(".")
    assert (entry["name"], name) == ("blackbox_gsm8k_agent", "BlackBoxGSM8KAgentFlow")
    assert issubclass(getattr(importlib.import_module(module), name), BlackBoxAgentFlowBase)


@pytest.mark.parametrize("module", COMMANDS)
def test_each_command_explains_itself(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") and module.rpartition(".")[0] in done.stdout
