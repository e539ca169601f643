"""LangChain's `with_structured_output`: `WAY` is the API and the method, such as `chat-json_schema`."""

from person import MODEL, QUESTION, STREAMS, WAY, Person, tell

API, _, METHOD = WAY.partition("-")

if API == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, max_tokens=512)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, use_responses_api=API == "responses")
asked = model.with_structured_output(Person, method=METHOD)
question = f"{QUESTION} Answer with JSON."
found = list(asked.stream(question))[-1] if STREAMS else asked.invoke(question)
tell(found)
