"""Agents that call gateways which are killed: each repeats a call that got no answer, as SDKs do, and keeps every answer."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import gateway_process
from acknowledged_writes import kill_points
from aiohttp import ClientError, ClientSession
from gateway_process import SECRET
from killable_process import KillableProcess, killable_process

from penstock.gateway.auth import GatewayTokens
from penstock.pool.base import Pool
from penstock.records import End
from penstock.testing import write_tokenizer

AGENTS, CONVERSATIONS, TURNS = 20, 2, 5
GATEWAY_PROCESS = Path(gateway_process.__file__)


class Address:
    """The URL of one gateway process, while it serves."""

    def __init__(self, gateways: KillableProcess) -> None:
        self._gateways = gateways
        self._url = ""
        self._serving = asyncio.Event()

    async def url(self) -> str:
        await self._serving.wait()
        return self._url

    async def start(self) -> None:
        await self._gateways.start()
        self._url = await self._gateways.read_line()
        self._serving.set()

    async def kill(self) -> None:
        self._serving.clear()
        await self._gateways.kill()


@dataclass
class Agents:
    """All agents, and the answers they received."""

    addresses: list[Address]
    http: ClientSession
    received: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """By rollout id: the text of each answer, by the answer's id."""
    ended: set[str] = field(default_factory=set[str])
    answered: asyncio.Condition = field(default_factory=asyncio.Condition)
    sent_again: int = 0
    _turn: "count[int]" = field(default_factory=count)

    @property
    def answers(self) -> int:
        return sum(map(len, self.received.values()))

    async def until(self, answers: int) -> None:
        async with self.answered:
            await self.answered.wait_for(lambda: self.answers >= answers)

    async def post(self, path: str, token: str, body: object) -> dict[str, object]:
        """Post to one gateway after another until one answers."""
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
        """Run rollouts one after another, each from its opening to its end."""
        control = GatewayTokens(SECRET).control
        for number in range(rollouts):
            opened = await self.post("/rollouts", control, {"rollout_id": f"{name}-{number}", "task_id": name})
            rollout_id, token = str(opened["rollout_id"]), str(opened["token"])
            self.received[rollout_id] = {}
            async with asyncio.TaskGroup() as conversations:
                for place in range(CONVERSATIONS):
                    conversations.create_task(self.converse(rollout_id, token, f"I am {name}, conversation {place}."))
            await self.post(f"/rollouts/{rollout_id}/grade", control, {"reward": 1.0})
            await self.post(f"/rollouts/{rollout_id}/end", control, {})
            self.ended.add(rollout_id)

    async def converse(self, rollout_id: str, token: str, first: str) -> None:
        messages: list[dict[str, object]] = [{"role": "user", "content": first}]
        for turn in range(TURNS):
            answer = await self.post("/v1/chat/completions", token, {"model": "any", "messages": messages})
            message = answer["choices"][0]["message"]  # type: ignore[index]
            messages += [message, {"role": "user", "content": f"Turn {turn}."}]
            async with self.answered:
                name = str(answer["id"]).removeprefix("chatcmpl-")
                assert name not in self.received[rollout_id], "one answer for two calls"
                self.received[rollout_id][name] = message["content"]
                self.answered.notify_all()

    async def check(self, pool: Pool, *, kills: int) -> None:
        """The pool holds one step for each answer and no other; steps are numbered without gaps; each rollout ended once."""
        lost = extra = 0
        for rollout_id, received in self.received.items():
            attempt = await pool.rollout(rollout_id)
            stored = {step.answer: step.message["content"] for step in attempt.steps}
            lost += sum(stored.get(name) != text for name, text in received.items())
            extra += len(attempt.steps) - len(received)
            assert [step.index for step in attempt.steps] == list(range(len(attempt.steps)))
            assert [node.id for node in attempt.nodes] == list(range(len(attempt.nodes)))
            assert [node.reason for node in attempt.nodes if node.reason] == []
            assert (attempt.end, len(attempt.grades)) == (End.COMPLETED, 1)
        print(
            f"{kills} kills; {self.answers} acknowledged steps of {len(self.received)} rollouts, {self.sent_again} repeated calls; "
            f"lost or changed {lost}, twice or not asked for {extra}"
        )
        assert (lost, extra, len(self.ended)) == (0, 0, len(self.received))


async def kill_gateways(folder: Path, pool: Pool, *, where: tuple[str, str], gateways: int, kills: int, answers: int) -> None:
    """Run agents until they have `answers` answers, kill the gateways `kills` times meanwhile, then check the pool."""
    model, (name, url) = write_tokenizer(folder / "model"), where
    async with AsyncExitStack() as stack:
        parents = [
            await stack.enter_async_context(killable_process(GATEWAY_PROCESS, model, name, folder, url)) for _ in range(gateways)
        ]
        addresses = [Address(parent) for parent in parents]
        for address in addresses:
            await address.start()
        agents = Agents(addresses, await stack.enter_async_context(ClientSession()))
        async with asyncio.timeout(800), asyncio.TaskGroup() as working:
            for number in range(AGENTS):
                working.create_task(agents.work(f"agent-{number}", -(-answers // (AGENTS * TURNS * CONVERSATIONS))))
            due = 0
            for number, more in enumerate(kill_points("kills of a gateway", kills, answers * 9 // 10)):
                due += more
                await agents.until(due)
                await addresses[number % gateways].kill()
                await addresses[number % gateways].start()
        await agents.check(pool, kills=kills)
