"""Harbor's LiteLLM client: `response_format`."""

import asyncio
import os

from harbor.llms.lite_llm import LiteLLM
from person import MODEL, QUESTION, Person, tell

model = LiteLLM(f"openai/{MODEL}", api_base=os.environ["OPENAI_BASE_URL"])
tell(Person.model_validate_json(asyncio.run(model.call(QUESTION, response_format=Person)).content))
