"""The `anthropic` package, Messages."""

from anthropic import Anthropic
from conversation import INSTRUCTIONS, MODEL, PARAMETERS, QUESTIONS, STREAMS, answer, tell

TOOLS = [{"name": "add", "description": "Add two numbers.", "input_schema": PARAMETERS}]


def ask(client, messages, pieces):
    fields = {"model": MODEL, "max_tokens": 512, "system": INSTRUCTIONS, "messages": messages, "tools": TOOLS}
    if not STREAMS:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        pieces.append(sum(event.type == "content_block_delta" for event in stream))
        return stream.get_final_message()


def main():
    client, pieces, messages = Anthropic(), [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            message = ask(client, messages, pieces)
            messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": answer(call.input)} for call in calls]
            messages.append({"role": "user", "content": results})
    counted = client.messages.count_tokens(model=MODEL, system=INSTRUCTIONS, messages=messages, tools=TOOLS)
    assert counted.input_tokens > 5, counted
    tell([["system", INSTRUCTIONS, []], *(entry for message in messages for entry in view_of(message))], max(pieces, default=None))


def view_of(message):
    if isinstance(message["content"], str):
        return [[message["role"], message["content"], []]]
    results = [["tool", block["content"], []] for block in message["content"] if block["type"] == "tool_result"]
    if results:
        return results
    text = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    calls = [[block["name"], block["input"]] for block in message["content"] if block["type"] == "tool_use"]
    return [[message["role"], text, calls]]


main()
