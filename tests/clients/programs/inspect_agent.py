"""A task of Inspect with a tool and two questions, over each API."""

from conversation import DIALECT, INSTRUCTIONS, QUESTIONS, STREAMS
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, system_message, use_tools, user_message
from inspect_ai.tool import tool
from inspect_model import model_of


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    return execute


first, second = QUESTIONS
solver = [system_message(INSTRUCTIONS), use_tools(add()), generate(), user_message(second), generate()]
[log] = evaluate(Task(dataset=[Sample(first)], solver=solver), model=model_of(DIALECT, STREAMS), display="none")
assert log.status == "success", log.error
for message in log.samples[0].messages:
    print(message.text)
