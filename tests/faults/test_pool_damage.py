"""A closed database file is hit: bytes flipped, ends cut off. It is never read wrongly, and `verify` names what was hit."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PoolError
from penstock.pool.base import Pool
from penstock.pool.check import PoolFinding
from penstock.pool.sqlite import SqlitePool, check_file
from penstock.records import End, Grade, Mark, Task, make_rollout
from penstock.testing import make_node, make_step

FULL = os.environ.get("PENSTOCK_FAULTS") == "full"
HITS = 1000 if FULL else 50
BATCH = 50
GROUPS, SIZE, STEPS = 8, 3, 4


async def fill(pool: Pool) -> None:
    """Groups of every state, in two channels, with rollouts that ended in several ways and some that run."""
    for seq in range(GROUPS):
        channel = "val" if seq == 5 else "train"
        task = Task(id=f"t{seq}", prompt=({"role": "user", "content": f"What is {seq} times 7?"},), label=str(seq * 7))
        rollouts = [make_rollout(f"{channel}-{seq}", task.id, place, channel=channel) for place in range(SIZE)]
        await pool.open_group(task, rollouts, seq=seq)
        for rollout in rollouts:
            await play(pool, rollout.id, seq)
        if seq == 2:
            lost = make_rollout("train-2", task.id, 0)
            await pool.end(lost.id, End.TIMEOUT, "took longer than 60 s")
            await play(pool, (await pool.replace(lost, "try again")).id, seq)
        for rollout in rollouts if seq < 6 else rollouts[1:]:
            name = f"{rollout.group_id}.{rollout.place}.{2 if seq == 2 and rollout.place == 0 else 1}"
            end = End.COMPLETED if rollout.place else End.AGENT_ERROR
            await pool.end(name, end, "" if rollout.place else f"ValueError: {name} could not continue")
        if seq < 2:
            lease = await pool.claim(1, version=seq, max_staleness=9, lease_s=1e6)
            assert lease is not None
            await pool.ack(lease.id, seq + 1)
    await pool.drop("train-4", "looked odd")
    assert await pool.claim(1, version=2, max_staleness=9, lease_s=1e6)


async def play(pool: Pool, rollout_id: str, seq: int) -> None:
    """A conversation of a few turns, graded and marked."""
    dice = random.Random(rollout_id)
    for index in range(STEPS):
        ids = tuple(dice.randrange(50_000) for _ in range(dice.randrange(1, 90)))
        node = make_node(
            rollout_id,
            index,
            ids,
            parent=index - 1 if index else None,
            messages_digest=f"n{index}",
            messages=({"role": "user", "content": f"{rollout_id} asks {index}"},),
            reason="history_edited" if index == 3 else None,
        )
        step = make_step(
            rollout_id,
            index,
            ids[::-1],
            logprobs=tuple(-dice.random() for _ in ids),
            versions=(seq,) * len(ids),
            message={"role": "assistant", "content": f"{rollout_id} says {index}"},
            messages_digest=f"s{index}",
        )
        await pool.append(step, node)
    await pool.grade(Grade(rollout_id=rollout_id, reward=dice.random(), source="grader"))
    await pool.mark(Mark(rollout_id=rollout_id, step=1, quality=0.5, note=f"of {rollout_id}"))


async def read(folder: Path, names: list[str]) -> dict[str, Any]:
    """All that a pool reports, each thing alone; None where it was refused."""
    seen: dict[str, Any] = {}

    async def ask(name: str, answer: Any) -> None:
        try:
            seen[name] = repr(await answer)
        except PoolError:
            seen[name] = None

    try:
        pool = await asyncio.to_thread(SqlitePool, folder)
    except PoolError:
        return {}
    try:
        for name in names:
            await ask(f"attempt {name}", pool.rollout(name))
            await ask(f"task {name}", pool.task(name))
        for channel in ("train", "val"):
            await ask(f"stats {channel}", pool.stats(channel))
            for seq in range(GROUPS):
                await ask(f"group {channel}-{seq}", one_group(pool, f"{channel}-{seq}", seq))
        await ask("trained", pool.trained())
    finally:
        await pool.close()
    return seen


async def one_group(pool: Pool, name: str, seq: int) -> Any:
    """A group out of its channel's list, where it is in it."""
    groups = await pool.groups(name.split("-")[0], first_seq=seq, limit=1)
    if [group.id for group in groups] != [name]:
        raise PoolError(f"{name} is not listed")
    return groups


def hit(whole: bytes, dice: random.Random) -> tuple[str, bytes]:
    """The file with a byte changed, a run of bytes overwritten, a page zeroed, or its end cut off."""
    at = dice.randrange(len(whole))
    kind = dice.choices(["bit", "byte", "run", "page", "cut"], [50, 20, 10, 10, 10])[0]
    damaged = bytearray(whole)
    if kind == "bit":
        damaged[at] ^= 1 << dice.randrange(8)
    elif kind == "byte":
        damaged[at] ^= dice.randrange(1, 256)
    elif kind == "run":
        damaged[at : at + 64] = dice.randbytes(len(damaged[at : at + 64]))
    elif kind == "page":
        start = at // 8192 * 8192
        damaged[start : start + 8192] = bytes(8192)
    else:
        del damaged[at:]
    return kind, bytes(damaged)


def names_in(original: dict[str, Any]) -> list[str]:
    return sorted(name.removeprefix("attempt ") for name in original if name.startswith("attempt "))


def try_hits(folder: Path, first: int, count: int) -> None:
    """In its own process: hit the file again and again, and print what became of each."""
    whole, original = (folder / "whole.db").read_bytes(), json.loads((folder / "original.json").read_text())
    for number in range(first, first + count):
        kind, damaged = hit(whole, random.Random(number))
        place = folder / str(number)
        place.mkdir()
        (place / "pool.db").write_bytes(damaged)
        found = check_file(place / "pool.db", lambda done, total: None).findings
        seen = asyncio.run(read(place, names_in(original)))
        refused = [name for name in original if seen.get(name) is None]
        changed = [name for name in original if seen.get(name) is not None and seen[name] != original[name]]
        wrong = [name for name in changed if not name.startswith("stats")]
        reported = {"number": number, "kind": kind, "findings": len(found), "refused": len(refused), "wrong": wrong}
        unnamed = [name for name in refused + changed if not is_named(name, found)]
        print(json.dumps({**reported, "unnamed": unnamed, "first": found[:3]}), flush=True)
        for file in place.iterdir():
            file.unlink()
        place.rmdir()


def is_named(name: str, found: list[PoolFinding]) -> bool:
    """Whether what was hit is among the findings: by its rollout or group, or as a fault of the whole file."""
    kind, _, what = name.partition(" ")
    if kind in ("stats", "trained"):
        return bool(found)
    group = what if kind == "group" else what.rsplit(".", 2)[0]
    reported = [finding.table == "file" or what in finding.id or what in finding.what for finding in found]
    whole = [kind != "attempt" and group in f"{finding.id} {finding.what}" for finding in found]
    return any(reported) or any(whole)


@pytest.fixture(scope="module")
def pool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed pool, and what it reports."""

    async def write(folder: Path) -> dict[str, Any]:
        pool = SqlitePool(folder)
        await fill(pool)
        rollouts = [
            rollout.id for seq in range(GROUPS) for rollout in await pool.rollout_refs(f"{'val' if seq == 5 else 'train'}-{seq}")
        ]
        await pool.close()
        return await read(folder, rollouts)

    folder = tmp_path_factory.mktemp("damage")
    original = asyncio.run(write(folder))
    original = {name: reported for name, reported in original.items() if reported is not None}
    assert sum(name.startswith("attempt") for name in original) == GROUPS * SIZE + 1
    assert sum(name.startswith("group") for name in original) == GROUPS
    (folder / "original.json").write_text(json.dumps(original))
    (folder / "pool.db").rename(folder / "whole.db")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_damaged_file_is_never_misread_and_verify_names_the_damage(pool_folder: Path) -> None:
    assert check_file(pool_folder / "whole.db", lambda done, total: None).findings == []
    hits: list[dict[str, Any]] = []
    for first in range(0, HITS, BATCH):
        command = [sys.executable, __file__, str(pool_folder), str(first), str(min(BATCH, HITS - first))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        hits += [json.loads(line) for line in done.stdout.splitlines()]
    kinds, refused = Counter(one["kind"] for one in hits), sum(one["refused"] > 0 for one in hits)
    wrong, unnamed = [one for one in hits if one["wrong"]], [one for one in hits if one["unnamed"]]
    found = sum(one["findings"] > 0 for one in hits)
    print(f"{len(hits)} hits {dict(kinds)}: {found} named by verify, {refused} refused a read,")
    print(f"{len(wrong)} read wrongly, {len(unnamed)} left unnamed, 0 crashes")
    assert (len(hits), wrong, unnamed) == (HITS, [], [])


if __name__ == "__main__":
    try_hits(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
