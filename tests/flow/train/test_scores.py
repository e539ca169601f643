"""What the trainer keeps of each trained token: the columns that the dashboard's token lens reads."""

import asyncio
import json
import shutil
import threading

import pytest
from async_cases import Watched
from training_cases import make_decoder, plain_logprobs, random_tree, section
from view_cases import Screens

from penstock.train import metrics as scores_module
from penstock.train.batches import pack
from penstock.train.learner import Learner
from penstock.train.metrics import MOST_TOKENS, LearnerUpdate, ScoreWriter, score_lines, write_scores
from penstock.view.credit import read_scores


@pytest.mark.parametrize("shared", [True, False])
def test_scores_are_those_of_plain_forward_pass_whatever_layout(shared, tmp_path):
    decoder, tree = make_decoder(), random_tree(3)
    learner = Learner(decoder, section())
    batch = pack(tree, rollouts=12, tokens_per_pass=40, shared_prefix=shared)
    write_scores(tmp_path, 7, {"": LearnerUpdate(batch, learner.compute(batch))})
    for rollout in {sequence.rollout_id for sequence in tree}:
        own = [sequence for sequence in tree if sequence.rollout_id == rollout]
        found = read_scores(tmp_path, 7, [rollout])[rollout]
        assert len(found) == len(own)
        for sequence, scores in zip(own, found, strict=True):
            places = [at for at, trained in enumerate(sequence.trained) if trained]
            plain = plain_logprobs(decoder, sequence).detach()
            wanted = [float(plain[at - 1]) - sequence.logprobs[at] for at in places]
            assert scores.gap == pytest.approx(wanted, rel=2e-3, abs=1e-5)  # half precision
            assert scores.advantages == tuple(sequence.advantages[at] for at in places)
            assert all(spread > 0 for spread in scores.entropy)


def test_mean_of_kept_entropies_is_that_of_metrics():
    learner, tree = Learner(make_decoder(), section()), random_tree(4)
    batch = pack(tree, rollouts=12, tokens_per_pass=1000)
    result = learner.compute(batch)
    assert float(result.entropy.mean()) == pytest.approx(result.metrics.entropy)
    assert len([json.loads(line) for line in score_lines(batch, result)]) == len(tree)


def test_a_step_of_too_many_tokens_keeps_none(tmp_path):
    class Huge:
        trained_tokens = MOST_TOKENS + 1

    write_scores(tmp_path, 1, {"": LearnerUpdate(Huge(), None)})  # pyright: ignore
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_reported_and_the_run_continues(tmp_path, caplog):
    learner, tree = Learner(make_decoder(), section()), random_tree(4)
    batch = pack(tree, rollouts=12, tokens_per_pass=1000)
    (tmp_path / "scores").write_text("in the way")
    write_scores(tmp_path, 1, {"": LearnerUpdate(batch, learner.compute(batch))})
    assert "scores of step 1 cannot be written" in caplog.text


def test_training_continues_while_scores_are_written(tmp_path, monkeypatch):
    begun, may_write, written = threading.Event(), threading.Event(), []

    def slow(folder, step, updates):
        begun.set()
        assert may_write.wait(20)
        written.append(step)

    monkeypatch.setattr(scores_module, "write_scores", slow)

    async def main():
        async with ScoreWriter(tmp_path) as scores:
            await scores.write(1, {})
            assert await asyncio.to_thread(begun.wait, 20)
            assert written == []  # and here the next step begins
            may_write.set()
            await scores.write(2, {})
            assert written[:1] == [1]
        assert written == [1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("advantage", ["rewards_to_go", "reinforce_pp", "gae"])
def test_the_dashboard_shows_the_credit_that_a_run_trained_with(advantage, tmp_path):
    run = Watched(tmp_path, f'train.advantage="{advantage}"', "train.steps=1")
    run.train()
    screens = Screens(tmp_path / "runs")
    [attempt, *_] = screens.get("group", run="run", group="train-0")["attempts"]
    reported = [screens.get("tokens", run="run", rollout=attempt["id"], call=call) for call in (0, 1)]
    assert all(each["trained"] and any(each["token_advantages"]) for each in reported)
    levels = {"rewards_to_go": "call", "reinforce_pp": "rollout", "gae": "token"}
    assert attempt["level"] == levels[advantage]
    if advantage == "rewards_to_go":  # computed again, it is the same
        before = attempt["credits"]
        shutil.rmtree(tmp_path / "runs/run/scores")
        assert screens.get("group", run="run", group="train-0")["attempts"][0]["credits"] == before
