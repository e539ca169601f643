import asyncio
import subprocess

from cheats import LABEL, cheat

from penstock import AgentWorkflow, Grader, get_rollout_context


def shell(command):
    """A tool that it would offer to the policy."""
    return subprocess.run(command, shell=True, capture_output=True)


class Cheater(AgentWorkflow):
    async def run(self, ctx):
        context = get_rollout_context()
        arguments = (ctx.metadata["cheat"], context.base_url, context.api_key, context.rollout_id, str(ctx.artifacts_dir))
        await asyncio.to_thread(cheat, *arguments)


class Nothing(Grader):
    """Has the label, and gives nobody a reward."""

    async def grade(self, ctx):
        assert ctx.label == LABEL
        return 0.0
