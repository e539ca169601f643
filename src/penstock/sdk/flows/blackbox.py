"""BlackBoxAgentFlowBase: a flow whose agent only gets a `base_url`; the gateway records its calls."""

import asyncio
from abc import abstractmethod
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from penstock.errors import RequestError
from penstock.sdk.flows.base import AgentFlowBase
from penstock.sdk.samples import to_json_values

NOT_REGISTERED = frozenset({"raw_prompt", "multi_modal_data", "channel", "agent_name"})
"""Columns that are not registered with the rollout."""
PROMPT_UID = "1"
"""If the row names no group."""
CLEANUP_S = 4.0
"""For completing a rollout while it is being cancelled."""


class BlackBoxAgentFlowBase(AgentFlowBase):
    """Opens the rollout, runs the agent on its `base_url`, and completes it, also when the agent fails."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        channel = kwargs.pop("channel", None) or self.channel
        endpoint = await self._client.begin()
        base_url = _with_prompt_uid(endpoint.base_url, str(kwargs.get("uid") or PROMPT_UID))
        metadata: Any = to_json_values({name: value for name, value in kwargs.items() if name not in NOT_REGISTERED})
        await self._client.register(base_url, channel, metadata)
        try:
            steps = await self._run_agent(base_url, kwargs)
            reward = await self.final_reward(base_url, kwargs)
        except BaseException as error:
            await self._complete_failed(base_url, channel, error)
            raise
        await self._client.complete(base_url, channel, reward)
        return steps

    @abstractmethod
    async def _run_agent(self, base_url: str, kwargs: dict[str, Any]) -> int:
        """Runs the agent with `base_url` as its OpenAI endpoint, with any key. Returns how many turns it took."""

    async def final_reward(self, base_url: str, kwargs: dict[str, Any]) -> float | None:
        """Returns the reward of an agent that has returned; None leaves it to the grader."""
        return None

    async def _complete_failed(self, base_url: str, channel: str, error: BaseException) -> None:
        """Completes the rollout of an agent that failed or was cancelled; a failure here must not hide the agent's error."""
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self._client.complete(base_url, channel, None)
        except (RequestError, TimeoutError) as cause:
            error.add_note(f"besides, the rollout could not be completed: {cause}")


def _with_prompt_uid(base_url: str, prompt_uid: str) -> str:
    """Replaces the second path segment of `base_url`, which names the group."""
    url = urlsplit(base_url)
    first, _, *rest = [part for part in url.path.split("/") if part]
    path = "/".join([first, quote(prompt_uid, safe=""), *rest])
    return urlunsplit(url._replace(path=f"/{path}"))
