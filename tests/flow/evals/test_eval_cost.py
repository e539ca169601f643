"""What an evaluation on an endpoint costs: reported wherever its numbers are."""

import json

import pytest
from judge_double import judge_double

from penstock.cli.app import run

AGENT = """
from penstock import AgentWorkflow, Grader

class Asker(AgentWorkflow):
    async def run(self, ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)

class Fine(Grader):
    async def grade(self, ctx):
        return 1.0
"""


def endpoint(number, body):
    """Answers in one piece or as a stream, as it is asked; either way it reports 1,000 tokens read and 100 sampled."""
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    said = {"role": "assistant", "content": "It is 42."}
    head = {"id": "c", "created": 1, "model": "m"}
    if not body.get("stream"):
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        return 200, {"content-type": "application/json"}, json.dumps({**head, "choices": [choice], "usage": usage})
    chunks = [{**head, "choices": [{"index": 0, "delta": said, "finish_reason": "stop"}]}, {**head, "choices": [], "usage": usage}]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return 200, {"content-type": "text/event-stream"}, text


pytestmark = pytest.mark.project(agent=AGENT, tasks=[{"prompt": "6 times 7?"}, {"prompt": "2 times 2?"}])


def test_an_endpoints_tokens_at_its_prices_are_the_cost(project, capsys):
    with judge_double(endpoint) as double:
        flags = ["--agent", "agent.py", "--dataset", "tasks.jsonl", "--model", "m", "--name", "priced"]
        engine = {"name": "'openai'", "url": f"'{double.url}'", "price_in": "2.0", "price_out": "10.0"}
        flags += [part for key, value in engine.items() for part in ("--set", f"engine.{key}={value}")]
        assert run(["eval", "run", *flags, "--json"]) == 0, capsys.readouterr()
        found = json.loads(capsys.readouterr().out)["outcome"]
        assert (found["prompt_tokens"], found["completion_tokens"], found["ends"]) == (2000, 200, {"completed": 2})
        assert found["cost"] == pytest.approx((2000 * 2.0 + 200 * 10.0) / 1e6)
        asked = len(double.asked)
        assert run(["eval", "run", *flags, "--set", "engine.price_out=20.0"]) == 0
    assert "cost        0.008" in capsys.readouterr().out and len(double.asked) == asked
    assert "cost<b>0.008</b>" in (project / "runs/evals/priced/report.html").read_text()
    assert run(["eval", "compare", "runs/evals/priced", "runs/evals/priced", "--plain"]) == 0
    assert "a.cost\t0.008\t\t" in capsys.readouterr().out
