"""Inspect: `response_schema`, over each API."""

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema
from inspect_ai.util import json_schema
from inspect_model import model_of
from person import QUESTION, STREAMS, WAY, Person, tell

config = GenerateConfig(response_schema=ResponseSchema(name="person", json_schema=json_schema(Person), strict=True))
[log] = evaluate(Task(dataset=[Sample(QUESTION)], config=config), model=model_of(WAY, STREAMS), display="none")
assert log.status == "success", log.error
tell(Person.model_validate_json(log.samples[0].output.completion))
