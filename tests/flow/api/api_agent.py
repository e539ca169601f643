"""Agents and graders that the tests of the Python API pass as objects."""

from penstock import AgentWorkflow, AgentWorkflowConfig, Grader


async def ask(ctx):
    await ctx.openai().chat.completions.create(model="policy", messages=ctx.prompt)


def share_of_a(ctx):
    return _share(ctx.sample.text)


def _share(text: str) -> float:
    return text.count("a") / (len(text) + 1)


class AskConfig(AgentWorkflowConfig):
    question: str = "none"


class Ask(AgentWorkflow[AskConfig]):
    async def run(self, ctx):
        assert ctx.config.question == "why"
        await ask(ctx)


class Share(Grader):
    async def grade(self, ctx):
        ctx.set_reward(_share(ctx.sample.text))
