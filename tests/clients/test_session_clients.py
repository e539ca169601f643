"""Evaluations of other people's programs under the session key: each of their rollouts is one of ours, graded later."""

import asyncio
from pathlib import Path

import pytest
from client_record import assert_trainable, only_path
from client_trial import PROGRAMS, Trial, program
from scripts import Script, adder, speaker


def evaluated(environment: str, name: str, script: Script, folder: Path) -> Trial:
    command = program(PROGRAMS / name, folder, "whole", "chat", environment=environment)
    return Trial(environment, command, script, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "name", "script", "rollouts"),
    [("verifiers", "verifiers_rollouts.py", adder, 6), ("inspect", "inspect_samples.py", speaker, 4)],
)
def test_each_rollout_of_an_evaluation_is_a_rollout_here(
    environment: str, name: str, script: Script, rollouts: int, tmp_path: Path
):
    attempts = asyncio.run(evaluated(environment, name, script, tmp_path / "work").run_sessions())
    assert len(attempts) == rollouts
    for attempt in attempts:
        assert len(only_path(attempt)) > 1 and attempt.reward == 1.0
        assert_trainable(attempt)
