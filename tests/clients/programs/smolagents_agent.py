"""smolagents over Chat Completions: an agent that calls tools, or one that writes code, in JSON of a schema too."""

from conversation import DIALECT, MODEL, STREAMS
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


options = {"tools": [add], "model": OpenAIModel(MODEL), "max_steps": 4, "stream_outputs": STREAMS, "verbosity_level": 0}
if DIALECT == "tools":
    agent = ToolCallingAgent(**options)
else:
    agent = CodeAgent(use_structured_outputs_internally=DIALECT == "json", **options)
print(agent.run("What is 2 plus 3?"))
