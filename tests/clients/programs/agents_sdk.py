"""The `openai-agents` package, as it comes: over Responses, or over Chat Completions where the second argument says `chat`."""

import asyncio
import json

from agents import Agent, Runner, function_tool, set_default_openai_api
from conversation import DIALECT, INSTRUCTIONS, MODEL, QUESTIONS, STREAMS, add, tell, text_of

if DIALECT == "chat":
    set_default_openai_api("chat_completions")


async def main():
    agent = Agent(name="adder", instructions=INSTRUCTIONS, model=MODEL, tools=[function_tool(add)])
    items, pieces = [], 0
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        if STREAMS:
            result = Runner.run_streamed(agent, items)
            pieces += len([event async for event in result.stream_events() if event.type == "raw_response_event"])
        else:
            result = await Runner.run(agent, items)
        items = result.to_input_list()
    tell(view_of(items), pieces if STREAMS else None)


def view_of(items):
    view = [["system", INSTRUCTIONS, []]]
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            if view[-1][0] != "assistant":
                view.append(["assistant", "", []])
            view[-1][2].append([item["name"], json.loads(item["arguments"])])
        elif kind == "function_call_output":
            view.append(["tool", text_of(item["output"]), []])
        else:
            view.append([item["role"], text_of(item["content"]), []])
    return view


asyncio.run(main())
