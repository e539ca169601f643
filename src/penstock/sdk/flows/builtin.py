"""The simplest flow: the row's prompt gets one reply, which is its one step."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.records import Message
from penstock.sdk.flows import tools as offers
from penstock.sdk.flows.base import AgentFlowBase, GeneratedReply, prompt_messages, row_columns
from penstock.sdk.flows.config import MAX_TURNS
from penstock.sdk.flows.step import SubmittedStep


class SingleStepSingleTurnAgentFlow(AgentFlowBase):
    """Built in as `single_step_single_turn_agent`; the grader gives the reward."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        reply = await self._reply({"messages": prompt_messages(kwargs), **sampling_params})
        step = SubmittedStep(
            prompt_ids=reply.prompt_ids,
            response_ids=reply.response_ids,
            trajectory_uid=kwargs["trajectory_uid"],
            prompt_uid=kwargs["prompt_uid"],
            is_last=True,
        )
        await self.gateway_submit_steps([step], channel=kwargs.get("channel"))
        return 1


CHECK_PROMPT = "Check each part of your answer. Then answer once more, with the result alone on the last line, after ####."


class MultiStepAgentFlow(AgentFlowBase):
    """Built in as `multi_step_agent`. With tools, it runs them until a reply calls none; without, the model answers twice.

    The reward comes from the run's grader, asked through the gateway, and stands on the last step.
    """

    tools: Mapping[str, Callable[..., Any]] = {}
    """By the name that the model calls them by; a subclass sets its own."""

    def is_terminal(self, text: str) -> bool:
        """Whether a reply is the last one: it calls no tool."""
        return offers.TOOL_CALL_OPENING not in text

    async def execute_tool(self, text: str) -> str:
        """Run the tools that a reply calls, each as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; their results.

        A call that cannot be run gives a text that says why, for the model to read.
        """
        return await offers.run_tool_calls(text, self.tools)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        messages, turn = prompt_messages(kwargs), 0
        offered = {"tools": offers.tool_schemas(self.tools)} if self.tools else {}
        while True:
            reply = await self._reply({"messages": messages, **offered, **sampling_params})
            messages.append({"role": "assistant", "content": reply.text})
            turn += 1
            more = await self._more(reply.text, turn)
            reward = None if more else await self._judged(messages, kwargs)
            await self._submit(reply, turn - 1, reward=reward, kwargs=kwargs)
            if more is None:
                return turn
            messages.append(more)

    async def _more(self, text: str, turn: int) -> Message | None:
        """What is said after the reply of a turn; None where it was the last."""
        if not self.tools:
            return {"role": "user", "content": CHECK_PROMPT} if turn == 1 else None
        if self.is_terminal(text) or turn >= self._max_turns:
            return None
        return {"role": "tool", "content": await self.execute_tool(text)}

    async def _judged(self, messages: list[Message], kwargs: dict[str, Any]) -> float:
        fields = row_columns(kwargs)
        return await self.gateway_compute_reward(trajectory_uid=kwargs["trajectory_uid"], messages=messages, dataset_fields=fields)

    async def _submit(self, reply: GeneratedReply, index: int, *, reward: float | None, kwargs: dict[str, Any]) -> None:
        step = SubmittedStep(
            prompt_ids=reply.prompt_ids,
            response_ids=reply.response_ids,
            reward=reward,
            trajectory_uid=kwargs["trajectory_uid"],
            prompt_uid=kwargs["prompt_uid"],
            step_index=index,
            is_last=reward is not None,
        )
        await self.gateway_submit_steps([step], channel=kwargs.get("channel"))

    @property
    def _max_turns(self) -> int:
        rollout = self.config.get("actor_rollout_ref", {}).get("rollout", {})
        return int(rollout.get("max_turns") or MAX_TURNS)
