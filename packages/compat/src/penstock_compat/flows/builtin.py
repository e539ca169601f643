"""The built-in flows: one reply to the row's prompt, and several turns with or without tools."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.records import Message
from penstock_compat.flows import tools as flow_tools
from penstock_compat.flows.base import AgentFlowBase, GeneratedReply, prompt_messages, row_columns
from penstock_compat.flows.config import MAX_TURNS
from penstock_compat.flows.step import SubmittedStep

IDS = ("trajectory_uid", "prompt_uid")


class SingleStepSingleTurnAgentFlow(AgentFlowBase):
    """`single_step_single_turn_agent`: one reply, which is the one step. The grader gives the reward."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        kwargs = self.with_ids(kwargs)
        ids = {name: kwargs[name] for name in IDS}
        reply = await self._reply({"messages": prompt_messages(kwargs), **ids, **sampling_params})
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
    """`multi_step_agent`. With tools, it runs them until a reply calls none; without, the model answers twice.

    The reward is the run's grader's, computed through the gateway; it is the last step's.
    """

    tools: Mapping[str, Callable[..., Any]] = {}
    """By the name that the model uses; a subclass sets its own."""

    def is_terminal(self, text: str) -> bool:
        """Returns whether a reply is the last one: it calls no tool."""
        return flow_tools.TOOL_CALL_OPENING not in text

    async def execute_tool(self, text: str) -> str:
        """Runs the tools that a reply calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; returns their results.

        A call that cannot be run gives a text that says why, for the model.
        """
        return await flow_tools.run_tool_calls(text, self.tools)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        kwargs = self.with_ids(kwargs)
        messages, turn = prompt_messages(kwargs), 0
        tools = {"tools": flow_tools.tool_schemas(self.tools)} if self.tools else {}
        request = {**tools, **{name: kwargs[name] for name in IDS}, **sampling_params}
        while True:
            reply = await self._reply({"messages": messages, **request})
            messages.append({"role": "assistant", "content": reply.text})
            turn += 1
            next_message = await self._next_message(reply.text, turn)
            reward = None if next_message else await self._compute_reward(messages, kwargs)
            await self._submit(reply, turn - 1, reward=reward, kwargs=kwargs)
            if next_message is None:
                return turn
            messages.append(next_message)

    async def _next_message(self, text: str, turn: int) -> Message | None:
        """Returns the message after a reply, or None if the reply was the last."""
        if not self.tools:
            return {"role": "user", "content": CHECK_PROMPT} if turn == 1 else None
        if self.is_terminal(text) or turn >= self._max_turns:
            return None
        return {"role": "tool", "content": await self.execute_tool(text)}

    async def _compute_reward(self, messages: list[Message], kwargs: dict[str, Any]) -> float:
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
