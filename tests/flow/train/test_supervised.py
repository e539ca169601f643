"""Supervised warm start: from graded rollouts, token by token, and from a file of conversations, through the command too."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_algorithms_learn import make_policy, sample_groups
from typer.testing import CliRunner

from penstock.chat.renderer import Renderer
from penstock.cli.app import app
from penstock.config import TrainSection
from penstock.engines.embedded.decoder import load_decoder
from penstock.errors import ConfigError
from penstock.models.pull import resolve
from penstock.models.tiny import tiny_task
from penstock.records import Group
from penstock.train.supervised import Examples, SupervisedResult, conversations, good_rollouts, train_supervised

RUN = """
import sys
from penstock.cli.app import run
from penstock.train.supervised import train_supervised
train_supervised.__kwdefaults__["save_s"] = 0.0  # after each update
sys.exit(run(sys.argv[1:]))
"""


def conversation(a: int, b: int) -> dict[str, object]:
    call = f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    reported = {"role": "user", "content": f"<tool_response>\n{a * b}\n</tool_response>"}
    replies = ({"role": "assistant", "content": text} for text in (call, str(a * b)))
    return {"messages": [*tiny_task(a, b), next(replies), reported, next(replies)]}


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve("tiny").path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [json.dumps(conversation(a, b)) for a in (3, 4, 6, 7) for b in (5, 7, 8, 9)]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n\n")
    return tmp_path / "talks.jsonl"


def test_every_assistant_message_is_learnt_and_nothing_else(tiny: Path, file: Path):
    renderer = Renderer.load(tiny)
    [first, *rest] = conversations(file, renderer).conversations
    assert len(rest) == 15 and len(first) == 2
    texts = [renderer.tokenizer.core.decode([i for i, t in zip(s.token_ids, s.trained, strict=True) if t]) for s in first]
    assert '"a": 3' in texts[0] and texts[1].startswith("15")
    assert all(s.token_ids[-1] in renderer.stop_ids and s.trained[-1] for s in first)
    assert sum(s.weight * sum(s.trained) for s in first) == pytest.approx(1.0)  # a conversation weighs 1, however long


def test_good_rollouts_are_taken_as_they_were_sampled():
    groups = sample_groups(make_policy(0), 0)

    async def pages() -> AsyncIterator[list[Group]]:
        yield groups[:2]
        yield groups[2:]

    found = asyncio.run(good_rollouts(pages(), min_reward=1.0))
    good = [attempt for group in groups for attempt in group.rollouts if attempt.reward == 1.0]
    assert 0 < len(good) < 32 and [each[0].rollout_id for each in found.conversations] == [one.ref.id for one in good]
    assert found.left_out == {"reward below 1": 32 - len(good)}
    [only] = found.conversations[0]
    sampled = tuple(i for i, trained in zip(only.token_ids, only.trained, strict=True) if trained)
    assert sampled == tuple(i for step in good[0].steps for i in step.completion_ids) and set(only.advantages) == {0.0, 1.0}


def test_it_learns_and_writes_a_model_that_loads(tiny: Path, file: Path, tmp_path: Path):
    examples, reported = conversations(file, Renderer.load(tiny)), list[float]()
    control = train_supervised(
        *(tiny, tmp_path / "control", examples, TrainSection(lr=0.0)),
        **{"epochs": 4, "batch_size": 8, "seed": 0},
        on_update=lambda *_: None,
    )
    result = train_supervised(
        *(tiny, tmp_path / "warm", examples, TrainSection(lr=1e-3)),
        **{"epochs": 4, "batch_size": 8, "seed": 0},
        on_update=lambda done, total, loss: reported.append(loss),
    )
    assert (result.updates, len(reported)) == (8, 8)
    assert result.last_loss < 0.7 * result.first_loss and control.last_loss > 0.9 * control.first_loss
    load_decoder(tmp_path / "warm")
    with pytest.raises(ConfigError, match="already"):
        train_supervised(
            *(tiny, tmp_path / "warm", examples, TrainSection()), epochs=1, batch_size=8, seed=0, on_update=lambda *_: None
        )


@pytest.mark.parametrize("method", ["full", "lora"])
def test_stopped_training_continues_to_same_weights(tiny: Path, file: Path, tmp_path: Path, method: str):
    examples, reported = conversations(file, Renderer.load(tiny)), list[str]()
    section, done = TrainSection.model_validate({"method": method, "lr": 1e-3}), list[int]()

    def train(out: str, **more: Any) -> SupervisedResult:
        return train_supervised(
            *(tiny, tmp_path / out, examples, section),
            **{"epochs": 3, "batch_size": 8, "seed": 0, "tell": reported.append, **more},
            on_update=lambda number, total, loss: done.append(number),
        )

    whole = train("whole")
    first = train("parts", stopped=lambda: len(done) == 6 + 4)
    assert (first.updates, first.updates_left) == (4, 2) and not (tmp_path / "parts").exists()
    second = train("parts")
    assert (second.updates_before, second.updates, second.updates_left) == (4, 6, 0) and reported == ["going on after update 4"]
    assert (second.first_loss, second.last_loss) == (whole.first_loss, whole.last_loss)
    for name, weight in load_decoder(tmp_path / "whole").state_dict().items():
        assert torch.equal(weight, load_decoder(tmp_path / "parts").state_dict()[name]), name
    assert not (tmp_path / "parts.part").exists()


def test_another_training_does_not_continue_from_a_checkpoint(tiny: Path, file: Path, tmp_path: Path):
    examples, reported = conversations(file, Renderer.load(tiny)), list[str]()
    for lr, stop in ((1e-3, True), (2e-3, False)):
        result = train_supervised(
            *(tiny, tmp_path / "warm", examples, TrainSection(lr=lr)),
            **{"epochs": 1, "batch_size": 8, "seed": 0, "tell": reported.append, "stopped": lambda stop=stop: stop},
            on_update=lambda *_: None,
        )
    assert (result.updates_before, result.updates) == (0, 2)
    [text] = reported
    assert "are not used (000001: it belongs to another run)" in text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_is_taken_up_by_the_same_command(file: Path, tmp_path: Path, number: signal.Signals):
    out = tmp_path / "warm"
    command = [sys.executable, "-c", RUN, "sft", str(file), "--out", str(out), "--model", "tiny", "--epochs", "400", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not list(out.with_name("warm.part").glob("0*[0-9]/state.json")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130 and json.loads(said)["updates_left"] > 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "going on after update" not in (line := process.stderr.readline()):
            assert line, process.wait()
        process.kill()


def test_nothing_to_learn_from_is_one_line(tiny: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="conversation"):
        train_supervised(
            *(tiny, tmp_path / "out", Examples([], {}), TrainSection()), epochs=1, batch_size=8, seed=0, on_update=lambda *_: None
        )


@pytest.mark.parametrize("line", ["[]", '{"prompt": 1}', "{", '{"messages": [1]}'])
def test_a_line_that_is_no_conversation_is_named(tiny: Path, tmp_path: Path, line: str):
    (tmp_path / "bad.jsonl").write_text(f"{json.dumps(conversation(3, 5))}\n{line}\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        conversations(tmp_path / "bad.jsonl", Renderer.load(tiny))


def test_the_command_says_what_it_learnt(file: Path, tmp_path: Path):
    out = tmp_path / "warm"
    given = ["sft", str(file), "--out", str(out), "--model", "tiny", "--epochs", "2", "--lr", "1e-3", "--json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    reported = json.loads(done.stdout.splitlines()[-1])
    assert (
        reported["conversations"] == 16 and reported["last_loss"] < reported["first_loss"] and (out / "model.safetensors").exists()
    )
