"""dspy: a typed output, by the API and adapter that `WAY` names; `native`: without litellm, as where an address is given."""

import os

import dspy
from person import MODEL, QUESTION, STREAMS, WAY, Person, tell


class Tell(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    person: Person = dspy.OutputField()


api, adapter = WAY.split("-")
vendor = "ANTHROPIC" if api == "messages" else "OPENAI"
address = {"api_base": os.environ[f"{vendor}_BASE_URL"], "api_key": os.environ[f"{vendor}_API_KEY"], "engine": "lm15"}
lm = dspy.LM(
    f"{vendor.lower()}/{MODEL}",
    model_type="responses" if api == "responses" else "chat",
    cache=False,
    **(address if adapter == "native" else {}),
)
dspy.configure(lm=lm, adapter=dspy.ChatAdapter() if adapter == "chat" else dspy.JSONAdapter())
found = (dspy.streamify(dspy.Predict(Tell), async_streaming=False) if STREAMS else dspy.Predict(Tell))(question=QUESTION)
for part in found if STREAMS else [found]:
    last = part
tell(last.person)
