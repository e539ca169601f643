"""The `litellm` package, to whichever API the second argument names."""

import json

import litellm
from conversation import DIALECT, INSTRUCTIONS, MODEL, PARAMETERS, QUESTIONS, STREAMS, answer, tell

NAMES = {"chat": f"openai/{MODEL}", "responses": "openai/responses/gpt-4o", "messages": f"anthropic/{MODEL}"}
NAME = NAMES[
    DIALECT
]  # of a model that it does not know, litellm makes up the stream of Responses, and doubles the arguments of calls
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]


def ask(messages, pieces):
    if not STREAMS:
        return litellm.completion(model=NAME, messages=messages, tools=TOOLS).choices[0].message
    chunks = list(litellm.completion(model=NAME, messages=messages, tools=TOOLS, stream=True))
    pieces.append(len(chunks))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


def main():
    messages, pieces = [{"role": "system", "content": INSTRUCTIONS}], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            message = ask(messages, pieces)
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer(call.function.arguments)})
    tell([view_of(message) for message in messages], max(pieces, default=None))


def view_of(message):
    calls = [[call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message.get("tool_calls") or ()]
    return [message["role"], message.get("content") or "", calls]


main()
