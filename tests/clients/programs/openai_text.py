"""The `openai` package, Chat Completions without tools."""

from conversation import INSTRUCTIONS, MODEL, QUESTIONS
from openai import OpenAI

messages = [{"role": "system", "content": INSTRUCTIONS}]
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    reply = OpenAI().chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": reply})
    print(reply)
