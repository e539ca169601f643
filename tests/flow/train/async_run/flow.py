"""A flow that says nothing of sampling in one call, and hands on what it was given in the other."""

from typing import Any

from penstock_compat.flow import AgentFlowBase, SubmittedStep, register


@register("asks")
class Asks(AgentFlowBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        uid, group = kwargs["trajectory_uid"], kwargs["prompt_uid"]
        text, ids, prompt = await self.gateway_generate(uid, group, [{"role": "user", "content": "?"}])
        again = await self.gateway_generate(prompt_ids=[*prompt, *ids], sampling_params=sampling_params)
        first = SubmittedStep(prompt_ids=prompt, response_ids=ids, trajectory_uid=uid, prompt_uid=group, step_index=0)
        last = SubmittedStep(
            prompt_ids=[*prompt, *ids],
            response_ids=again["token_ids"],
            trajectory_uid=uid,
            prompt_uid=group,
            step_index=1,
            reward=float(text.endswith("0")),
            is_last=True,
        )
        await self.gateway_submit_steps([first, last], channel=kwargs.get("channel", "train"))
        return 2
