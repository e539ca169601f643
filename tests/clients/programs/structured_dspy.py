"""dspy: a signature with a typed output, by the adapter that `WAY` names."""

import dspy
from person import MODEL, QUESTION, STREAMS, WAY, Person, tell


class Tell(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    person: Person = dspy.OutputField()


adapters = {"json": dspy.JSONAdapter, "chat": dspy.ChatAdapter}
dspy.configure(lm=dspy.LM(f"openai/{MODEL}", cache=False), adapter=adapters[WAY]())
found = (dspy.streamify(dspy.Predict(Tell), async_streaming=False) if STREAMS else dspy.Predict(Tell))(question=QUESTION)
for part in found if STREAMS else [found]:
    last = part
tell(last.person)
