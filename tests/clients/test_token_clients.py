"""Clients that collect tokens for training, as their registries ship them: what they hold is what was recorded."""

import json
from pathlib import Path

import pytest
from client_record import assert_trainable, only_path
from client_trial import PROGRAMS, Seen, Trial, program
from scripts import speaker

from penstock.gateway.graph import prompts


def talk(environment: str, name: str, api: str, folder: Path) -> Seen:
    command = program(PROGRAMS / name, folder, "whole", api, environment=environment)
    line = f"{name.partition('.')[0]} {api}"
    seen = Trial(environment, command, speaker, folder, name=line).run()
    assert "The sums are 30 and 15." in seen.output and seen.left == []
    assert only_path(seen.attempt) == [0, 1]
    assert_trainable(seen.attempt)
    return seen


@pytest.mark.slow
def test_harbor_collects_the_tokens_and_log_probabilities_that_were_recorded(tmp_path: Path) -> None:
    seen = talk("harbor", "harbor_chat.py", "chat", tmp_path / "work")
    [details] = json.loads(seen.output.splitlines()[-1])
    asked = prompts(seen.attempt)
    assert details["prompt_token_ids"] == [list(asked[step.index]) for step in seen.attempt.steps]
    assert details["completion_token_ids"] == [list(step.completion_ids) for step in seen.attempt.steps]
    assert details["logprobs"] == [pytest.approx(step.full_logprobs or step.logprobs) for step in seen.attempt.steps]


@pytest.mark.slow
def test_training_client_of_verifiers_holds_tokens_of_path(tmp_path: Path) -> None:
    seen = talk("verifiers", "verifiers_agent.py", "train", tmp_path / "work")
    last = seen.attempt.steps[-1]
    held = json.loads(seen.output.splitlines()[-1])["tokens"]
    assert held == [*prompts(seen.attempt)[last.index], *last.completion_ids] and not seen.ignored
