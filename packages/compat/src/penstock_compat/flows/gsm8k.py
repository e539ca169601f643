"""GSM8K as a black box: an agent with an OpenAI endpoint and a tool to check its answer, and the flow that trains it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from penstock_compat.flows.base import BlackBoxAgentFlowBase

MAX_TURNS = 3
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "check_answer",
        "description": "Hand in the number that you think is the answer, before you give the final answer.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}
RIGHT = "That is right. Give it as your final answer: #### <number>"
WRONG = "That is wrong. Look for the mistake and try again; give your final answer as #### <number>"
NOTED = "Noted. Give your final answer as #### <number>"
UNREADABLE = "The call has no answer; call check_answer with a number."

_WRITTEN = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class AnswerCall(NamedTuple):
    """A call of `check_answer`, from `tool_calls` or from the text of the reply."""

    id: str
    answer: str | None
    """None if the call has no readable answer."""


class GSM8KAgent:
    """Asks the question, answers calls of `check_answer`, and stops at the first turn without one, or after `max_turns`.

    With `truth`, the tool says whether an answer is right; without, only that it was noted.
    """

    def __init__(self, base_url: str, *, truth: str | None = None, max_turns: int = MAX_TURNS, api_key: str = "not-needed") -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._truth = truth
        self._max_turns = max_turns

    async def solve(self, question: str) -> int:
        """Works on one question; returns the number of turns."""
        messages: list[Any] = [{"role": "user", "content": question}]
        tools: list[Any] = [TOOL]
        connections = DefaultAsyncHttpxClient(trust_env=False, verify=self._base_url.startswith("https:"))
        async with AsyncOpenAI(base_url=self._base_url, api_key=self._api_key, http_client=connections) as client:
            for turn in range(1, self._max_turns + 1):
                answer = await client.chat.completions.create(model="default", messages=messages, tools=tools)
                reply = answer.choices[0].message.model_dump(exclude_none=True)
                calls = answer_calls(reply)
                if not calls:
                    return turn
                messages.append(reply)
                messages += [{"role": "tool", "tool_call_id": call.id, "content": self._checked(call)} for call in calls]
        return self._max_turns

    def _checked(self, call: AnswerCall) -> str:
        if call.answer is None:
            return UNREADABLE
        if self._truth is None:
            return NOTED
        return RIGHT if _number(call.answer) == _number(self._truth) else WRONG


class BlackBoxGSM8KAgentFlow(BlackBoxAgentFlowBase):
    """Runs the agent on a row of GSM8K. In validation, its tool does not know the answer, so as to measure the policy alone.

    The flow returns no reward, so the grader judges the whole conversation by its last `#### <number>`.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        self._validates = "val" in (kwargs.get("channel"), self.channel)
        return await super().run(sampling_params, **kwargs)

    async def _run_agent(self, base_url: str, kwargs: dict[str, Any]) -> int:
        truth = None if self._validates else _truth(kwargs.get("reward_model"))
        agent = GSM8KAgent(base_url, truth=truth, max_turns=self._max_turns())
        return await agent.solve(last_question(kwargs["raw_prompt"]))

    def _max_turns(self) -> int:
        """Returns `actor_rollout_ref.rollout.max_turns` of the config, or the default."""
        found: Any = self.config
        for name in ("actor_rollout_ref", "rollout", "max_turns"):
            found = getattr(found, name, None)
        return int(found) if found else MAX_TURNS


def last_question(prompt: Any) -> str:
    """Returns the last user message in a list of messages; a plain text is returned as it is."""
    if isinstance(prompt, str):
        return prompt
    asked = [message["content"] for message in cast("Sequence[Mapping[str, Any]]", prompt) if message.get("role") == "user"]
    if not asked:
        raise ValueError("the row's prompt has no message of the user; add one with the question")
    return str(asked[-1])


def answer_calls(reply: Mapping[str, Any]) -> list[AnswerCall]:
    """Returns the calls in `tool_calls` or, if the endpoint did not parse any, those in the text."""
    if made := reply.get("tool_calls"):
        return [AnswerCall(call["id"], _answer(call["function"]["arguments"])) for call in made]
    written = _WRITTEN.findall(reply.get("content") or "")
    return [AnswerCall(f"call_{place}", _answer(text)) for place, text in enumerate(written)]


def _answer(text: str) -> str | None:
    """Returns the answer in a call; `text` is the JSON of its arguments, or of the whole call."""
    try:
        found: Any = json.loads(text)
        found = found.get("arguments", found)
        found = (json.loads(found) if isinstance(found, str) else found).get("answer")
    except (ValueError, AttributeError, RecursionError):
        return None
    return str(found) if isinstance(found, str | int | float) and not isinstance(found, bool) else None


def _truth(model: Any) -> str | None:
    truth = cast("Mapping[str, Any]", model).get("ground_truth") if isinstance(model, Mapping) else None
    return None if truth is None else str(truth)


def _number(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip()
