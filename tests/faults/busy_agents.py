"""Agents that talk to gateways which are killed: each sends again what was not answered, as SDKs do, and remembers every answer."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import gateway_life
from acknowledged import moments
from aiohttp import ClientError, ClientSession
from gateway_life import SECRET
from nursery import Nursery, nursery

from penstock.gateway.auth import Tokens
from penstock.pool.base import Pool
from penstock.records import End
from penstock.testing import write_tokenizer

AGENTS, TALKS, TURNS = 20, 2, 5
LIFE = Path(gateway_life.__file__)


class Address:
    """Where one gateway serves, if it lives."""

    def __init__(self, gateways: Nursery) -> None:
        self._gateways = gateways
        self._url = ""
        self._serving = asyncio.Event()

    async def url(self) -> str:
        await self._serving.wait()
        return self._url

    async def bear(self) -> None:
        await self._gateways.bear()
        self._url = await self._gateways.hear()
        self._serving.set()

    async def kill(self) -> None:
        self._serving.clear()
        await self._gateways.kill()


@dataclass
class Agents:
    """All of them, and what they were told."""

    addresses: list[Address]
    http: ClientSession
    told: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """Rollout → names of the answers that arrived, with their texts."""
    ended: set[str] = field(default_factory=set[str])
    answered: asyncio.Condition = field(default_factory=asyncio.Condition)
    sent_again: int = 0
    _turn: "count[int]" = field(default_factory=count)

    @property
    def answers(self) -> int:
        return sum(map(len, self.told.values()))

    async def until(self, answers: int) -> None:
        async with self.answered:
            await self.answered.wait_for(lambda: self.answers >= answers)

    async def post(self, path: str, token: str, body: object) -> dict[str, object]:
        """To one gateway after the other, until one has answered."""
        for attempt in count():
            address = self.addresses[next(self._turn) % len(self.addresses)]
            headers = {"authorization": f"Bearer {token}", "x-stainless-retry-count": str(attempt)}
            url = await address.url()
            try:
                async with self.http.post(url + path, json=body, headers=headers) as response:
                    answer = await response.json()
                    if response.status < 500:
                        assert response.status == 200, answer
                        return answer
            except (ClientError, ConnectionError):
                self.sent_again += 1
        raise AssertionError

    async def work(self, name: str, rollouts: int) -> None:
        """One rollout after the other, from its opening to its end."""
        control = Tokens(SECRET).control
        for number in range(rollouts):
            opened = await self.post("/rollouts", control, {"rollout_id": f"{name}-{number}", "task_id": name})
            rollout_id, token = str(opened["rollout_id"]), str(opened["token"])
            self.told[rollout_id] = {}
            async with asyncio.TaskGroup() as talks:
                for talk in range(TALKS):
                    talks.create_task(self.talk(rollout_id, token, f"I am {name}, talk {talk}."))
            await self.post(f"/rollouts/{rollout_id}/grade", control, {"reward": 1.0})
            await self.post(f"/rollouts/{rollout_id}/end", control, {})
            self.ended.add(rollout_id)

    async def talk(self, rollout_id: str, token: str, first: str) -> None:
        messages: list[dict[str, object]] = [{"role": "user", "content": first}]
        for turn in range(TURNS):
            answer = await self.post("/v1/chat/completions", token, {"model": "any", "messages": messages})
            message = answer["choices"][0]["message"]  # type: ignore[index]
            messages += [message, {"role": "user", "content": f"Turn {turn}."}]
            async with self.answered:
                name = str(answer["id"]).removeprefix("chatcmpl-")
                assert name not in self.told[rollout_id], "one answer for two calls"
                self.told[rollout_id][name] = message["content"]
                self.answered.notify_all()

    async def check(self, pool: Pool, *, kills: int) -> None:
        """One step for each answer that arrived and none besides, numbered without a gap, in rollouts that ended once."""
        lost = extra = 0
        for rollout_id, told in self.told.items():
            attempt = await pool.attempt(rollout_id)
            stored = {step.answer: step.message["content"] for step in attempt.steps}
            lost += sum(stored.get(name) != text for name, text in told.items())
            extra += len(attempt.steps) - len(told)
            assert [step.index for step in attempt.steps] == list(range(len(attempt.steps)))
            assert [node.id for node in attempt.nodes] == list(range(len(attempt.nodes)))
            assert [node.reason for node in attempt.nodes if node.reason] == []
            assert (attempt.end, len(attempt.grades)) == (End.COMPLETED, 1)
        print(
            f"{kills} kills; {self.answers} acknowledged steps of {len(self.told)} rollouts, {self.sent_again} calls sent again; "
            f"lost or changed {lost}, twice or not asked for {extra}"
        )
        assert (lost, extra, len(self.ended)) == (0, 0, len(self.told))


async def kill_gateways(folder: Path, pool: Pool, *, where: tuple[str, str], gateways: int, kills: int, answers: int) -> None:
    """Agents get so many answers from gateways which are killed so many times meanwhile, and then everything is looked at."""
    model, (name, url) = write_tokenizer(folder / "model"), where
    async with AsyncExitStack() as stack:
        parents = [
            await stack.enter_async_context(nursery(LIFE, model, name, folder, url, number, gateways)) for number in range(gateways)
        ]
        addresses = [Address(parent) for parent in parents]
        for address in addresses:
            await address.bear()
        agents = Agents(addresses, await stack.enter_async_context(ClientSession()))
        async with asyncio.timeout(800), asyncio.TaskGroup() as working:
            for number in range(AGENTS):
                working.create_task(agents.work(f"agent-{number}", -(-answers // (AGENTS * TURNS * TALKS))))
            due = 0
            for number, more in enumerate(moments("kills of a gateway", kills, answers * 9 // 10)):
                due += more
                await agents.until(due)
                await addresses[number % gateways].kill()
                await addresses[number % gateways].bear()
        await agents.check(pool, kills=kills)
