"""Structured output of the vendors' own packages: `.parse` of openai and anthropic, `output_type` of openai-agents."""

import asyncio

from person import MODEL, QUESTION, STREAMS, WAY, Person, tell

ASKED = [{"role": "user", "content": QUESTION}]


def chat():
    from openai import OpenAI

    completions = OpenAI().chat.completions
    if STREAMS:
        with completions.stream(model=MODEL, messages=ASKED, response_format=Person) as events:
            return events.get_final_completion().choices[0].message.parsed
    return completions.parse(model=MODEL, messages=ASKED, response_format=Person).choices[0].message.parsed


def responses():
    from openai import OpenAI

    if STREAMS:
        with OpenAI().responses.stream(model=MODEL, input=QUESTION, text_format=Person) as events:
            return events.get_final_response().output_parsed
    return OpenAI().responses.parse(model=MODEL, input=QUESTION, text_format=Person).output_parsed


def messages():
    from anthropic import Anthropic

    client = Anthropic().messages
    if STREAMS:
        with client.stream(model=MODEL, max_tokens=200, messages=ASKED, output_format=Person) as events:
            return events.get_final_message().parsed_output
    return client.parse(model=MODEL, max_tokens=200, messages=ASKED, output_format=Person).parsed_output


def agents():
    from agents import Agent, Runner, set_default_openai_api

    if WAY == "agents-chat":
        set_default_openai_api("chat_completions")
    agent = Agent(name="teller", model=MODEL, output_type=Person)
    if not STREAMS:
        return Runner.run_sync(agent, QUESTION).final_output

    async def streamed():
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(streamed())


tell({"chat": chat, "responses": responses, "messages": messages, "agents-chat": agents, "agents-responses": agents}[WAY]())
