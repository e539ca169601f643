"""Harbor's LiteLLM client, as its agents use it: a chat of text, with the tokens that it collects for training."""

import asyncio
import json
import os

from conversation import DIALECT, MODEL, QUESTIONS
from harbor.llms.chat import Chat
from harbor.llms.lite_llm import LiteLLM


async def main():
    address = {"api_base": os.environ["OPENAI_BASE_URL"]} if DIALECT != "messages" else {}
    model = LiteLLM(
        f"{'anthropic' if DIALECT == 'messages' else 'openai'}/{MODEL}",
        session_id="trial-1",
        collect_rollout_details=DIALECT == "chat",
        use_responses_api=DIALECT == "responses",
        **address,
    )
    chat = Chat(model)
    for question in QUESTIONS:
        print((await chat.chat(question)).content)
    print(json.dumps(chat.rollout_details))


asyncio.run(main())
