"""The `openai` package, Chat Completions."""

import json

from conversation import INSTRUCTIONS, MODEL, PARAMETERS, QUESTIONS, STREAMS, answer, tell
from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]


def ask(client, messages, pieces):
    if not STREAMS:
        return client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        pieces.append(sum(event.type == "chunk" for event in stream))
        return stream.get_final_completion().choices[0].message


def main():
    client, pieces = OpenAI(), []
    messages = [{"role": "system", "content": INSTRUCTIONS}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            message = ask(client, messages, pieces)
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer(call.function.arguments)})
    tell([view_of(message) for message in messages], max(pieces, default=None))


def view_of(message):
    calls = [[call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message.get("tool_calls") or ()]
    return [message["role"], message.get("content") or "", calls]


main()
