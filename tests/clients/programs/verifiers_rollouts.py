"""Six rollouts of verifiers at once, as an evaluation runs them."""

import asyncio
import os

import verifiers.v1 as vf
from conversation import INSTRUCTIONS, MODEL, QUESTIONS


async def main():
    config = vf.AgentConfig(
        model=MODEL,
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
        sampling=vf.SamplingConfig(max_tokens=400),
        harness={"id": "adder-harness"},
        runtime=vf.SubprocessConfig(),
    )
    task = vf.Task(vf.TaskData(prompt=QUESTIONS[0], system_prompt=INSTRUCTIONS))
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(vf.Agent(config).run(task)) for _ in range(6)]
    assert not [run.result().errors for run in runs if run.result().errors]


asyncio.run(main())
