"""`penstock verify`: a run whose tokens are exact is reported with numbers; one changed number is found, named and not trained."""

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_cases import SHAPE, make_decoder, section
from verify_cases import TASK, add_group, alter, make_run

from penstock.cli import app as edge
from penstock.cli.verify import as_object
from penstock.codec import context_digest
from penstock.config import EngineSection, load_config
from penstock.engines.embedded.engine import open_engine
from penstock.engines.token_sets import pack_set, unpack_sets
from penstock.pool.rows import PictureStore
from penstock.pool.sqlite import SqlitePool
from penstock.records import End, Group, Node, PlacedPicture, PolicyVersion, Sampling, Step, make_rollout
from penstock.run.inputs import read_inputs
from penstock.run.recorded_run import open_recorded_run
from penstock.train.checkpoints import save
from penstock.train.learner import Learner
from penstock.train.sequences import sequences
from penstock.train.trainer import train
from penstock.train.verify import TOLERANCES, verify


def silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = edge.run(["verify", *map(str, arguments)])
    reported = capsys.readouterr()
    return code, reported.out, reported.err


def found(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> dict[str, Any]:
    code, out, _ = command(capsys, run, "--json", *arguments)
    result = json.loads(out)
    assert code == (0 if result["status"] == "exact" else 1)
    return result


def named(result: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(finding["rollout_id"], finding["step"], finding["reason"]) for finding in result["findings"]]


def test_exact_run_is_recomputed_under_every_version_and_found_exact(capsys, run):
    result = found(capsys, run)
    assert (result["status"], result["exact_token_rate"], result["findings"]) == ("exact", 1.0, [])
    assert (result["groups"], result["rollouts"], result["steps"], result["unhashed_tokens"]) == (3, 12, 36, 0)
    assert set(result["recomputed"]) == {"0", "1"} and result["recomputed_tokens"] == result["sampled_tokens"] > 150
    assert 0 < result["mean_deviation"] <= result["largest_deviation"] < 1e-4
    assert result["largest_at"]["rollout_id"].startswith("train-")
    assert result["masked"] == {"greedy": 9} and result["breaks"] == {} and result["gone"] == {}


@pytest.mark.slow
def test_run_through_the_gateway_is_exact(capsys, tmp_path):
    settings = [f'run.folder="{tmp_path}"', "train.steps=2", "train.checkpoint_every=1", "rollout.groups_per_step=2"]
    config = load_config(Path(__file__).parents[2] / "helpers/tiny_run/train.toml", settings)
    asyncio.run(train(config, read_inputs(config, silent), listener=silent, stop=asyncio.Event()))
    result = found(capsys, tmp_path / "tiny")
    assert (result["status"], result["exact_token_rate"], result["unhashed_tokens"]) == ("exact", 1.0, 0)
    assert set(result["recomputed"]) == {"0", "1"} and result["gone"] == {} and result["largest_deviation"] < 1e-3
    entries = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    for name in ("sampled_tokens", "exact_tokens", "unhashed_tokens"):
        assert result[name] == sum(entry[name] for entry in entries)
    summary = json.loads((tmp_path / "tiny/summary.json").read_text())
    assert {name: summary[name] for name in ("inexact", "breaks")} == {name: result[name] for name in ("inexact", "breaks")}


def test_the_verdict_is_on_stdout_and_progress_on_stderr(capsys, run):
    code, out, err = command(capsys, run)
    assert code == 0
    assert "Run small is exact." in out and "100 % of" in out and "policy versions 0-1" in out and "9 greedy" in out
    assert err == f"verifying {run}\n"


def test_changed_id_breaks_its_context_and_that_of_what_follows(capsys, run):
    alter(run, "train-0.1.1", 0, lambda step: replace(step, completion_ids=(*step.completion_ids[:-1], 39)))
    result = found(capsys, run)
    assert named(result) == [("train-0.1.1", index, "context_differs") for index in (0, 1, 2)]
    code, out, _ = command(capsys, run)
    assert code == 1
    assert "NOT exact: 3 of 36 steps" in out and "rollout train-0.1.1, step 1: context_differs" in out


def test_a_changed_id_is_not_trained_nor_what_follows(run):
    alter(run, "train-0.1.1", 0, lambda step: replace(step, completion_ids=(*step.completion_ids[:-1], 39)))
    [group] = asyncio.run(groups(run, 0))
    result = sequences(group, [0.0, 1.0, -1.0, 0.0])
    assert result.counts["masked.context_differs"] == 3
    assert {sequence.rollout_id for sequence in result.sequences} == {"train-0.2.1"}


def test_changed_id_without_digest_is_found_by_its_logprob(capsys, run):
    for index in (0, 1, 2):
        alter(run, "train-2.0.1", index, lambda step: replace(step, context_digest=""))
    assert found(capsys, run)["status"] == "exact"
    alter(run, "train-2.0.1", 1, lambda step: replace(step, completion_ids=(39, *step.completion_ids[1:])))
    result = found(capsys, run)
    assert named(result) == [("train-2.0.1", 1, "logprob_differs")]
    assert result["unhashed_tokens"] > 0 and result["exact_token_rate"] < 1.0


@pytest.mark.parametrize("place", [0, 1])
def test_one_changed_logprob_is_named_with_its_token(capsys, run, place):
    alter(run, f"train-1.{place}.1", 2, lambda step: replace(step, logprobs=(*step.logprobs[:3], -0.123, *step.logprobs[4:])))
    result = found(capsys, run)
    assert named(result) == [(f"train-1.{place}.1", 2, "logprob_differs")]
    [finding] = result["findings"]
    assert (finding["tokens"], finding["worst"]["token"], finding["worst"]["version"]) == (1, 3, 0)
    assert finding["worst"] == result["largest_at"] and result["inexact"] == {"logprob_differs": 1}


@pytest.mark.parametrize("place", [2, 3])
def test_greedy_tokens_are_checked_by_plain_softmax(capsys, run, place):
    def change(step: Step) -> Step:
        assert step.full_logprobs is not None
        return replace(step, kept=(), full_logprobs=(step.full_logprobs[0] - 0.01, *step.full_logprobs[1:]))

    alter(run, f"train-0.{place}.1", 0, change)
    assert named(found(capsys, run)) == [(f"train-0.{place}.1", 0, "logprob_differs")]


def test_truncated_tokens_are_checked_among_those_that_were_kept(capsys, run):
    def another(step: Step) -> Step:
        own = unpack_sets(step.kept, SHAPE.vocab_size)[0]
        own[np.flatnonzero(~own)[:20]] = True
        return replace(step, kept=(pack_set(own), *step.kept[1:]))

    alter(run, "train-0.2.1", 0, lambda step: replace(step, logprobs=(step.logprobs[0] - 0.01, *step.logprobs[1:])))
    alter(run, "train-1.2.1", 1, another)
    alter(run, "train-1.2.1", 2, lambda step: replace(step, kept=(pack_set(np.arange(SHAPE.vocab_size) < 0), *step.kept[1:])))
    expected = [("train-0.2.1", 0, "logprob_differs"), ("train-1.2.1", 1, "logprob_differs"), ("train-1.2.1", 2, "not_allowed")]
    assert sorted(named(found(capsys, run))) == expected


def test_a_wrong_version_is_found(capsys, run):
    alter(run, "train-2.1.1", 1, lambda step: replace(step, versions=tuple(0 for _ in step.versions)))
    assert named(found(capsys, run)) == [("train-2.1.1", 1, "logprob_differs")]


def test_a_reply_sampled_under_two_versions_is_recomputed_under_each(capsys, run):
    alter(run, "train-0.0.1", 0, lambda step: replace(step, versions=(*step.versions[:3], 1, *step.versions[4:])))
    result = found(capsys, run)
    assert named(result) == [("train-0.0.1", 0, "logprob_differs")]
    assert [(f["tokens"], f["worst"]["token"], f["worst"]["version"]) for f in result["findings"]] == [(1, 3, 1)]


def test_an_id_that_the_model_does_not_have_is_named(capsys, run):
    alter(run, "train-0.0.1", 2, lambda step: replace(step, completion_ids=(10_000, *step.completion_ids[1:]), context_digest=""))
    assert ("train-0.0.1", 2, "bad_token") in named(found(capsys, run))


def test_versions_whose_weights_are_gone_are_counted_not_passed(capsys, run):
    shutil.rmtree(run / "checkpoints")
    result = found(capsys, run)
    assert result["status"] == "exact" and set(result["recomputed"]) == {"0"} and set(result["gone"]) == {"1"}
    assert result["recomputed_tokens"] + result["gone_tokens"] == result["sampled_tokens"]
    assert "the weights of policy version 1 are not on this disk" in command(capsys, run)[1]


def test_a_run_of_which_nothing_can_be_recomputed_is_unproven(capsys, run):
    shutil.rmtree(run / "checkpoints")
    result = found(capsys, run, "--limit", "1")
    assert (result["status"], result["groups"], result["largest_at"]) == ("unproven", 1, None)
    assert "unproven" in command(capsys, run, "--limit", "1")[1]


def test_a_limit_takes_the_newest_groups(capsys, run):
    result = found(capsys, run, "--limit", "1")
    assert (result["groups"], set(result["recomputed"])) == (1, {"1"})


def test_a_tolerance_can_be_set(capsys, run):
    assert found(capsys, run, "--tolerance", "0")["status"] == "inexact"


def test_run_in_half_precision_is_given_tolerance_of_that(capsys, made, run):
    learner = Learner(make_decoder().bfloat16(), section())
    save(run / "checkpoints", PolicyVersion(number=2, step=2), learner, made.parent / "model")
    assert found(capsys, run)["tolerance"] == TOLERANCES["bfloat16"]


def test_checkpoint_that_training_removes_meanwhile_is_gone_not_error(run):
    def heard(done: int, total: int) -> None:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)

    async def audit() -> dict[str, Any]:
        async with open_recorded_run(run, channel="train") as recorded:
            return as_object(await verify(recorded, heard))

    result = asyncio.run(audit())
    assert result["status"] == "exact" and set(result["gone"]) == {"1"}


def test_running_run_is_read_as_far_as_written(made, run):
    async def audit() -> tuple[int, int]:
        engine = open_engine(made.parent / "model", name="small", section=EngineSection(device="cpu"), seed=1)
        pool = SqlitePool(run)
        try:
            async with open_recorded_run(run, channel="train") as recorded:
                await add_group(pool, engine, 3)
                result = await verify(recorded, lambda done, total: None)
            return result.groups, (await pool.stats("train")).groups
        finally:
            await engine.close()
            await pool.close()

    assert asyncio.run(audit()) == (3, 4)


def test_stopped_in_the_middle_it_lets_go_of_the_pool(capsys, run, monkeypatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr("penstock.train.verify.VersionWeights.load", stopped)  # stands in for Ctrl-C while a pass is computed
    assert edge.run(["verify", str(run)]) == 130
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("penstock-pool")]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("penstock: ")
    return err


def test_what_is_no_run_is_refused_in_one_line(capsys, run, tmp_path):
    assert "absent: not a run folder" in refused(capsys, tmp_path / "absent")
    assert "not a run folder" in refused(capsys, run / "checkpoints/000001")
    assert "limit" in refused(capsys, run, "--limit", "0")


def test_a_run_without_steps_is_refused_before_torch_is_loaded(run):
    code = f"from penstock.cli.app import run; import sys; assert run(['verify', {str(run)!r}, '--channel', 'val']) == 2"
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True, timeout=60, capture_output=True
    )


def test_a_run_without_steps_is_refused_in_one_line(capsys, run):
    assert "no step has been recorded in channel 'val' yet; take --channel train" in refused(capsys, run, "--channel", "val")
    (run / "pool.db").unlink()
    assert "no pool.db yet" in refused(capsys, run)
    assert not (run / "pool.db").exists()


def test_run_with_pool_in_memory_is_rejected_in_one_line(capsys, run):
    file = run / "config.json"
    settings = json.loads(file.read_text())
    settings["config"]["pool"]["name"] = "memory"
    file.write_text(json.dumps(settings))
    assert "kept its steps in memory" in refused(capsys, run)


async def groups(run: Path, seq: int) -> list[Group]:
    pool = SqlitePool(run)
    try:
        return await pool.groups("train", first_seq=seq, limit=1)
    finally:
        await pool.close()


PICTURE = b"a picture"


async def add_pictured(run: Path) -> None:
    """A rollout whose second call shows a picture, with log-probabilities that no weights here give."""
    digest = hashlib.sha256(PICTURE).hexdigest()
    seen = PlacedPicture(digest=digest, media_type="image/png", first=1, size=2, token=9)
    rollout = make_rollout("train-3", TASK.id, 0)
    shown = Node(
        rollout_id=rollout.id, id=0, parent=None, token_ids=(1, 5, 5), messages_digest="p", messages=TASK.prompt, pictures=(seen,)
    )
    step = Step(
        rollout_id=rollout.id,
        index=0,
        node=0,
        transcript="main",
        completion_ids=(2, 3),
        logprobs=(-9.0, -9.0),
        versions=(0, 0),
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": "?"},
        messages_digest="q",
        context_digest=context_digest((1, 5, 5, 2, 3)),
    )
    pool = SqlitePool(run)
    await pool.open_group(TASK, [rollout], seq=None)
    await pool.append(step, shown)
    await pool.end(rollout.id, End.COMPLETED)
    await pool.close()


def test_tokens_after_a_picture_are_counted_not_recomputed(run: Path, capsys: pytest.CaptureFixture[str]):
    before = found(capsys, run)
    asyncio.run(add_pictured(run))
    PictureStore(run).put(PICTURE)
    result = found(capsys, run)
    assert result["status"] == "exact" and result["masked"]["picture_in_context"] == 1
    assert (result["pictured_tokens"], result["recomputed_tokens"]) == (2, before["recomputed_tokens"])
    [file] = (run / "pictures").iterdir()
    file.write_bytes(b"another")
    assert [(one["rollout_id"], one["reason"]) for one in found(capsys, run)["findings"]] == [("train-3.0.1", "picture_damaged")]
    file.unlink()
    assert found(capsys, run)["inexact"] == {"picture_missing": 2}


def test_run_of_model_of_pictures_is_unproven_and_says_why(run: Path, capsys: pytest.CaptureFixture[str]):
    model = Path(json.loads((run / "config.json").read_text())["config"]["model"]["name"])
    config = (model / "config.json").read_text()
    try:
        (model / "config.json").write_text(json.dumps({**json.loads(config), "vision_config": {}}))
        shutil.rmtree(run / "checkpoints")
        code, out, _ = command(capsys, run)
    finally:
        (model / "config.json").write_text(config)
    assert code == 1 and "is unproven: its model sees pictures, and cannot be recomputed here" in out
