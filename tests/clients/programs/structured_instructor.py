"""instructor: `WAY` is the API and the mode."""

import instructor
from person import MODEL, QUESTION, STREAMS, WAY, Person, tell

API, _, METHOD = WAY.partition("-")
if API == "messages":
    from anthropic import Anthropic

    client = instructor.from_anthropic(Anthropic(), mode=instructor.Mode[METHOD])
else:
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(), mode=instructor.Mode[METHOD])
limit = "max_output_tokens" if API == "responses" else "max_tokens"
asked = {"model": MODEL, limit: 300, "messages": [{"role": "user", "content": QUESTION}], "response_model": Person}
if STREAMS:
    asked["response_model"] = Person
    found = list(client.chat.completions.create_partial(**asked))[-1]
else:
    found = client.chat.completions.create(**asked)
tell(found)
