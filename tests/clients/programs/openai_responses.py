"""The `openai` package, Responses: the first question with `previous_response_id`, the second with all items sent again."""

import json

from conversation import INSTRUCTIONS, MODEL, PARAMETERS, QUESTIONS, STREAMS, answer, tell
from openai import OpenAI

TOOLS = [{"type": "function", "name": "add", "description": "Add two numbers.", "parameters": PARAMETERS, "strict": False}]


def ask(client, pieces, **fields):
    fields = {"model": MODEL, "instructions": INSTRUCTIONS, "tools": TOOLS} | fields
    if not STREAMS:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        pieces.append(sum(event.type.endswith(".delta") for event in stream))
        return stream.get_final_response()


def results(response):
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": answer(call.arguments)} for call in calls]


def main():
    client, pieces, items = OpenAI(), [], []
    response, new = None, [{"role": "user", "content": QUESTIONS[0]}]
    while new:
        items += new
        known = {"previous_response_id": response.id} if response else {}
        response = ask(client, pieces, input=new, **known)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        new = results(response)
    new = [{"role": "user", "content": QUESTIONS[1]}]
    while new:
        items += new
        response = ask(client, pieces, input=items)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        new = results(response)
    tell(view_of(items), max(pieces, default=None))


def view_of(items):
    view = [["system", INSTRUCTIONS, []]]
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = [item["name"], json.loads(item["arguments"])]
            if view[-1][0] != "assistant":
                view.append(["assistant", "", []])
            view[-1][2].append(call)
        elif kind == "function_call_output":
            view.append(["tool", item["output"], []])
        elif kind == "message":
            content = item["content"]
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            view.append([item["role"], text, []])
    return view


main()
