"""A crew of one agent with a tool and two tasks, over each API."""

from conversation import DIALECT, INSTRUCTIONS, QUESTIONS, STREAMS
from crewai_model import model_of

from crewai import Agent, Crew, Task  # isort: skip
from crewai.tools import tool  # isort: skip


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(role="adder", goal=INSTRUCTIONS, backstory="You add.", llm=model_of(DIALECT, STREAMS), tools=[add])
tasks = [Task(description=question, expected_output="The sum.", agent=agent) for question in QUESTIONS]
result = Crew(agents=[agent], tasks=tasks).kickoff()
for output in result.tasks_output:
    print(output.raw)
