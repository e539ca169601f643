"""New weights all the time under load, engines killed meanwhile: nothing acknowledged is lost, every version is its engine's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killable_process import times
from publishing_runs import Run, weight_server
from weight_server import logprob_of

from penstock.engines.embedded.decoder import Decoder, causal, load_decoder
from penstock.records import End, Rollout
from penstock.train.sequences import read_graph


def spans(attempts: list[Rollout]) -> int:
    """Replies that went on over a publication."""
    return sum(len(set(step.versions)) > 1 for attempt in attempts for step in attempt.steps)


def reported(run: Run, attempts: list[Rollout], failed: int) -> str:
    steps = [step for attempt in attempts for step in attempt.steps]
    return (
        f"{len(run.published)} publications under load, {run.per_s:.1f} a second; {len(steps)} steps recorded, "
        f"{len(run.notes('answered'))} answers acknowledged, {len(run.lost(attempts))} lost; "
        f"{spans(attempts)} replies over a publication, {failed} failed calls; "
        f"{sum(len(step.versions) for step in steps)} tokens, each of a version that its engine held"
    )


@pytest.mark.slow
def test_no_call_fails_and_tokens_carry_their_servers_version(tmp_path: Path) -> None:
    with weight_server("made-up") as one, weight_server("made-up") as two:
        steps = 10 + times(100)
        run = Run(tmp_path, f'engine={{name="vllm", url=["{one.url}", "{two.url}"]}}', f"train.steps={steps}")
        summary = run.train()
    attempts = run.attempts()
    print(reported(run, attempts, len(run.notes("failed"))))
    assert summary.steps == len(run.published) == steps
    assert run.notes("failed") == [] and run.lost(attempts) == []
    assert wrong_versions(attempts) == [] and spans(attempts) > 0


@pytest.mark.slow
def test_killed_server_loses_only_its_running_calls(tmp_path: Path) -> None:
    with weight_server("made-up") as one, weight_server("made-up") as two:
        steps = 10 + times(100)
        run = Run(tmp_path, f'engine={{name="vllm", url=["{one.url}", "{two.url}"]}}', f"train.steps={steps}")
        run.on_step = lambda step: one.kill_soon() if step == steps // 2 else None
        summary = run.train()
    attempts = run.attempts()
    failed = run.notes("failed")
    ended = {attempt.ref.id: attempt for attempt in attempts if attempt.end not in (End.COMPLETED, End.CANCELLED)}
    print(reported(run, attempts, len(failed)))
    print(f"one of two servers killed with {one.replying} replies under way: {len(ended)} rollouts ended with it: {sorted(ended)}")
    assert one.replying > 0
    assert summary.steps == steps and run.lost(attempts) == [] and wrong_versions(attempts) == []
    assert {rollout for rollout, _ in failed} == set(ended)
    assert all(one.url in attempt.message for attempt in ended.values())


@pytest.mark.slow
def test_embedded_tokens_were_sampled_by_the_weights_they_name(tmp_path: Path) -> None:
    steps = 10 + times(40)
    run = Run(tmp_path, f"train.steps={steps}", "engine.slots=16")
    summary = run.train()
    attempts = run.attempts()
    print(reported(run, attempts, len(run.notes("failed"))))
    assert summary.steps == steps and run.notes("failed") == [] and run.lost(attempts) == []
    assert spans(attempts) > 0
    policies = {0: load_decoder(run.model)} | {v: load_decoder(run.folder / f"runs/run/checkpoints/{v:06d}") for v in run.published}
    gaps = [gap for attempt in attempts for gap in gaps_to(policies.__getitem__, attempt)]
    others = [gap for attempt in attempts for gap in gaps_to(lambda version: policies[0 if version else 1], attempt)]
    print(f"largest gap to the weights named: {max(gaps):.1e}; to others: {max(others):.1e}")
    assert max(gaps) < 1e-3 < max(others)


def wrong_versions(attempts: list[Rollout]) -> list[tuple[str, int]]:
    """Steps with a token whose server held another version than is recorded."""
    return [
        (attempt.ref.id, step.index)
        for attempt in attempts
        for step in attempt.steps
        if list(step.logprobs) != [pytest.approx(logprob_of(version)) for version in step.versions]
    ]


def gaps_to(policy: Callable[[int], Decoder], attempt: Rollout) -> list[float]:
    """How far the recorded log-probabilities are from those of the policies that their tokens name."""
    graph, found = read_graph(attempt), list[float]()
    for index, step in graph.steps.items():
        context: list[int] = []
        for at in next(path for path in graph.paths if index in path):
            context += graph.nodes[graph.steps[at].node].token_ids + (graph.steps[at].completion_ids if at != index else ())
            if at == index:
                break
        ids = torch.tensor([[*context, *step.completion_ids]])
        for version in set(step.versions):
            with torch.no_grad():
                decoder = policy(version)
                hidden = decoder(ids, torch.arange(ids.shape[1]).unsqueeze(0), causal)[0, len(context) - 1 : -1]
                scores = decoder.logits(hidden).log_softmax(-1)
            for place, token_id in enumerate(step.completion_ids):
                if step.versions[place] == version:
                    found.append(abs(float(scores[place, token_id]) - step.logprobs[place]))
    return found
