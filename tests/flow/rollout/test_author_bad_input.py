"""What authors get wrong: each mistake is one clear line in its category, and the neighbours in the group never notice."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from cli_cases import called

from penstock.chat.renderer import Renderer
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import End, Sampling, Task, make_rollout
from penstock.rollout.runner import open_runner
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import load_agent
from penstock.testing import ScriptedEngine, workbench, write_tokenizer

AGENT = '''
import asyncio
import contextlib

from penstock import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig, get_rollout_context

class Settings(AgentWorkflowConfig):
    greeting: str = "hello"

class Strictness(GraderConfig):
    tolerance: float = 0.1

class Careless(AgentWorkflow[Settings]):
    """Does what its task says, but only in the first attempt of the group; the others behave."""

    async def run(self, ctx):
        first = get_rollout_context().rollout_id.split(".")[-2] == "0"
        do = ctx.metadata["do"] if first else "well"
        name = "s" * 500 if do == "oversized id" else "a\\nb" if do == "broken id" else "main"
        await ctx.openai(name).chat.completions.create(model="any", messages=ctx.prompt, max_tokens=4)
        if do == "raise":
            raise RuntimeError("out of luck")
        if do == "hang":
            await asyncio.Event().wait()
        while do == "swallow":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return [{"role": "assistant", "content": do}]

class Judge(Grader):
    async def grade(self, ctx):
        do = ctx.sample.reported_messages[-1]["content"]
        if do == "grader hang":
            await asyncio.Event().wait()
        if do == "unknown sample":
            ctx.set_sample_reward("critic", 1.0)
        if do == "no reward":
            return
        bad = {"nan": float("nan"), "inf": float("inf"), "str": "0.7", "bool": True, "huge": 10**400, "none": None}
        ctx.set_reward(bad.get(do, 1.0))

settings = Settings(name="careless")
strictness = Strictness(name="judge")
'''

MISTAKES = {
    "raise": (End.AGENT_ERROR, r"workflow 'Careless': RuntimeError: out of luck \(agent\.py, line \d+\)"),
    "hang": (End.TIMEOUT, r"the workflow ran longer than rollout\.agent_timeout_s = [\d.]+; raise it or do less"),
    "swallow": (End.TIMEOUT, r"the workflow ran longer than rollout\.agent_timeout_s = [\d.]+; raise it or do less"),
    "oversized id": (End.AGENT_ERROR, r"workflow 'Careless': ValueError: 's+\.\.\.s+' cannot name a transcript; use up to 200"),
    "broken id": (End.AGENT_ERROR, r"workflow 'Careless': ValueError: 'a\\nb' cannot name a transcript; use up to 200"),
    "nan": (End.GRADER_ERROR, r"grader 'judge': reward nan is not a finite number; give a finite float"),
    "inf": (End.GRADER_ERROR, r"grader 'judge': reward inf is not a finite number; give a finite float"),
    "str": (End.GRADER_ERROR, r"grader 'judge': reward '0\.7' is not a finite number; give a finite float"),
    "bool": (End.GRADER_ERROR, r"grader 'judge': reward True is not a finite number; give a finite float"),
    "huge": (End.GRADER_ERROR, r"grader 'judge': reward 10+\.\.\.0+ is not a finite number; give a finite float"),
    "none": (End.GRADER_ERROR, r"grader 'judge': reward None is not a finite number; give a finite float"),
    "no reward": (End.GRADER_ERROR, r"grader 'judge': gave no reward for \['main'\]; call ctx\.set_sample_reward"),
    "unknown sample": (End.GRADER_ERROR, r"grader 'judge': ValueError: unknown sample 'critic'; this rollout has \['main'\]"),
    "grader hang": (End.GRADER_ERROR, r"the grader ran longer than rollout\.grader_timeout_s = [\d.]+; raise it or do less"),
}


@pytest.fixture
def entry(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path / "agent.py"


def group_of(entry, do, tmp_path):
    """Run a group of three, the first of which makes the mistake; its attempts, and the events of the run."""
    renderer = Renderer.load(write_tokenizer(tmp_path / "model"))
    events, reported = Events(), []
    events.listen(lambda kind, fields: reported.append((kind, fields)))
    task = Task(id="t", prompt=({"role": "user", "content": "2 times 3?"},), metadata={"do": do})
    patient = RolloutSection(agent_timeout_s=30, grader_timeout_s=0.5 if do == "grader hang" else 30)

    async def main():
        engine = ScriptedEngine(lambda ids: "six", renderer.tokenizer)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(60))
            bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
            agent = load_agent(entry, {}, {})
            opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=events, limits=patient)
            runner = await stack.enter_async_context(opened)
            hasty = replace(runner, limits=patient.model_copy(update={"agent_timeout_s": 0.5}))
            rollouts = [make_rollout("train-0", task.id, place) for place in range(3)]
            await bench.pool.open_group(task, rollouts, seq=0)
            async with asyncio.TaskGroup() as group:
                for rollout in rollouts:
                    late = do in ("hang", "swallow") and rollout.place == 0
                    group.create_task((hasty if late else runner).run(rollout, task, Sampling(max_tokens=8)))
            return [await bench.pool.rollout(rollout.id) for rollout in rollouts]

    return asyncio.run(main()), reported


@pytest.mark.parametrize("do", [pytest.param(do, marks=pytest.mark.slow if do == "swallow" else ()) for do in MISTAKES])
def test_mistake_ends_its_own_rollout_alone_with_its_reason(do, entry, tmp_path):
    (bad, *others), reported = group_of(entry, do, tmp_path)
    end, words = MISTAKES[do]
    assert (bad.end, bad.reward) == (end, None)
    assert re.search(words, bad.message), bad.message
    assert "\n" not in bad.message
    assert [(each.end, each.reward, each.message) for each in others] == [(End.COMPLETED, 1.0, "")] * 2
    assert [kind for kind, _ in reported].count("rollout.end") == 3


CONFIG = """
model.name = "tiny"
agent.entry = "agent.py"
dataset.train = "tasks.jsonl"
rollout = {group_size = 2, groups_per_step = %d, agent_timeout_s = 5, grader_timeout_s = 1}
run.name = "careless"
train.steps = 1
"""


@pytest.fixture
def project(entry):
    rows = [{"prompt": f"{n} times 3?", "metadata": {"do": do}} for n, do in enumerate(MISTAKES)]
    (entry.parent / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (entry.parent / "train.toml").write_text(CONFIG % len(MISTAKES))
    return entry.parent


@pytest.mark.slow
def test_run_with_every_mistake_trains_on_rest_and_reports_each(project):
    done = called(project, "train", "train.toml")
    assert done.returncode == 0, done.stderr
    lines = (project / "runs/careless/events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "rollout.end"]
    mistakes = {task.id: task.metadata["do"] for task in load_tasks(project / "tasks.jsonl")}
    tasks = {event["rollout_id"]: event["task_id"] for event in map(json.loads, lines) if event["kind"] == "rollout.start"}
    first = {mistakes[tasks[event["rollout_id"]]]: event for event in events if event["rollout_id"].endswith(".0.1")}
    assert {do: event["end"] for do, event in first.items()} == {do: end for do, (end, _) in MISTAKES.items()}
    for do, event in first.items():
        assert re.search(MISTAKES[do][1], event["message"]), event["message"]
    assert {event["end"] for event in events if event["rollout_id"].endswith(".1.1")} == {"completed"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["workflow.greting=hi"], "[workflow] for Settings: unknown key 'greting'; did you mean 'greeting'?"),
        (["grader.tolerence=1"], "[grader] for Strictness: unknown key 'tolerence'; did you mean 'tolerance'?"),
        (["executor.memory_mb=1"], "[executor]: unknown key 'memory_mb'"),
        (["rollout.executor=process", "executor.memory=1"], "[executor]: unknown key 'memory'; did you mean 'memory_mb'?"),
        (["rollout.executor=server"], "[executor]: key 'urls' is missing"),
        (["rollout.executor=server", "executor.urls=ftp://127.0.0.1"], "'ftp://127.0.0.1' is not an address"),
        (
            ["rollout.executor=server", "executor.urls=http://127.0.0.1:1", "executor.token_env=NO_SUCH_TOKEN"],
            "the environment has no NO_SUCH_TOKEN",
        ),
    ],
)
def test_mistake_in_the_file_is_one_line_before_anything_starts(project, overrides, words):
    done = called(project, "train", "train.toml", *[part for each in overrides for part in ("--set", each)])
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert words in line
    assert not (project / "runs").exists()
