"""An evaluation of Inspect with four samples of two turns, by a provider that sends each sample's id."""

import os

from conversation import MODEL, QUESTIONS
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.solver import generate, user_message

model = get_model(f"fireworks/{MODEL}", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
solver = [generate(), user_message(QUESTIONS[1]), generate()]
[log] = evaluate(Task(dataset=[Sample(QUESTIONS[0]) for _ in range(4)], solver=solver), model=model, display="none")
assert log.status == "success", log.error
