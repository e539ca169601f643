"""Training runs killed with SIGKILL at random points: what is resumed equals what was never killed.

They are forked from a process that has imported everything (`forked_commands.py`): to start an interpreter thirty times is no part
of these tests.
"""

import asyncio
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
import torch
from forked_commands import KILLED, Answer, Commands, open_commands
from killable_process import times

from penstock.engines.embedded.decoder import Decoder, read_decoder_shape, save_decoder
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End
from penstock.testing import write_tokenizer

T = TypeVar("T")
HERE = Path(__file__).parent / "killed_run"
TINY = Path(__file__).parents[1] / "helpers" / "tiny_run"
STEPS, GROUPS, SIZE = 5, 2, 4

CONFIG = """
[run]
name = "{name}"
folder = "{folder}"
[model]
name = "{model}"
[agent]
entry = "{agent}"
[dataset]
train = "tasks.jsonl"
eval = "heldout.jsonl"
[rollout]
group_size = {size}
groups_per_step = {groups}
min_size = {min_size}
top_up = {top_up}
concurrency = 8
branches = {branches}
[sampling]
max_tokens = 16
[engine]
name = "scripted:open_engine"
[train]
steps = {steps}
lr = 1e-3
method = "{method}"
advantage = "{advantage}"
checkpoint_every = {every}
attack_grader = false
"""
ADVANTAGES = {"poisoned": "poisoned:grpo_but_for_one", "vine": "vine"}
"""By the first part of a run's name."""
POLICIES = """rank = 4
[policies.planner]
[policies.executor]
lr = 2e-3
[policies.judge]
frozen = true
"""


def make_model(folder: Path) -> Path:
    """A random network small enough to train in milliseconds, in an ordinary model folder."""
    write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(7)
    save_decoder(Decoder(read_decoder_shape(folder)), folder)
    return folder


class Home(NamedTuple):
    """A folder of runs, and the process that they are forked from."""

    path: Path
    commands: Commands

    def train(self, name: str, *, every: int = 1, kill_line: int | None = None) -> Answer:
        write_config(self.path, name, every=every)
        arguments = ["train", f"{name}.toml", "--json"]
        return self.commands.run(self.path, arguments, timeout_s=280, kill_line=kill_line, log=f"runs/{name}/events.jsonl")


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with open_commands() as opened:
        yield opened


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Home:
    folder = tmp_path_factory.mktemp("killed")
    make_model(folder / "model")
    rows = [{"prompt": f"Number {n}", "label": str(n)} for n in range(20)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    return Home(folder, commands)


def write_config(folder: Path, name: str, *, every: int) -> None:
    config = folder / f"{name}.toml"
    if config.exists():
        return
    agent = "flaky.py" if name.startswith("flaky") else "team.py" if name.startswith("team") else "agent.py"
    config.write_text(
        (CONFIG + (POLICIES if name.startswith("team") else "")).format(
            name=name,
            folder="runs",
            model=folder / "model",
            agent=HERE / agent,
            advantage=ADVANTAGES.get(name.partition("-")[0], "grpo"),
            branches=2 if name.startswith("vine") else 0,
            min_size=SIZE if name.startswith("flaky") else 0,
            top_up=2 if name == "flaky" else 0,
            size=SIZE,
            groups=GROUPS,
            steps=STEPS,
            every=every,
            method="lora" if name.startswith(("lora", "team")) else "full",
        )
    )


def finish(home: Home, name: str, *, every: int = 1) -> dict[str, object]:
    answer = home.train(name, every=every)
    assert answer.code == 0, (answer.out + answer.err)[-2000:]
    return json.loads(answer.out)


def kill_after(home: Home, name: str, lines: int, *, every: int = 1) -> bool:
    """Start or resume the run and kill it once it has reported `lines` more events; False where it ended before that."""
    log = home.path / "runs" / name / "events.jsonl"
    reported = log.read_bytes().count(b"\n") if log.exists() else 0
    return home.train(name, every=every, kill_line=reported + lines).code == KILLED


def weights(home: Home, name: str) -> str:
    """The digest of the newest weights: of all adapters, where there are several policies."""
    newest = max((home.path / "runs" / name / "checkpoints").glob("[0-9]*"))
    files = sorted(newest.rglob("adapter_model.safetensors")) or [newest / "model.safetensors"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def with_pool(folder: Path, name: str, read: Callable[[Pool], Awaitable[T]]) -> T:
    async def whole() -> T:
        pool = POOLS.load("sqlite")(folder / "runs" / name)
        try:
            return await read(pool)
        finally:
            await pool.close()

    return asyncio.run(whole())


async def ledger(pool: Pool) -> list[str]:
    return [group_id for group_id, _ in await pool.trained()]


async def ends(pool: Pool) -> Counter[str]:
    """How rollouts ended, each of them exactly once; one that was lost in training has a successor, one that completed none."""
    counted = Counter[str]()
    reported = Counter(change.id for change in await pool.changes(limit=1_000_000) if change.kind == "ended")
    for channel in await pool.channels():
        for group in await pool.groups(channel, limit=10_000):
            rollouts = {rollout.id: await pool.rollout(rollout.id) for rollout in await pool.rollout_refs(group.id)}
            for name, attempt in rollouts.items():
                assert attempt.end in End and reported.pop(name) == 1
                counted[attempt.end] += 1
                replaced = attempt.ref.successor.id in rollouts
                assert replaced or attempt.end is not End.LOST or channel == "val"
                assert not replaced or attempt.end is not End.COMPLETED
    assert reported == Counter()
    return counted


def check_run(home: Home, name: str) -> Counter[str]:
    """What was trained is what was acknowledged, once; every step is reported once; nothing is left without an end."""
    entries = [json.loads(line) for line in (home.path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    trained = [group_id for entry in entries for group_id in entry["group_ids"]]
    assert trained == with_pool(home.path, name, ledger)
    assert len(set(trained)) == STEPS * GROUPS
    stats = with_pool(home.path, name, lambda pool: pool.stats("train"))
    assert (stats.groups_leased, stats.groups_trained) == (0, STEPS * GROUPS)
    return with_pool(home.path, name, ends)


@pytest.fixture(scope="module")
def unkilled(home: Home) -> str:
    summary = finish(home, "unkilled")
    assert summary["exact_token_rate"] == 1.0
    return weights(home, "unkilled")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_runs_killed_at_random_points_end_with_the_same_weights(home: Home, unkilled: str) -> None:
    kills, counted, points = 0, Counter[str](), list[int]()
    for number in count():
        name, every, before = f"killed-{number}", 3 if number % 2 else 1, kills
        while kills < min(before + 3, times(30)):
            points.append(random.randrange(1, 90))
            if not kill_after(home, name, points[-1], every=every):
                break
            kills += 1
        summary = finish(home, name, every=every)
        # what weights sampled that a kill undid is too old to be trained, so that others are made in its place
        assert every > 1 or weights(home, name) == unkilled, f"killed after {points} events"
        assert (summary["steps"], summary["resumed"] or summary["already_finished"]) == (STEPS, True)
        counted += check_run(home, name)
        if kills == times(30):
            break
    print(f"{kills} kills of {number + 1} runs, after {points} events: rollouts {dict(counted)}; trained twice 0")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_adapter_runs_end_with_the_same_adapter(home: Home) -> None:
    finish(home, "lora")
    points = list[int]()
    for number in range(times(10)):
        name = f"lora-killed-{number}"
        points.append(random.randrange(20, 90))
        kill_after(home, name, points[-1])
        assert finish(home, name)["steps"] == STEPS
        assert weights(home, name) == weights(home, "lora"), f"killed after {points} events"
        check_run(home, name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_runs_of_several_policies_end_with_the_same_weights(home: Home) -> None:
    finish(home, "team")
    newest = max((home.path / "runs" / "team" / "checkpoints").glob("[0-9]*"))
    assert sorted(path.name for path in newest.iterdir()) == ["executor", "planner", "state.json"]
    check_run(home, "team")
    kills, points = 0, list[int]()
    for number in count():
        name, before = f"team-{number}", kills
        while kills < min(before + 3, times(15)):
            points.append(random.randrange(1, 90))
            if not kill_after(home, name, points[-1]):
                break
            kills += 1
        assert finish(home, name)["steps"] == STEPS
        assert weights(home, name) == weights(home, "team"), f"killed after {points} events"
        check_run(home, name)
        if kills == times(15):
            break
    print(f"{kills} kills of {number + 1} runs with three policies, after {points} events; trained twice 0")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_runs_killed_while_branching_end_with_the_same_weights(home: Home) -> None:
    finish(home, "vine")
    points = list[int]()
    for number in range(times(10)):
        name = f"vine-{number}"
        points += [random.randrange(30, 150), random.randrange(30, 150)]
        for lines in points[-2:]:
            kill_after(home, name, lines)
        assert finish(home, name)["steps"] == STEPS
        assert weights(home, name) == weights(home, "vine"), f"killed after {points} events"
        check_run(home, name)
        branches = with_pool(home.path, name, lambda pool: pool.groups("branch", limit=1000))
        assert len(branches) == STEPS * GROUPS * SIZE  # from the second of two calls of each rollout
        assert {attempt.end for group in branches for attempt in group.rollouts} == {End.COMPLETED}
        assert {step.replayed for group in branches for each in group.rollouts for step in each.steps if step.index == 0} == {True}


@pytest.mark.slow
def test_kill_between_checkpoints_trains_no_group_twice(home: Home) -> None:
    points = [random.randrange(30, 90) for _ in range(2)]
    killed = [kill_after(home, "sparse", lines, every=3) for lines in points]
    assert finish(home, "sparse", every=3)["steps"] == STEPS, f"killed {killed} after {points} events"
    check_run(home, "sparse")


@pytest.mark.slow
def test_a_run_killed_while_rollouts_fail_tops_up_every_group(home: Home) -> None:
    points = [random.randrange(40, 90)]
    killed = [kill_after(home, "flaky", lines) for lines in points]
    finish(home, "flaky")
    counted = check_run(home, "flaky")
    print(f"killed {killed} after {points} events: rollouts {dict(counted)}")
    groups = with_pool(home.path, "flaky", lambda pool: pool.groups("train"))
    assert [attempt.end for group in groups for attempt in group.rollouts] == [End.COMPLETED] * (STEPS * GROUPS * SIZE)
    assert counted[End.AGENT_ERROR] + counted[End.LOST] >= STEPS * GROUPS


@pytest.mark.slow
def test_killed_run_quarantines_a_crashing_group_once(home: Home) -> None:
    points = [random.randrange(20, 70) for _ in range(2)]
    killed = [kill_after(home, "poisoned", lines) for lines in points]
    summary = finish(home, "poisoned")
    assert summary["dropped"] == {"crashed the trainer": 1}, f"killed {killed} after {points} events"
    check_run(home, "poisoned")
    assert "train-3" not in with_pool(home.path, "poisoned", ledger)


@pytest.mark.slow
def test_run_without_complete_groups_ends_with_a_reason(home: Home) -> None:
    answer = home.train("flaky-for-ever")
    assert answer.code == 1
    assert re.search(r"4\d groups were dropped since the last step.*raise rollout.top_up", answer.err)


@pytest.mark.slow
@pytest.mark.soak
def test_killed_run_still_learns_and_trains_nothing_twice(tmp_path: Path, commands: Commands) -> None:
    steps, groups = 12, 4
    text = (TINY / "train.toml").read_text().replace("[agent]\n", "").replace('"tasks.jsonl"', f'"{TINY / "tasks.jsonl"}"')
    text = re.sub(r"(?m)^(steps|groups_per_step|checkpoint_every) = .*$", "", text)
    text = text.replace("[train]", f"[train]\nsteps = {steps}\ncheckpoint_every = 2").replace(
        "[rollout]", f"[rollout]\ngroups_per_step = {groups}"
    )
    text = text.replace("[run]", f'[agent]\nentry = "{TINY / "agent.py"}"\n[run]\nfolder = "{tmp_path / "runs"}"')
    (tmp_path / "tiny.toml").write_text(text)
    points, home = [random.randrange(50, 350) for _ in range(3)], Home(tmp_path, commands)
    killed = [kill_after(home, "tiny", lines) for lines in points]
    finish(home, "tiny")
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    rewards = [reward for line in lines for reward in json.loads(line)["rewards"]]
    first, last = sum(rewards[:64]) / 64, sum(rewards[-64:]) / 64
    trained = with_pool(tmp_path, "tiny", ledger)
    print(f"killed {killed} after {points} events; mean reward {first:.2f} -> {last:.2f}")
    assert len(trained) == len(set(trained)) == steps * groups
    assert last > first + 0.15, f"mean reward {first:.2f} -> {last:.2f}, killed {killed} after {points} events"
