"""An agent on a plain client: what it does, and how it is graded, stands in its task's metadata."""

import asyncio
import contextlib
import json
import socket
import sys
from pathlib import Path

from penstock import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig, RolloutSample, get_rollout_context


class Settings(AgentWorkflowConfig):
    greeting: str = "hello"


class Scale(GraderConfig):
    factor: float = 1.0


settings = Settings(name="plain")
scale = Scale(name="check")


def note(path, value):
    """For the test, which may be in another process."""
    Path(path).write_text(json.dumps(value))


async def ask(ctx, messages, transcript="main", **options):
    """One call; the conversation with its answer."""
    client = ctx.openai(transcript).with_options(max_retries=0)
    answer = await client.chat.completions.create(model="any", messages=messages, **options)
    return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]


async def answers(ctx):
    await ask(ctx, ctx.prompt)


async def talks(ctx):
    said = await ask(ctx, ctx.prompt)
    for text in ("say: more", "say: most"):
        said = await ask(ctx, [*said, {"role": "user", "content": text}])


async def two_agents(ctx):
    plan = await ask(ctx, ctx.prompt, "planner")
    await ask(ctx, [{"role": "user", "content": f"say: did {plan[-1]['content']}"}], "executor")


async def greets(ctx):
    await ask(ctx, [{"role": "user", "content": f"say: {ctx.config.greeting}"}])


async def raises(ctx):
    await ask(ctx, ctx.prompt)
    raise ValueError("no luck: ☃\nat all")


async def raises_in_a_group(ctx):
    async with asyncio.TaskGroup() as group:
        group.create_task(raises(ctx))


async def exits(ctx):
    await ask(ctx, ctx.prompt)
    sys.exit(3)


async def times_out_itself(ctx):
    await ask(ctx, ctx.prompt)
    raise TimeoutError("the tool took too long")


async def hangs(ctx):
    await asyncio.Event().wait()


async def swallows(ctx):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def is_silent(ctx):
    return "nothing was asked"


async def strays(ctx):
    with contextlib.suppress(OSError):
        socket.getaddrinfo("api.openai.com", 443)


async def strays_and_answers(ctx):
    await strays(ctx)
    await answers(ctx)


async def meddles(ctx):
    await ask(ctx, list(ctx.prompt))
    ctx.metadata["hint"] = "leaked"
    ctx.prompt.clear()


async def asks_nonsense(ctx):
    await ask(ctx, ctx.prompt, temperature=-1)


async def returns_messages(ctx):
    await ask(ctx, ctx.prompt)
    return [{"role": "assistant", "content": "in my own words"}]


async def returns_the_answer(ctx):
    await ask(ctx, [{"role": "user", "content": "say: wrong"}])
    return [*ctx.prompt, {"role": "assistant", "content": "six"}]


class Claim:
    """A sample source with a scripted sample."""

    def __init__(self, *messages):
        self.messages = list(messages)

    async def get_sample(self, name):
        return RolloutSample(id=name, messages=self.messages)


async def reports_the_answer(ctx):
    await ask(ctx, [{"role": "user", "content": "say: wrong"}])
    get_rollout_context().register_sample_source("main", Claim({"role": "assistant", "content": "six"}))


async def reports_the_answer_as_the_users(ctx):
    said = await ask(ctx, [{"role": "user", "content": "say: wrong"}])
    get_rollout_context().register_sample_source("main", Claim(*said, {"role": "user", "content": "six"}))


async def reports_what_it_asked_before(ctx):
    early = await ask(ctx, ctx.prompt)
    await ask(ctx, [{"role": "user", "content": "say: wrong"}])
    get_rollout_context().register_sample_source("main", Claim(*early))


async def reports_an_agent_that_never_was(ctx):
    await ask(ctx, [{"role": "user", "content": "say: wrong"}], "solver")
    get_rollout_context().register_sample_source("ghost", Claim({"role": "assistant", "content": "six"}))


async def returns_without_a_call(ctx):
    return [{"role": "assistant", "content": "six"}]


async def puts_words_into_its_mouth(ctx):
    await ask(ctx, [{"role": "assistant", "content": "six"}, {"role": "user", "content": "say: wrong"}])


async def leaves_a_file(ctx):
    (ctx.artifacts_dir / "note.txt").write_text("found it")
    await ask(ctx, ctx.prompt)


async def counts(ctx):
    """Note how many run at once, in a folder that all of them see."""
    folder = Path(ctx.metadata["notes"]).with_name("running")
    folder.mkdir(exist_ok=True)
    mine = folder / Path(ctx.metadata["notes"]).name
    mine.touch()
    await ask(ctx, ctx.prompt)
    peak = len(list(folder.iterdir()))
    mine.unlink()
    note(f"{ctx.metadata['notes']}.peak", peak)


class Plain(AgentWorkflow[Settings]):
    async def run(self, ctx):
        return await globals()[ctx.metadata["do"]](ctx)


async def right(ctx):
    ctx.set_reward(float(ctx.sample.messages[-1]["content"] == ctx.label))


async def by_sample(ctx):
    for name, sample in ctx.samples.items():
        ctx.set_sample_reward(name, float(sample.messages[-1]["content"] == ctx.label))


async def by_replies(ctx):
    ctx.set_reward(float(any(reply["content"] == ctx.label for reply in ctx.sample.replies)))


async def each(ctx):
    for place, name in enumerate(ctx.samples):
        ctx.set_sample_reward(name, place + 0.5)


async def each_step(ctx):
    for step in ctx.sample.steps:
        ctx.set_step_reward(step, step / 4)


async def everything(ctx):
    ctx.set_reward(2.0)
    ctx.set_sample_reward("planner", 0.25)
    ctx.set_step_reward(1, -1.0)


async def adds_parts(ctx):
    ctx.set_reward(1.0)
    ctx.add_reward("format", 0.25)
    ctx.add_reward("length", -1.0)
    ctx.add_reward("length", 0.5)


async def adds_parts_to_each(ctx):
    ctx.set_sample_reward("planner", 0.5)
    ctx.set_sample_reward("executor", 1.5)
    ctx.add_reward("format", 0.25)


async def only_adds_parts(ctx):
    ctx.add_reward("format", 0.25)


async def returns_and_adds(ctx):
    ctx.add_reward("format", 0.25)
    return 0.5


async def adds_words(ctx):
    ctx.add_reward("format", "high")


async def returns(ctx):
    return 0.75


async def reads_the_file(ctx):
    ctx.set_reward(float((ctx.artifacts_dir / "note.txt").read_text() == "found it"))


async def fails(ctx):
    raise KeyError("no such ☃")


async def grader_times_out_itself(ctx):
    raise TimeoutError("the judge took too long")


async def waits(ctx):
    await asyncio.Event().wait()


async def forgets(ctx):
    pass


async def forgets_one(ctx):
    ctx.set_sample_reward("planner", 1.0)


async def unknown_sample(ctx):
    ctx.set_sample_reward("critic", 1.0)


async def unknown_step(ctx):
    ctx.set_step_reward(7, 1.0)


async def not_a_number(ctx):
    ctx.set_reward(float("nan"))


async def infinite(ctx):
    ctx.set_sample_reward("main", float("inf"))


async def too_much(ctx):
    ctx.set_reward(1e308)


async def too_much_in_all(ctx):
    for step in ctx.sample.steps:
        ctx.set_step_reward(step, 9e8)


async def words(ctx):
    ctx.set_reward("high")


async def returns_words(ctx):
    return "0.5"


async def past_the_setter(ctx):
    ctx.samples["main"].reward = float("-inf")


class Check(Grader):
    async def grade(self, ctx):
        samples = {
            name: {"messages": s.messages, "transcript": s.transcript, "claims": s.reported_messages, "steps": list(s.steps)}
            | {"tools": s.tools, "replies": s.replies}
            for name, s in ctx.samples.items()
        }
        seen = {"label": ctx.label, "metadata": ctx.metadata, "factor": getattr(self.config, "factor", None), "samples": samples}
        note(ctx.metadata["notes"], seen)
        return await globals()[ctx.metadata["grade"]](ctx)
