"""Run folders for the dashboard's tests, made without a model, with hostile texts wherever an agent can write."""

import asyncio
import base64
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx

from penstock.chat.tokenizer import BYTE_OF
from penstock.config import RunConfig
from penstock.events import Events
from penstock.pool import POOLS
from penstock.records import End, Grade, Mark, Sampling, Task, make_rollout
from penstock.run.folder import RunFolder, locked, open_run_folder
from penstock.testing import make_node, make_step, write_tokenizer
from penstock.view.app import make_view_app
from penstock.view.sources import FolderSource

HOSTILE = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1> \u202eabc\u2066 ü\u2028 </pre>"
LONG = "x" * 1_000_000
HALF_CHARACTER = tuple(sorted(BYTE_OF).index(char) for byte in b"\xed\xa0\x80" for char in BYTE_OF if BYTE_OF[char] == byte)
"""Token ids whose bytes no text has."""
BROKEN = "\ud800"
"""Half a character. Records with it are refused, so it is only where other texts are kept."""
STEPS, GROUPS, SIZE = 3, 2, 4


class Screens:
    """Asks for screens of the runs below a folder."""

    def __init__(self, place: Path, **more) -> None:
        self.app = make_view_app(FolderSource(place), names=frozenset({"localhost"}), **more)

    def ask(self, path: str, *, headers=None, **params) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.get(path, params=params or None, headers=headers)

        return asyncio.run(send())

    def get(self, name: str, **params):
        answer = self.ask(f"/api/{name}", **params)
        assert answer.status_code == 200, answer.text
        return answer.json()


def make_run(
    root: Path,
    name: str = "run",
    *,
    pool: str = "sqlite",
    url: str = "",
    finished: bool = True,
    model: str = HOSTILE,
    train: dict | None = None,
    by_call: bool = False,
) -> Path:
    """A run of three steps with two groups of four: rewards 0, 1, 0, 1; one rollout failed, one call was not trainable.

    `train` are settings of `[train]`; with `by_call`, each call is graded on its own.
    """
    folder = make_folder(root, name, pool=pool, url=url, model=model, train=train)
    asyncio.run(_fill(folder, pool, url, by_call=by_call))
    write_files(folder)
    if finished:
        summary = {"name": name, "status": "finished", "steps": STEPS, "rollouts": STEPS * GROUPS * SIZE}
        folder.write_summary(json.dumps(summary).encode())
    return folder.path


def make_folder(
    root: Path, name: str, *, pool: str = "sqlite", url: str = "", model: str = HOSTILE, train: dict | None = None
) -> RunFolder:
    section = {"name": pool, **({"url": url} if url else {})}
    (root / "tasks.jsonl").write_text('{"prompt": "x"}\n')
    tree = {
        "run": {"name": name, "folder": str(root)},
        "model": {"name": model},
        "pool": section,
        "train": train or {},
        "dataset": {"train": str(root / "tasks.jsonl")},
    }
    folder = open_run_folder(RunConfig.model_validate(tree), fresh=False)
    write_tokenizer(folder.path / "checkpoints" / "000003")
    return folder


def write_files(folder: RunFolder) -> None:
    write_scores(folder.path)
    folder.add_evaluation("before-0", 0.2)
    folder.add_evaluation("during-2", 0.6)
    for rollout, note in (("train-0.1.1", HOSTILE), ("train-2.0.1", f"{BROKEN} {HOSTILE} {LONG}")):
        (folder.path / "artifacts" / rollout).mkdir(parents=True)
        verdict = json.dumps({"score": 0.0, "explanation": note})
        (folder.path / "artifacts" / rollout / "verdict.json").write_text(verdict)


async def _fill(folder: RunFolder, kind: str, url: str, *, by_call: bool) -> None:
    pool = POOLS.load(kind)(folder.path, url=url)
    with Events(folder.events) as events:
        await _add_steps(pool, events, folder, by_call=by_call)
        events.emit("run.end", summary={})
    await pool.close()


async def _add_steps(pool, events: Events, folder: RunFolder, *, by_call: bool = False) -> None:
    events.emit("run.start", name="run")
    for step in range(1, STEPS + 1):
        events.emit("step.start", step=step, version=step - 1)
        names = [f"train-{(step - 1) * GROUPS + at}" for at in range(GROUPS)]
        for at, group in enumerate(names):
            await add_group(pool, events, group, (step - 1) * GROUPS + at, version=step - 1, by_call=by_call)
        lease = await pool.claim(GROUPS, version=step - 1, max_staleness=0, lease_s=60)
        events.emit("train.start", step=step, groups=GROUPS)
        await pool.ack(lease.id, step)
        events.emit("policy.publish", version=step, seconds=0.01)
        folder.add_metrics(metrics(step, names))
        events.emit("train.step", step=step)
    await add_group(pool, events, "train-6", 6, version=3)  # complete, and waits
    events.emit("rollout.forged", rollout_id="train-0.0.1", text=HOSTILE)
    events.emit("gateway.notice", name=f"ignored:{HOSTILE}")


@contextmanager
def going_run(root: Path, name: str, *, model: str = HOSTILE) -> Iterator[subprocess.Popen]:
    """A run in its own process, which holds its lock and its pool, in the middle of a group. Each line that it received is a
    further step; killed, it leaves what a crash leaves."""
    folder = make_folder(root, name, model=model)
    with subprocess.Popen([sys.executable, __file__, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


async def _go_on(folder: RunFolder) -> None:
    pool = POOLS.load("sqlite")(folder.path)
    with locked(folder.path), Events(folder.events) as events:
        await _add_steps(pool, events, folder)
        write_files(folder)
        await add_group(pool, events, "train-7", 7, version=3, ended=1)
        print("ready", flush=True)
        step = STEPS
        while await asyncio.to_thread(sys.stdin.readline):
            step += 1
            folder.add_metrics(metrics(step, []))


async def add_group(
    pool,
    events,
    group: str,
    seq: int,
    *,
    version: int,
    channel: str = "train",
    size: int = SIZE,
    good=None,
    by_call: bool = False,
    ended: int = SIZE,
) -> None:
    """Adds a group whose first rollouts have `ended`."""
    text = f"{seq} {HOSTILE}{LONG if seq == 2 else ''}"
    task = Task(id=f"task-{seq}", prompt=({"role": "user", "content": text},), label=HOSTILE)
    rollouts = [make_rollout(group, task.id, place, channel=channel) for place in range(size)]
    await pool.open_group(task, rollouts, seq=seq)
    for place, rollout in enumerate(rollouts):
        events.emit("rollout.start", rollout_id=rollout.id, group_id=group, channel=channel, task_id=task.id)
        await add_calls(pool, rollout.id, task, place, version=version)
        if place >= ended:
            continue
        events.emit("rollout.grade", rollout_id=rollout.id)
        failed = group == "train-0" and place == 3
        reward = good[place] if good else float(place % 2)
        steps = (0, 1) if by_call else (None,)
        source = f"grader {HOSTILE}"
        grades = [] if failed else [Grade(rollout_id=rollout.id, reward=reward, source=source, step=step) for step in steps]
        await pool.end(
            rollout.id, End.AGENT_ERROR if failed else End.COMPLETED, f"boom {BROKEN} {HOSTILE}" if failed else "", grades
        )
        events.emit(
            "rollout.end", rollout_id=rollout.id, group_id=group, channel=channel, end="completed", message="", reward=reward
        )
        if group == "train-1" and place == 0:
            await pool.mark(Mark(rollout_id=rollout.id, step=1, trainable=False, note=HOSTILE))


async def add_calls(pool, rollout_id: str, task: Task, place: int, *, version: int) -> None:
    """Two calls and a third that was rendered again."""
    tool = {"type": "function", "function": {"name": HOSTILE, "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": json.dumps({"a": HOSTILE})}}
    first = make_node(rollout_id, 0, (1, 2, 3), messages=task.prompt, tools=(tool,))
    result = {"role": "tool", "tool_call_id": "1", "content": LONG if rollout_id == "train-2.0.1" else HOSTILE}
    second = make_node(rollout_id, 1, (4,), parent=0, messages=(result,))
    edited = {"role": "user", "content": "start again"}
    third = make_node(rollout_id, 2, (9,), messages=(edited,), reason="history_edited")
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": f"answer {place} {HOSTILE}"},
    ]
    for index, (node, message) in enumerate(
        zip((first, second, third), (*said, {"role": "assistant", "content": "third"}), strict=True)
    ):
        ids = (5, 6 + place % 2) if index < 2 else HALF_CHARACTER if rollout_id == "train-4.0.1" else (8,)
        step = make_step(
            rollout_id,
            index,
            ids,
            node=node.id,
            versions=(version,) * len(ids),
            sampling=Sampling(temperature=0.0 if index == 2 else 1.0),
            message=message,
            messages_digest=f"d{index}",
            seconds=0.25,
            created=1_790_000_000.0 + index,
        )
        await pool.append(step, node)


def metrics(step: int, names: list[str]) -> dict:
    return {
        "step": step,
        "steps": STEPS,
        "version": step,
        "reward": 0.5,
        "rewards": [0.0, 1.0] * 4,
        "groups": GROUPS,
        "group_ids": names,
        "groups_equal": 0,
        "groups_stale": 0,
        "rollouts": GROUPS * SIZE,
        "ends": {"completed": 8},
        "masked": {"greedy": 8, HOSTILE: 1},
        "breaks": {"history_edited": 8},
        "inexact": {},
        "exact_tokens": 40,
        "sampled_tokens": 40,
        "unhashed_tokens": 40,
        "loss": 0.1,
        "exact_token_rate": 1.0,
        "entropy": 1.0 / step,
        "kl_behaviour": 0.001,
        "logprob_gap": 1e-6,
        "staleness": 0.0,
        "staleness_max": 0,
        "trained_tokens": 32,
        "rollout_s": 1.0,
        "train_s": 0.5,
        "grad_norm": 1.0,
        "tokens_per_s": 10.0,
        "ratio": 1.0,
    }


def write_scores(folder: Path, **more) -> None:
    """What the trainer recorded of step 1: four trained tokens of one rollout. An earlier penstock did not record their calls."""
    halves = base64.b64encode(struct.pack("<4e", 0.25, -0.5, 0.125, 0.0)).decode()
    line = {"rollout_id": "train-0.1.1", "gap": halves, "entropy": halves, "advantages": [[4, 1.5]], **more}
    (folder / "scores").mkdir(exist_ok=True)
    (folder / "scores" / "000001.jsonl").write_text(json.dumps(line) + "\n")


def make_evaluation(root: Path, name: str, rewards: dict[int, list[float]], *, model: str = "tiny") -> Path:
    """An evaluation: by row, the rewards of its two attempts."""
    (root / "tasks.jsonl").write_text('{"prompt": "x"}\n')
    tree = {
        "run": {"name": name, "folder": str(root)},
        "model": {"name": model},
        "dataset": {"train": str(root / "tasks.jsonl")},
        "eval": {"samples": 2, "k": [1, 2]},
    }
    folder = open_run_folder(RunConfig.model_validate(tree), fresh=False)

    async def fill() -> None:
        pool = POOLS.load("sqlite")(folder.path)
        with Events(folder.events) as events:
            events.emit("eval.begin", model="tiny")
            for row, values in rewards.items():
                await add_group(pool, events, f"eval-{row}", row, version=0, channel="eval", size=2, good=values)
            events.emit("gateway.stop", counts={"finish:length": 2, f"ignored:{HOSTILE}": 1})
        await pool.close()

    asyncio.run(fill())
    estimate = {"value": 0.5, "low": 0.0, "high": 1.0}
    folder.write_summary(
        json.dumps(
            {
                "status": "finished",
                "outcome": {
                    "tasks": len(rewards),
                    "samples": 2,
                    "reward": estimate,
                    "passes": {"1": estimate},
                    "components": {HOSTILE: estimate},
                },
            }
        ).encode()
    )
    return folder.path


if __name__ == "__main__":
    asyncio.run(_go_on(RunFolder(Path(sys.argv[1]), resumed=True)))
