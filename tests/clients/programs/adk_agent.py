"""A google-adk agent with a tool, by its LiteLlm model (Chat Completions) or its own for Anthropic (Messages)."""

import asyncio

from adk_runner import model_of, said
from conversation import DIALECT, INSTRUCTIONS, QUESTIONS, STREAMS, add
from google.adk.agents import LlmAgent

agent = LlmAgent(name="adder", model=model_of(DIALECT), instruction=INSTRUCTIONS, tools=[add])
for answer in asyncio.run(said(agent, QUESTIONS, streams=STREAMS)):
    print(answer)
