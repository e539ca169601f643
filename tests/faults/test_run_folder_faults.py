"""Every file of a run folder is damaged in every way, and every command is run on it: it continues, or refuses in one line.

Each case works on a copy of a run that has trained three steps. Replies are scripted, so a run that resumes must end with the
weights of one that nothing happened to.
"""

import hashlib
import json
import os
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked_commands import KILLED, Answer, Commands, open_commands
from test_train_kill import CONFIG, GROUPS, HERE, SIZE, ledger, make_model, with_pool

FULL = os.environ.get("PENSTOCK_FAULTS") == "full"
KILLS = 50 if FULL else 1
STEPS, MORE = 3, 5
NEWEST = "checkpoints/000003"

DAMAGES = ("missing", "empty", "truncated", "bit", "read-only", "of another run")
COMMANDS: dict[str, list[str]] = {
    "resume": ["train", "run.toml", "--set", f"train.steps={MORE}", "--json"],
    "train again": ["train", "run.toml", "--json"],
    "eval": ["eval", "run", "run.toml", "--model", f"runs/run/{NEWEST}", "--name", "checked", "--json"],
    "verify": ["verify", "runs/run", "--json"],
    "report": ["report", "runs/run"],
    "show": ["pool", "show", "runs/run", "--json"],
}


@dataclass(frozen=True)
class Case:
    base: str
    """`run`, which ended, or `killed`, whose pool has a write-ahead log."""
    file: str
    damage: str
    command: str

    def __str__(self) -> str:
        return f"{self.base}: {self.file} {self.damage}, {self.command}"


class Outcome(NamedTuple):
    """What a command does to an undamaged run."""

    answer: Answer
    weights: str
    """A digest of the newest checkpoint's, afterwards."""
    report: bytes


@dataclass(frozen=True)
class Runs:
    """The runs that are copied, and the process that runs commands."""

    folder: Path
    commands: Commands
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict[tuple[str, str], Outcome])

    def usual(self, base: str, command: str) -> Outcome:
        """The outcome of a command without damage."""
        if (base, command) not in self.outcomes:
            with copied(self, base) as project:
                answer = self.commands.run(project, COMMANDS[command])
                assert answer.code is not None and "Traceback" not in answer.err, answer
                report = (project / "runs/run/report.html").read_bytes()
                self.outcomes[base, command] = Outcome(answer, newest_weights(project), report)
        return self.outcomes[base, command]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("damaged")
    make_model(folder / "model")
    rows = [{"prompt": f"Number {n}", "label": str(n)} for n in range(20)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with open_commands() as commands:
        yield make_runs(folder, commands)


def make_runs(folder: Path, commands: Commands) -> Runs:
    for name in ("run", "other", *(["killed"] if FULL else [])):
        make_base(folder, name)
        assert commands.run(folder / name, COMMANDS["train again"]).code == 0
    if FULL:
        kill_in_step(folder / "killed", commands)
    return Runs(folder, commands)


def make_base(folder: Path, name: str) -> None:
    """A project whose run is called `run` like the others', but the order of its tasks may differ."""
    (folder / name).mkdir()
    text = CONFIG.format(
        name="run", folder="runs", model=folder / "model", agent=HERE / "agent.py", min_size=0, top_up=0, size=SIZE, groups=GROUPS,
        steps=STEPS, every=1, advantage="grpo", method="full", branches=0,
    )  # fmt: skip
    text = text.replace("tasks.jsonl", str(folder / "tasks.jsonl")).replace("heldout.jsonl", str(folder / "heldout.jsonl"))
    (folder / name / "run.toml").write_text(text.replace("[run]", f"[run]\nseed = {int(name == 'other')}"))


def kill_in_step(project: Path, commands: Commands) -> None:
    """Take a run up again and kill it when a few rollouts of its next step have ended."""
    lines = (project / "runs/run/events.jsonl").read_bytes().count(b"\n")
    assert commands.run(project, COMMANDS["resume"], kill_line=lines + 20).code == KILLED
    assert (project / "runs/run/pool.db-wal").stat().st_size > 0


@contextmanager
def copied(runs: Runs, base: str) -> Generator[Path]:
    copy = runs.folder / f"copy-{secrets.token_hex(4)}"
    shutil.copytree(runs.folder / base, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def newest_weights(project: Path) -> str:
    """A digest of the newest checkpoint's weights; empty without a checkpoint."""
    found = sorted(path for path in (project / "runs/run/checkpoints").glob("*") if path.name.isdecimal())
    newest = found[-1] if found else None
    return "" if newest is None else hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def inflict(damage: str, path: Path, other: Path, dice: random.Random) -> None:
    """Damage one file; of a folder, only what can happen to a folder."""
    if damage == "missing":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif damage == "read-only":
        path.chmod(0o555 if path.is_dir() else 0o444)
    elif path.is_dir():
        if damage == "empty":
            shutil.rmtree(path)
            path.mkdir()
        elif damage == "of another run":
            shutil.rmtree(path)
            shutil.copytree(other, path)
    else:
        content = bytearray(path.read_bytes())
        if damage == "empty":
            content.clear()
        elif damage == "truncated":
            del content[len(content) // 2 :]
        elif damage.startswith("bit") and content:
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        elif damage == "of another run":
            content[:] = other.read_bytes() if other.exists() else dice.randbytes(len(content))
        path.write_bytes(content)


def try_case(case: Case, runs: Runs, *, kill: bool = False) -> str:
    """Returns what became of it: `went on`, `refused`, or what is wrong."""
    dice = random.Random(str(case))
    with copied(runs, case.base) as project:
        run = project / "runs/run"
        inflict(case.damage, run / case.file, runs.folder / "other/runs/run" / case.file, dice)
        hit = hash_model(run / NEWEST)
        reported = ""
        if kill:
            seconds = runs.usual(case.base, case.command).answer.seconds
            reported = runs.commands.run(project, COMMANDS[case.command], kill_s=dice.uniform(0.02, seconds)).err
        answer = runs.commands.run(project, COMMANDS[case.command])
        return judge(case, runs, project, answer._replace(err=reported + answer.err), hit)


def hash_model(folder: Path) -> dict[str, str]:
    """The files of a checkpoint that an engine reads."""
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).exists()}


def judge(case: Case, runs: Runs, project: Path, answer: Answer, hit: dict[str, str]) -> str:
    if answer.code is None:
        return f"hung: {answer.err[-500:]}"
    if "Traceback" in answer.err or answer.code < 0:
        return f"crashed with {answer.code}: {answer.err[-1500:]}"
    usual = runs.usual(case.base, case.command).answer
    if answer.code != 0 and (refusal := is_refusal(answer)) is not None:
        return refusal
    if answer.code != usual.code and case.command != "verify":
        return f"exit code {answer.code} without a reason: {answer.out[-300:]} {answer.err[-300:]}"
    checks = {"resume": judge_training, "train again": judge_training, "eval": judge_eval, "verify": judge_verify}
    wrong = checks.get(case.command, judge_reading)(case, runs, project, answer, hit)
    return f"wrong: {wrong}" if wrong else "went on"


def is_refusal(answer: Answer) -> str | None:
    """`refused` where the command ended with one line and a reason; None where it ended otherwise."""
    last = (answer.err.strip().splitlines() or [""])[-1]
    if last.startswith('{"error":'):
        message = json.loads(last)["error"]["message"]
    elif last.startswith("penstock: "):
        message = last
    else:
        return None
    return "refused" if ";" in message or "has no" in message else f"refused without a remedy: {message}"


NUMBERS = ("steps", "first_reward", "last_reward", "eval_before", "eval_after", "sampled_tokens", "trained_tokens")


def judge_training(case: Case, runs: Runs, project: Path, answer: Answer, hit: dict[str, str]) -> str | None:
    usual = json.loads(runs.usual(case.base, case.command).answer.out)
    found, reported = json.loads(answer.out), "damaged" in answer.err
    if case.command == "train again" and not newest_weights(project):
        return None if found["checkpoint"] is None else "its checkpoint is not there"
    weights = runs.usual("run", case.command).weights
    if case.base == "run" and newest_weights(project) != weights:
        return "other weights"
    if case == Case("killed", case.file, case.damage, "resume") and newest_weights(project) != weights:
        # what the lost weights had begun to sample may be too old by then, and others are made in its place
        stats = with_pool(project, "run", lambda pool: pool.stats("train"))
        return None if stats.groups_stale else "other weights"
    if differing := {name: (usual[name], found[name]) for name in NUMBERS if usual[name] != found[name]}:
        return None if reported else f"other numbers, and nothing was said: {differing}"
    if case.command == "resume":
        trained = with_pool(project, "run", ledger)
        if len(trained) != MORE * GROUPS or len(set(trained)) != len(trained):
            return f"the ledger has {trained}"
    return None


def judge_eval(case: Case, runs: Runs, project: Path, answer: Answer, hit: dict[str, str]) -> str | None:
    if hit != hash_model(runs.folder / case.base / "runs/run" / NEWEST):
        return "a damaged checkpoint was evaluated"
    usual, found = (json.loads(each.out)["outcome"] for each in (runs.usual(case.base, case.command).answer, answer))
    return None if usual["ends"] == found["ends"] and usual["reward"] == found["reward"] else "other rewards"


def judge_verify(case: Case, runs: Runs, project: Path, answer: Answer, hit: dict[str, str]) -> str | None:
    usual, found = json.loads(runs.usual(case.base, case.command).answer.out), json.loads(answer.out)
    in_checkpoint = case.file.startswith("checkpoints/") and (project / "runs/run" / NEWEST).exists()
    if in_checkpoint and is_changed(case, runs, project) and not found["checkpoints_damaged"]:
        return "a damaged checkpoint was not named"
    if found["checkpoints_damaged"] or case.file.startswith("checkpoints"):
        return None if found["sampled_tokens"] == usual["sampled_tokens"] else "other tokens"
    return None if found == usual or is_shorter(case) else "another audit"


def is_changed(case: Case, runs: Runs, project: Path) -> bool:
    """False for a file of another run that is the same there, and for one that cannot be written to only."""
    file, before = project / "runs/run" / case.file, runs.folder / case.base / "runs/run" / case.file
    return case.damage != "read-only" and (not file.is_file() or file.read_bytes() != before.read_bytes())


def judge_reading(case: Case, runs: Runs, project: Path, answer: Answer, hit: dict[str, str]) -> str | None:
    if case.command == "report":
        page = (project / "runs/run/report.html").read_bytes()
        same = (
            is_shorter(case)
            or page == runs.usual(case.base, case.command).report
            or b"left out" in page
            or b"No transcripts: its pool.db is empty" in page
            or case.damage == "missing"
        )
        return None if same else "another page, and nothing was said"
    usual, found = (json.loads(each.out) for each in (runs.usual(case.base, case.command).answer, answer))
    return None if found == usual or is_shorter(case) else "other groups"


def is_shorter(case: Case) -> bool:
    """Whether the last transactions are gone: SQLite reads a log up to the first damage, as after a power cut."""
    return case.file.startswith("pool.db-") or (case.file, case.base) == ("pool.db", "killed")


FILES = (
    "config.json", "pool.db", "metrics.jsonl", "evals.json", "summary.json", "events.jsonl", "report.html", ".lock",
    ".checksums.json", "code.json", "scores/000003.jsonl", "task_rewards.json",
    *(f"{NEWEST}/{name}" for name in ("config.json", "model.safetensors", "optimizer.state", "state.json", "tokenizer.json",
                                      "tokenizer_config.json")),
)  # fmt: skip
SERVED = ("served/000002", "served/000003")
"""What an engine elsewhere read; made again by every process."""
FOLDERS = (".", "checkpoints", NEWEST)
KILLED_FILES = ("pool.db", "pool.db-wal", "pool.db-shm", f"{NEWEST}/state.json")


def test_the_matrix_has_every_file_of_a_run(runs: Runs) -> None:
    run = runs.folder / "run/runs/run"
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    known = {*FILES, *(name.replace("000003", "000002") for name in FILES if "000003" in name), "scores/000001.jsonl"}
    assert {name for name in found if not name.startswith(SERVED)} == known


def cases(damage: str) -> Iterator[Case]:
    """All cases of a damage; in `make test` those of every second file, by turns, and what once went wrong."""
    folders = FOLDERS if damage not in ("truncated", "bit") else ()
    for place, file in enumerate((*FILES, *folders), [*DAMAGES].index(damage)):
        if file == "." and damage != "read-only":
            continue
        telling = telling_command(file, damage)
        taken = [telling] if place % 2 == 0 or telling == "resume" or file == "." else []
        for command in COMMANDS if FULL else taken:
            yield Case("run", file, damage, command)
    for file in KILLED_FILES if FULL else ():
        for command in COMMANDS:
            yield Case("killed", file, damage, command)
    if FULL and damage == "bit":
        for number, command in enumerate([*COMMANDS] * 20):
            yield Case("run", "pool.db", f"bit {number}", command)


def telling_command(file: str, damage: str) -> str:
    """The quickest command that would go wrong, and `resume` for what once hung or went unseen."""
    if (file.rpartition("/")[2], damage) in (
        ("model.safetensors", "bit"), ("model.safetensors", "truncated"), ("optimizer.state", "missing"), ("state.json", "bit"),
        ("pool.db", "missing"), ("pool.db", "of another run"), ("metrics.jsonl", "bit"), ("evals.json", "missing"),
        ("task_rewards.json", "truncated"),
    ):  # fmt: skip
        return "resume"
    if file.startswith(NEWEST):
        return "verify" if file.endswith(("optimizer.state", "state.json")) else "eval"
    return "train again" if file in ("summary.json", ".lock", "events.jsonl", "checkpoints", ".") else "report"


@pytest.mark.slow
@pytest.mark.timeout(7200 if FULL else 300)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_run_resumes_or_is_rejected_in_one_line(damage: str, runs: Runs) -> None:
    check_all(list(cases(damage)), partial(try_case, runs=runs))


@pytest.mark.slow
@pytest.mark.timeout(7200 if FULL else 300)
def test_damaged_and_killed_run_resumes_or_is_rejected(runs: Runs) -> None:
    dice = random.Random(16)
    every = [case for damage in DAMAGES for file in FILES for case in [Case("run", file, damage, "resume")]]
    check_all(dice.sample(every, KILLS), partial(try_case, runs=runs, kill=True))


def check_all(wanted: list[Case], attempt: Any) -> None:
    started, ended, wrong = time.monotonic(), Counter[str](), list[str]()
    for case in wanted:
        became = attempt(case)
        ended[became if became in ("went on", "refused") else "wrong"] += 1
        if became not in ("went on", "refused"):
            wrong.append(f"{case}: {became}")
            print(wrong[-1], flush=True)
    print(f"{len(wanted)} cases in {time.monotonic() - started:.0f} s: {dict(ended)}")
    assert not wrong, "\n".join(wrong)
