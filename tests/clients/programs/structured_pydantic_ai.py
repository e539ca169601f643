"""pydantic-ai: its outputs by a tool, by the API's own format and by the prompt alone."""

import asyncio

from person import MODEL, QUESTION, STREAMS, WAY, Person, tell
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

API, _, METHOD = WAY.partition("-")
models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
outputs = {"tool": ToolOutput, "native": NativeOutput, "prompted": PromptedOutput}
name = "claude-sonnet-4-5" if API == "messages" else MODEL  # which reports it whether the API takes schemas
agent = Agent(models[API](name), output_type=outputs[METHOD](Person))


async def main():
    if not STREAMS:
        return (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as result:
        return await result.get_output()


tell(asyncio.run(main()))
