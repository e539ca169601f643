"""What one pool exports, another takes in: every rollout reads the same, whatever pool it came from or goes to."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from pool_cases import TASK, claim, complete, finish, make_node, make_step, must_claim, open_groups, open_one, places

from penstock.errors import ConfigError, PoolConflict
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.export.atif import file_name, trajectories
from penstock.pool.export.histories import (
    GroupHistory,
    TransferCounts,
    escape,
    export_pool,
    import_pool,
    iterate_groups,
    iterate_histories,
    unescape,
)
from penstock.records import End, Grade, Mark, Sampling, Task, make_rollout

LOSSLESS = ["jsonl", "parquet"]
CHANNELS = ["adhoc", "train", "val"]


def quiet(_: int) -> None:
    pass


async def fill(pool: Pool) -> None:
    """Trained, complete, replaced and running rollouts, and values that are easily lost."""
    await complete(pool, 0, 1)
    await pool.ack((await must_claim(pool)).id, 3)
    await open_groups(pool, first=2)
    [first, second] = places(2)
    await pool.append(make_step(first.id), make_node(first.id))
    await pool.replace(first, "the process died")
    await pool.append(make_step(first.successor.id, full_logprobs=None), make_node(first.successor.id))
    second_node = make_node(second.id, 1, parent=0, tools=({"name": "add"},), reason="history_edited", token_ids=())
    await pool.append(make_step(second.id), make_node(second.id))
    await pool.append(
        make_step(second.id, 1, version=5, message={"content": "né 🙂", "tool_calls": [{"x": [1, None]}]}), second_node
    )
    await pool.append(
        make_step(second.id, 2, node=1, policy="planner", completion_ids=(), logprobs=(), full_logprobs=(), versions=()), None
    )
    await pool.grade(Grade(rollout_id=second.id, reward=0.1 + 0.2, source="grader", transcript="main", step=1))
    await pool.mark(Mark(rollout_id=second.id, step=1, trainable=False, quality=0.3, note="looks wrong"))
    await pool.end(second.id, End.AGENT_ERROR, "a lone \ud800 surrogate, and \0")
    one = make_rollout("a/b c", "odd", 0, channel="adhoc")
    await pool.open_group(replace(TASK, id="odd", metadata=None, label=None), [replace(one, id="chosen by a client")], seq=None)
    await pool.open_group(TASK, places(7, 1, "val"), seq=7)


async def moved(source: Pool, target: Pool, path: Path, name: str) -> TransferCounts:
    wrote = await export_pool(source, path, name=name, channels=await source.channels(), progress=quiet)
    assert await import_pool(path, target, progress=quiet) == wrote
    return wrote


async def everything(pool: Pool) -> list[GroupHistory]:
    return [history async for history in iterate_histories(pool, await pool.channels())]


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("kind", list(POOLS))
def test_a_pool_that_was_exported_and_imported_is_the_same(kind: str, name: str, tmp_path: Path) -> None:
    async def act() -> None:
        source, target = (open_one(kind, tmp_path / f"{name}-{kind}-{end}") for end in ("source", "target"))
        await fill(source)
        wrote = await moved(source, target, tmp_path / "out", name)
        assert wrote == TransferCounts(groups=5, rollouts=9, steps=9)
        assert await everything(target) == await everything(source)
        assert [history.trained for history in await everything(target)] == [None, 3, None, None, None]
        assert await target.trained() == [("train-0", 3)]
        assert (await target.stats("train")).groups_leased == 0
        await source.close()
        await target.close()

    asyncio.run(act())


@pytest.mark.parametrize("kind", list(POOLS))
def test_replaced_rollouts_and_all_channels_are_listed(kind: str, tmp_path: Path) -> None:
    async def act() -> None:
        pool = open_one(kind, tmp_path)
        await fill(pool)
        assert await pool.channels() == CHANNELS
        assert [rollout.id for rollout in await pool.rollout_refs("train-2")] == ["train-2.0.1", "train-2.0.2", "train-2.1.1"]
        assert await pool.rollout_refs("nobody") == []
        await pool.close()

    asyncio.run(act())


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_pool_moves_from_memory_to_a_file(name: str, tmp_path: Path) -> None:
    async def act() -> None:
        source, target = open_one("memory", tmp_path), open_one("sqlite", tmp_path / "target")
        await fill(source)
        await moved(source, target, tmp_path / "out", name)
        assert await everything(target) == await everything(source)
        await target.close()

    asyncio.run(act())


@pytest.mark.parametrize("name", LOSSLESS)
def test_import_that_was_interrupted_continues_and_second_one_adds_nothing(name: str, tmp_path: Path) -> None:
    def stop(groups: int) -> None:
        if groups == 2:
            raise KeyboardInterrupt

    async def act() -> None:
        source, target = open_one("memory", tmp_path), open_one("memory", tmp_path)
        await fill(source)
        await export_pool(source, tmp_path / "out", name=name, channels=await source.channels(), progress=quiet)
        with pytest.raises(KeyboardInterrupt):
            await import_pool(tmp_path / "out", target, progress=stop)
        assert (await target.stats()).groups == 2
        assert (await import_pool(tmp_path / "out", target, progress=quiet)).known == 2
        assert (await import_pool(tmp_path / "out", target, progress=quiet)).known == 7
        assert await everything(target) == await everything(source)

    asyncio.run(act())


def test_a_half_imported_rollout_gets_its_missing_steps(tmp_path: Path) -> None:
    async def act() -> None:
        source, target = open_one("memory", tmp_path), open_one("memory", tmp_path)
        await fill(source)
        await open_groups(target, first=2)
        await target.append(make_step("train-2.1.1"), make_node("train-2.1.1"))
        await moved(source, target, tmp_path / "out", "jsonl")
        assert await everything(target) == await everything(source)

    asyncio.run(act())


def test_import_over_other_rollouts_of_same_name_is_rejected(tmp_path: Path) -> None:
    async def act() -> None:
        source, target, asked = (open_one("memory", tmp_path) for _ in range(3))
        await complete(source, 0)
        await complete(target, 0, version=4)
        await asked.open_group(replace(TASK, label="43"), places(0), seq=0)
        with pytest.raises(PoolConflict, match=r"train-0\.[01]\.1"):
            await moved(source, target, tmp_path / "out", "jsonl")
        with pytest.raises(PoolConflict, match="task"):
            await import_pool(tmp_path / "out", asked, progress=quiet)

    asyncio.run(act())


def test_import_leaves_complete_groups_of_target_to_its_trainer(tmp_path: Path) -> None:
    async def act() -> None:
        source, target = open_one("memory", tmp_path), open_one("memory", tmp_path)
        await complete(source, 5)
        await source.ack((await must_claim(source)).id, 1)
        await complete(target, 0, 1)
        await moved(source, target, tmp_path / "out", "jsonl")
        assert [group.id for group in (await must_claim(target, 2)).groups] == ["train-0", "train-1"]
        assert await claim(target) is None

    asyncio.run(act())


@pytest.mark.parametrize("name", [*LOSSLESS, "atif"])
def test_failed_export_leaves_nothing_and_existing_files_stay(name: str, tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise KeyboardInterrupt

    async def act(progress: Callable[[int], None]) -> None:
        pool = open_one("memory", tmp_path)
        await fill(pool)
        await export_pool(pool, tmp_path / "out", name=name, channels=CHANNELS, progress=progress)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(act(fail))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match="already"):
        asyncio.run(act(quiet))
    assert (tmp_path / "out").read_text() == "mine"


def cut_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def drop_last_lines(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-3]))


def change_head(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"penstock_pool":1', b'"penstock_pool":9'))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [(cut_line, "line 15 cannot be read"), (drop_last_lines, "cut short"), (change_head, "newer"), (empty, "not an export")],
)
def test_a_damaged_export_is_refused_in_one_line(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    async def act() -> None:
        pool = open_one("memory", tmp_path)
        await fill(pool)
        await export_pool(pool, tmp_path / "out.jsonl", name="jsonl", channels=CHANNELS, progress=quiet)
        damage(tmp_path / "out.jsonl")
        with pytest.raises(ConfigError, match=said):
            await import_pool(tmp_path / "out.jsonl", open_one("memory", tmp_path), progress=quiet)

    asyncio.run(act())


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    async def act() -> None:
        pool = open_one("memory", tmp_path)
        with pytest.raises(ConfigError, match="file"):
            await import_pool(tmp_path / "absent", pool, progress=quiet)
        with pytest.raises(ConfigError, match="ATIF"):
            await import_pool(tmp_path, pool, progress=quiet)
        (tmp_path / "groups.parquet").write_bytes(b"PAR1 no")
        with pytest.raises(ConfigError, match=r"groups\.parquet"):
            await import_pool(tmp_path, pool, progress=quiet)

    asyncio.run(act())


def test_groups_that_share_a_number_are_all_read(tmp_path: Path) -> None:
    async def act() -> None:
        pool = open_one("memory", tmp_path)
        for name in range(40):
            rollout = make_rollout(f"g{name:02}", TASK.id, 0)
            await pool.open_group(TASK, [rollout], seq=name // 20)
        assert [group.id async for group in iterate_groups(pool, "train")] == [f"g{name:02}" for name in range(40)]
        assert [group.id async for group in iterate_groups(pool, "train", first_seq=1)] == [f"g{name:02}" for name in range(20, 40)]

    asyncio.run(act())


def test_text_with_lone_surrogates_survives() -> None:
    for text in ("", "plain", "né", "\ud800", "a\udfffb", "\0", "\0x"):
        assert unescape(escape(text)) == text
        escape(text).encode()


# ATIF


async def talk(pool: Pool) -> None:
    """One rollout of two turns with a tool between them, and a call that was tried again."""
    [rollout] = places(0, 1)
    task = Task(id=TASK.id, prompt=({"role": "user", "content": "6 · 7?"},), label="42")
    await pool.open_group(task, [rollout], seq=0)
    asked = ({"role": "system", "content": "Use tools."}, *task.prompt)
    root = make_node(rollout.id, messages=asked, tools=({"name": "multiply"},), token_ids=(1, 2))
    call = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}}
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    await pool.append(make_step(rollout.id, 0, message=said, completion_ids=(3, 4, 5), created=1.0), root)
    await pool.append(make_step(rollout.id, 1, node=0), None)
    reported = make_node(
        rollout.id, 1, parent=0, messages=({"role": "tool", "tool_call_id": "c1", "content": "42"},), token_ids=(6,)
    )
    await pool.append(make_step(rollout.id, 2, node=1, sampling=Sampling()), reported)
    await pool.grade(Grade(rollout_id=rollout.id, reward=1.0, source="grader"))
    await pool.end(rollout.id, End.COMPLETED)


def test_a_rollout_becomes_a_trajectory_with_its_tokens_in_place(tmp_path: Path) -> None:
    async def act() -> None:
        pool = open_one("memory", tmp_path)
        await talk(pool)
        await export_pool(pool, tmp_path / "out", name="atif", channels=["train"], progress=quiet)

    asyncio.run(act())
    found = json.loads((tmp_path / "out" / "train-0.0.1.json").read_text())
    assert (found["schema_version"], found["session_id"], found["agent"]["name"]) == ("ATIF-v1.4", "train-0.0.1", "main")
    assert [(step["step_id"], step["source"], step["message"]) for step in found["steps"]] == [
        (1, "system", "Use tools."),
        (2, "user", "6 · 7?"),
        (3, "agent", ""),
        (4, "agent", "42"),
    ]
    called, answered = found["steps"][2:]
    assert called["tool_calls"] == [{"tool_call_id": "c1", "function_name": "multiply", "arguments": {"a": 6}}]
    assert called["observation"] == {"results": [{"source_call_id": "c1", "content": "42"}]}
    assert (called["reasoning_content"], called["timestamp"]) == ("hm", "1970-01-01T00:00:01+00:00")
    assert answered["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5, 6]
    assert answered["metrics"]["completion_token_ids"] == [7, 8, 9]
    assert answered["metrics"]["logprobs"] == [-0.5, -1.0, -0.25]
    assert found["final_metrics"] == {"total_prompt_tokens": 8, "total_completion_tokens": 6, "total_steps": 4}
    about = found["extra"]["penstock"]
    assert (about["reward"], about["end"], about["label"], about["calls_left_out"]) == (1.0, "completed", "42", 1)


def test_rollouts_of_any_kind_become_trajectories(tmp_path: Path) -> None:
    async def act() -> None:
        pool = open_one("memory", tmp_path)
        await fill(pool)
        [rollout] = places(9, 1)
        await pool.open_group(TASK, [rollout], seq=9)
        await pool.append(make_step(rollout.id, transcript="../planner"), make_node(rollout.id))
        await finish_second(pool, rollout.id)
        await export_pool(pool, tmp_path / "out", name="atif", channels=CHANNELS, progress=quiet)

    async def finish_second(pool: Pool, rollout_id: str) -> None:
        await pool.append(make_step(rollout_id, 1, transcript="executor"), make_node(rollout_id, 1))

    asyncio.run(act())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"chosen by a client.json", "train-9.0.1-..%2Fplanner.json", "train-9.0.1-executor.json", "val-7.0.1.json"} < names
    assert len(names) == 9 + 2


def test_no_name_leads_out_of_the_folder() -> None:
    odd = ["../up", "/etc/passwd", ".", "..", "x" * 5000, "\ud800", "a\0b", "ä" * 300]
    names = [file_name(name) for name in odd]
    assert len(set(names)) == len(odd)
    assert all(len(name.encode()) < 255 and "/" not in name and not name.startswith(".") for name in names)


def test_a_tool_call_whose_arguments_are_no_object_is_kept(tmp_path: Path) -> None:
    async def act() -> None:
        pool = open_one("memory", tmp_path)
        await open_groups(pool, size=1)
        calls = [{"id": "1", "function": {"name": "f", "arguments": text}} for text in ("{broken", "[1]", '{"a": 1}')]
        said = {"role": "assistant", "content": [{"type": "text", "text": "so"}, {"type": "image_url"}], "tool_calls": calls}
        await pool.append(make_step("train-0.0.1", message=said), make_node("train-0.0.1"))
        [made] = trajectories(TASK, await pool.rollout("train-0.0.1")).values()
        step = made["steps"][-1]
        assert step["message"] == "so[image_url]"
        assert [call["arguments"] for call in step["tool_calls"]] == [{"unparsed": "{broken"}, {"value": [1]}, {"a": 1}]

    asyncio.run(act())


def test_a_finished_group_can_be_claimed_after_an_import(tmp_path: Path) -> None:
    async def act() -> None:
        source, target = open_one("memory", tmp_path), open_one("sqlite", tmp_path / "target")
        await open_groups(source)
        for rollout in places(0):
            await finish(source, rollout, version=2)
        await moved(source, target, tmp_path / "out", "parquet")
        assert (await must_claim(target)).groups == tuple(await source.groups("train"))
        await target.close()

    asyncio.run(act())


def test_parquet_files_from_before_policies_are_read(tmp_path: Path) -> None:
    async def act() -> None:
        source, target, out = open_one("memory", tmp_path), open_one("memory", tmp_path), tmp_path / "out"
        await complete(source, 0)
        await export_pool(source, out, name="parquet", channels=["train"], progress=quiet)
        steps = parquet.read_table(out / "steps.parquet")
        parquet.write_table(steps.drop_columns("policy"), out / "steps.parquet")
        await import_pool(out, target, progress=quiet)
        assert await target.groups("train") == await source.groups("train")

    asyncio.run(act())
