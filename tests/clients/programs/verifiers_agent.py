"""An agent of verifiers, whose server forwards the calls of its harness; `DIALECT` is the API, or `train`.

`train` is its training client: it renders prompts on its own and samples by `/inference/v1/generate`. It talks without tools, since
the renderer that any template has knows none.
"""

import asyncio
import json
import os

import verifiers.v1 as vf
from conversation import DIALECT, INSTRUCTIONS, MODEL, QUESTIONS

VENDOR = "ANTHROPIC" if DIALECT == "messages" else "OPENAI"
ENDPOINT = {"base_url": os.environ[f"{VENDOR}_BASE_URL"], "api_key_var": f"{VENDOR}_API_KEY"}


async def main():
    if DIALECT == "train":
        root = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
        client = vf.TrainClientConfig(**ENDPOINT | {"base_url": root}, renderer_model_name=os.environ["TOKENIZER"])
    else:
        client = vf.EvalClientConfig(**ENDPOINT)
    config = vf.AgentConfig(
        model=MODEL,
        client=client,
        sampling=vf.SamplingConfig(max_tokens=400),
        harness={"id": "adder-harness"},
        runtime=vf.SubprocessConfig(),
    )
    trace = await vf.Agent(config).run(vf.Task(vf.TaskData(prompt=QUESTIONS[0], system_prompt=INSTRUCTIONS)))
    assert not trace.errors, trace.errors
    print(json.dumps({"tokens": [token for node in trace.nodes for token in node.token_ids]}))


asyncio.run(main())
