"""BlackBoxAgentFlowBase: a flow whose agent only knows a `base_url`; the gateway records its calls as they come."""

import asyncio
from abc import abstractmethod
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from penstock.errors import RequestError
from penstock.sdk.flows.base import AgentFlowBase
from penstock.sdk.samples import to_json_values

NOT_REGISTERED = frozenset({"raw_prompt", "multi_modal_data", "channel", "agent_name"})
"""Of the row: what is not registered with the rollout."""
PROMPT_UID = "1"
"""Where nothing says which group it is."""
CLEANUP_S = 4.0
"""For saying that a rollout is over while it is being stopped."""


class BlackBoxAgentFlowBase(AgentFlowBase):
    """Opens the rollout, runs the agent on its `base_url`, and completes it, also when the agent fails."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        channel = kwargs.pop("channel", None) or self.channel
        begun = await self._client.begin()
        base_url = _with_prompt(begun.base_url, str(kwargs.get("uid") or PROMPT_UID))
        metadata: Any = to_json_values({name: value for name, value in kwargs.items() if name not in NOT_REGISTERED})
        await self._client.register(base_url, channel, metadata)
        try:
            steps = await self._run_agent(base_url, kwargs)
            reward = await self.final_reward(base_url, kwargs)
        except BaseException as error:
            await self._give_up(base_url, channel, error)
            raise
        await self._client.complete(base_url, channel, reward)
        return steps

    @abstractmethod
    async def _run_agent(self, base_url: str, kwargs: dict[str, Any]) -> int:
        """Run the agent with `base_url` as its OpenAI endpoint, whatever key it sends; how many turns it took."""

    async def final_reward(self, base_url: str, kwargs: dict[str, Any]) -> float | None:
        """The verdict on an agent that has returned; None leaves it to the grader."""
        return None

    async def _give_up(self, base_url: str, channel: str, error: BaseException) -> None:
        """Complete the rollout of an agent that failed, or was stopped; that this may fail too must not hide why."""
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self._client.complete(base_url, channel, None)
        except (RequestError, TimeoutError) as cause:
            error.add_note(f"besides, the rollout could not be completed: {cause}")


def _with_prompt(base_url: str, prompt_uid: str) -> str:
    """`base_url` with its second segment, which names the group, replaced."""
    url = urlsplit(base_url)
    first, _, *rest = [part for part in url.path.split("/") if part]
    path = "/".join([first, quote(prompt_uid, safe=""), *rest])
    return urlunsplit(url._replace(path=f"/{path}"))
