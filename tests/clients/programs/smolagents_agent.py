"""A smolagents agent that calls tools, over Chat Completions."""

from conversation import MODEL, STREAMS
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


agent = ToolCallingAgent(tools=[add], model=OpenAIModel(MODEL), max_steps=4, stream_outputs=STREAMS, verbosity_level=0)
print(agent.run("What is 2 plus 3?"))
