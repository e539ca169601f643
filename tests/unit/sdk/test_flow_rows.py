"""Dataset rows for flows: every column is kept, the label is found where rules keep it, and a prompt need not be there."""

import json

import pytest

from penstock.errors import DatasetError
from penstock.sdk.dataset import load_tasks

GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


def tasks_of(folder, *rows, columns=True):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(path, columns=columns)


def test_row_keeps_its_columns_and_its_label(tmp_path):
    (task,) = tasks_of(tmp_path, GSM8K)
    assert (task.prompt, task.label) == (tuple(GSM8K["prompt"]), "4")
    assert task.metadata == {name: value for name, value in GSM8K.items() if name != "prompt"}


def test_without_columns_rows_are_read_as_before(tmp_path):
    (task,) = tasks_of(tmp_path, {"prompt": "2+2?", "label": "4", "other": 1}, columns=False)
    assert (task.label, task.metadata) == ("4", None)
    with pytest.raises(DatasetError, match="prompt"):
        tasks_of(tmp_path, {"task": "?"}, columns=False)


def test_row_may_ask_with_columns(tmp_path):
    first, second = tasks_of(tmp_path, {"task": "book a room"}, {"task": "book a room"})
    assert (first.prompt, first.label, first.metadata) == ((), None, {"task": "book a room"})
    assert first.id != second.id


def test_what_metadata_holds_is_reported_by_name_and_as_column(tmp_path):
    (task,) = tasks_of(tmp_path, {"user_prompt": "?", "ground_truth": "4", "metadata": {"level": 3, "task": "x"}, "task": "y"})
    assert (task.metadata["level"], task.metadata["task"], task.metadata["metadata"]) == (3, "y", {"level": 3, "task": "x"})
    assert (task.label, task.metadata["ground_truth"]) == ("4", "4")


def test_truth_that_is_no_text_becomes_its_json(tmp_path):
    (task,) = tasks_of(tmp_path, {"prompt": "?", "reward_model": {"ground_truth": [1, 2]}})
    assert (task.label, task.metadata["reward_model"]) == ("[1, 2]", {"ground_truth": [1, 2]})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompts": "2+2?"}, "unknown column 'prompts'; did you mean 'prompt'"),
        ({"prompt": "?", "label": "5", "reward_model": {"ground_truth": "4"}}, "label and reward_model.ground_truth differ"),
        ({"prompt": ""}, "no prompt"),
        ({"prompt": "?", "ground_truth": 4}, "ground_truth is 4"),
        ({"task": 1 << 70}, "beyond 64 bits"),
    ],
)
def test_row_that_cannot_be_used_is_named(tmp_path, row, words):
    with pytest.raises(DatasetError, match=r"rows\.jsonl"):
        tasks_of(tmp_path, row)
