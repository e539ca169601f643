"""What a flow reads of its run: the config tree as attributes, the row as keywords, the sampling as it is."""

import pytest

from penstock.records import Sampling
from penstock.sdk.routing import RolloutContext
from penstock_compat.flows.agent import flow_kwargs, sampling_params
from penstock_compat.flows.base import expand_nested_messages, prompt_messages
from penstock_compat.flows.config import flow_config

SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_tokens=64)


def test_tree_reports_runs_own_values_under_names_that_flows_know():
    rollout = flow_config({}, SAMPLING, group_size=5, flow="mine").actor_rollout_ref.rollout
    assert (rollout.n, rollout.temperature, rollout.top_p, rollout.response_length) == (5, 0.7, 0.9, 64)
    assert (rollout.agent.default_agent_flow, rollout.get("max_turns"), rollout.get("nothing", 1)) == ("mine", 3, 1)


def test_table_goes_before_the_run_and_leaves_the_rest():
    tree = flow_config({"actor_rollout_ref": {"rollout": {"max_turns": 9}}, "data": {"k": [1, {"a": 2}]}}, SAMPLING)
    assert (tree.actor_rollout_ref.rollout.max_turns, tree.actor_rollout_ref.rollout.temperature) == (9, 0.7)
    assert (tree["data"]["k"], dict(tree.data), "data" in tree) == ([1, {"a": 2}], {"k": [1, {"a": 2}]}, True)


def test_key_that_is_not_there_is_named_with_its_table():
    with pytest.raises(AttributeError, match=r"\[workflow\.actor_rollout_ref\.rollout\]"):
        _ = flow_config({}, None).actor_rollout_ref.rollout.turns
    assert getattr(flow_config({}, None), "reward_model", None) is None


def test_sampling_is_reported_as_the_run_has_it():
    reported = sampling_params(SAMPLING)
    assert reported == {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": 64}
    assert sampling_params(None) == {}


def test_row_is_reported_with_prompt_and_whose_rollout_it_is():
    prompt = [{"role": "user", "content": "?"}]
    context = RolloutContext(base_url="http://h/v1", api_key="k", rollout_id="train-0.1.1", group_id="train-0")
    row = flow_kwargs({"task": "t", "uid": "of the row"}, prompt, context)
    assert row == {
        "task": "t",
        "raw_prompt": prompt,
        "uid": "train-0",
        "prompt_uid": "train-0",
        "trajectory_uid": "train-0.1.1",
    }
    context.channel = "val"
    assert flow_kwargs({}, prompt, context)["channel"] == "val"


def test_prompt_where_text_of_message_would_stand_is_spread_out():
    inner = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "and this"}]}
    assert expand_nested_messages([{"role": "user", "content": inner}, parts, {"role": "user", "content": []}]) == [
        *inner,
        parts,
        {"role": "user", "content": []},
    ]


def test_prompt_may_be_text_and_must_be_there():
    assert prompt_messages({"raw_prompt": "2+2?"}) == [{"role": "user", "content": "2+2?"}]
    for row in ({}, {"raw_prompt": []}):
        with pytest.raises(ValueError, match="prompt"):
            prompt_messages(row)
