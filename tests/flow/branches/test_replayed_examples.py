"""The example agents, replayed over and over: every prefix is that of the record, byte for byte, or the difference is named."""

import asyncio
import os
from pathlib import Path

import orjson
import pytest
from branch_cases import branching

from penstock.chat.renderer import Renderer
from penstock.config import load_config
from penstock.records import End
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import open_agent
from penstock.testing import write_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENTS = [
    "multiply/train",
    "multiply/openai_agents",
    "multiply/strands",
    "search/train",
    "search/openai_agents",
    "search/strands",
    "command/train",
    "flow/train",
    "gsm8k/train",
    "team/train",
]
REPLAYS = 1000 if os.environ.get("PENSTOCK_FAULTS") == "full" else 32
"""Of all agents together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    corpus = [path.read_text() for path in EXAMPLES.glob("*/*.py")]
    return write_tokenizer(tmp_path_factory.mktemp("model"), corpus=corpus)


def policy(renderer, label):
    """Calls the tool that there is, hands over where it can, then answers."""

    def reply(prompt):
        text = renderer.tokenizer.decode(prompt)
        asked = text.rpartition("What is ")[2] if "multiply" in text else text
        reported = asked.count("<tool_response>\n")
        if "Name in a few words" in text:
            return "the Orrin lighthouse"
        if not reported and "multiply" in text:
            return '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
        if not reported:
            return '<tool_call>\n{"name": "search", "arguments": {"query": "lighthouse"}}\n</tool_call>'
        if "hand over to the writer" in text:
            return '<tool_call>\n{"name": "transfer_to_writer", "arguments": {}}\n</tool_call>'
        return f"It is {label}."

    return reply


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_replays_of_an_example_repeat_its_record(name, model):
    config, renderer = load_config(EXAMPLES / f"{name}.toml"), Renderer.load(model)
    agent = open_agent(config.agent, config.workflow, config.grader)
    task = load_tasks(config.dataset.train, limit=1, columns=agent.kind.keeps_columns)[0]
    agent = agent.kind.with_run_settings(agent, model=model, group_size=1)
    count = REPLAYS // len(AGENTS)

    async def main():
        async with branching(renderer, policy(renderer, task.label), agent, branches=count, concurrency=8) as stage:
            recorded = await stage.record(task=task)
            assert recorded.end is End.COMPLETED and len(recorded.steps) > 1, recorded.message
            last = recorded.steps[-1].index
            made = await stage.branch(recorded, last)
            assert len(made) == count
            return recorded, made

    recorded, made = asyncio.run(main())
    different = [attempt.message for attempt in made if attempt.end is End.BRANCH_DIVERGED]
    assert all(" at byte " in message for message in different)
    assert different == []  # these ten repeat themselves
    for attempt in made:
        assert attempt.end is End.COMPLETED, attempt.message
        assert [written(step) for step in attempt.steps[:-1]] == [written(step) for step in recorded.steps[:-1]]
        assert [step.replayed for step in attempt.steps] == [True] * (len(recorded.steps) - 1) + [False]


def written(step):
    return orjson.dumps(
        [step.message, step.completion_ids, step.logprobs, step.answer, step.created, step.context_digest, step.finish]
    )
