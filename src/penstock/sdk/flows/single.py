"""The simplest flow: the row's prompt gets one reply, which is its one step."""

from typing import Any

from penstock.sdk.flows.base import AgentFlowBase
from penstock.sdk.flows.messages import prompt_of
from penstock.sdk.flows.step import SubmittedStep


class SingleStepSingleTurnAgentFlow(AgentFlowBase):
    """Built in as `single_step_single_turn_agent`; the grader gives the reward."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        """See `AgentFlowBase.run`."""
        reply = await self._reply({"messages": prompt_of(kwargs), **sampling_params})
        step = SubmittedStep(
            prompt_ids=reply.prompt_ids,
            response_ids=reply.response_ids,
            trajectory_uid=kwargs["trajectory_uid"],
            prompt_uid=kwargs["prompt_uid"],
            is_last=True,
        )
        await self.gateway_submit_steps([step], channel=kwargs.get("channel"))
        return 1
