"""The multiply example as a black-box flow: found by its YAML list, run with a plain client, graded by its own function."""

import json
from pathlib import Path

import pytest
from seed_rollouts import run_rollouts

from penstock.config import AgentSection
from penstock.records import End, Task
from penstock.sdk.discovery import open_agent

MULTIPLY = Path(__file__).parents[2] / "examples" / "multiply"
TASK = Task(id="t", prompt=({"role": "user", "content": "6*7"},), label="42", metadata={"ground_truth": "42"})


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
def test_flow_is_rewarded_for_tool_use_and_right_answer(renderer, replies, reward):
    source = AgentSection(entry=Path(), flow="multiply", flows=MULTIPLY / "flow.yaml")
    agent = open_agent(source, {}, {"path": str(MULTIPLY / "multiply_flow.py")})
    ran = run_rollouts(renderer, agent, replies, task=TASK)
    assert (ran.attempt.end, ran.attempt.message, ran.attempt.reward) == (End.COMPLETED, "", reward)
    assert len(ran.attempt.steps) == len(replies)
    assert sum(node.parent is None for node in ran.attempt.nodes) == 1
