"""google-adk: an agent's `output_schema`, by the API's own format, or by its own tool where the agent has tools."""

import asyncio

from adk_runner import model_of, said
from google.adk.agents import LlmAgent
from person import QUESTION, STREAMS, WAY, Person, tell

API, _, METHOD = WAY.partition("-")


def look_up(name: str) -> str:
    """Look a person up."""
    return name


tools = [look_up] if METHOD == "tools" else []
agent = LlmAgent(name="teller", model=model_of(API), instruction="Answer.", output_schema=Person, tools=tools)
[answer] = asyncio.run(said(agent, [QUESTION], streams=STREAMS))
tell(Person.model_validate_json(answer))
