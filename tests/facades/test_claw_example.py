"""The multiply example as a black-box flow: found by its YAML list, run with a plain client, graded by its own function."""

import json
from pathlib import Path

import pytest
from seed_rollouts import run_rollouts

from penstock.chat.renderer import Renderer
from penstock.config import AgentSection
from penstock.records import End, Task
from penstock.sdk.discovery import open_agent
from penstock.testing import write_tokenizer

MULTIPLY = Path(__file__).parents[2] / "examples" / "multiply"
TASK = Task(id="t", prompt=({"role": "user", "content": "6*7"},), label="42", metadata={"ground_truth": "42"})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("model")))


def call(name="multiply", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        ([call(a=6, b=7), "42"], 1.0),
        ([call(a=6, b=7), "41"], 0.0),
        (["42"], 0.0),
        ([call("divide", a=6, b=7)], 0.0),
        ([call(a="six", b=7)], 0.0),
    ],
)
def test_the_flow_earns_where_it_used_its_tool_and_answers_right(renderer, replies, reward):
    source = AgentSection(entry=Path(), flow="multiply", flows=MULTIPLY / "flow.yaml")
    agent = open_agent(source, {}, {"path": str(MULTIPLY / "multiply_flow.py")})
    ran = run_rollouts(renderer, agent, replies, task=TASK)
    assert (ran.attempt.end, ran.attempt.message, ran.attempt.reward) == (End.COMPLETED, "", reward)
    assert len(ran.attempt.steps) == len(replies)
    assert sum(node.parent is None for node in ran.attempt.nodes) == 1
