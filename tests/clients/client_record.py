"""The record of a client's calls: its paths, what they say, and whether all of it would be trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from trial_tokenizer import tokenizer_folder

from penstock.records import End, Grade, Rollout, Task
from penstock.testing import make_group
from penstock.train.resources import AllowedReplay
from penstock.train.sequences import exactness, read_graph, sequences


def paths(attempt: Rollout) -> list[list[int]]:
    """The steps from a root to each leaf."""
    return read_graph(attempt).paths


def only_path(attempt: Rollout) -> list[int]:
    """The one path that all steps lie on."""
    [path] = paths(attempt)
    assert len(path) == len(attempt.steps)
    return path


def breaks(attempt: Rollout) -> list[str]:
    """Why roots had to be opened."""
    return [node.reason for node in attempt.nodes if node.reason is not None]


def view(attempt: Rollout, path: Sequence[int]) -> list[list[object]]:
    """The messages of a path in the form of the programs' views."""
    nodes = {node.id: node for node in attempt.nodes}
    steps = {step.index: step for step in attempt.steps}
    messages = [message for index in path for message in (*nodes[steps[index].node].messages, steps[index].message)]
    return [_viewed(message) for message in messages]


def assert_trainable(attempt: Rollout) -> None:
    """Every token that was sampled is exact and would be trained; where a schema bound it, it is one that the schema allows."""
    found = exactness(attempt)
    assert found.sampled_tokens > 0 and found.exact_tokens == found.sampled_tokens and not found.unhashed_tokens, found
    grade = Grade(rollout_id=attempt.ref.id, reward=1.0, source="test")
    graded = replace(attempt, end=End.COMPLETED, grades=(grade,))
    task = Task(id=attempt.ref.task_id, prompt=())
    group = make_group(graded, id=attempt.ref.group_id, task=task)
    counts = sequences(group, [1.0], replay=_replay()).counts
    assert counts["tokens"] == found.sampled_tokens and not [name for name in counts if name.startswith("masked")], counts


@cache
def _replay() -> AllowedReplay:
    folder = tokenizer_folder()
    return AllowedReplay(folder, Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size())


def _viewed(message: Mapping[str, Any]) -> list[object]:
    calls = [made["function"] for made in message.get("tool_calls") or ()]
    return [message["role"], message.get("content") or "", [[call["name"], json.loads(call["arguments"])] for call in calls]]
