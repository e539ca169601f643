"""What every program for structured output asks for: a person, printed as JSON on the last line."""

import json
import sys

from pydantic import BaseModel, ConfigDict

QUESTION = "Who wrote the first program? Name and age."
MODEL = "scripted"
WAY = sys.argv[1]
STREAMS = sys.argv[2] == "stream"


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str
    age: int


def tell(person):
    print(json.dumps({"name": person.name, "age": person.age}))
