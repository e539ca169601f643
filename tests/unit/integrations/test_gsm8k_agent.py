"""The GSM8K agent: its tool's calls however they are made, what it received, and rows made of the dataset's own files."""

import json
import runpy
from pathlib import Path

import pytest

from penstock.errors import DatasetError
from penstock.sdk.dataset import load_tasks, read_rows
from penstock_compat.flows.gsm8k import AnswerCall, answer_calls, last_question

EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k"
CONVERT = runpy.run_path(str(EXAMPLE / "convert.py"))
ROW = {"question": "6 times 7?", "answer": "6*7 = <<6*7=42>>42\n#### 1,042"}


def made(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "check_answer", "arguments": arguments}}]}


def said(*calls):
    return {"role": "assistant", "content": "so\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)}


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ('{"answer": "42"}', "42"),
        ('{"answer": 42}', "42"),
        ('{"answer": 4.5}', "4.5"),
        ('{"answer": true}', None),
        ('{"answer": [1]}', None),
        ("{}", None),
        ("[]", None),
        ("42", None),
        ("{oh", None),
        ("[" * 100_000, None),
    ],
)
def test_call_hands_in_a_number_or_nothing(arguments, answer):
    assert answer_calls(made(arguments)) == [AnswerCall("c", answer)]


def test_calls_are_parsed_from_text_if_needed():
    whole = json.dumps({"name": "check_answer", "arguments": {"answer": "42"}})
    nested = json.dumps({"name": "check_answer", "arguments": '{"answer": "43"}'})
    assert answer_calls(said(whole, nested, "{oh}")) == [
        AnswerCall("call_0", "42"),
        AnswerCall("call_1", "43"),
        AnswerCall("call_2", None),
    ]
    assert answer_calls({"content": "#### 42"}) == answer_calls({"content": None}) == answer_calls({"content": "<tool_call>"}) == []


def test_question_is_the_last_thing_that_the_user_asks():
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert (last_question(talk), last_question("c")) == ("b", "c")
    with pytest.raises(ValueError, match="message"):
        last_question(talk[:1])


def test_rows_are_made_with_question_truth_and_that_file_said(tmp_path):
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(ROW)}\n" * 3)
    for name in ("out.jsonl", "out.parquet"):
        assert CONVERT["convert"](tmp_path / "test.jsonl", tmp_path / name, 2) == 2
        _, second = (row.columns for row in read_rows(tmp_path / name))
        assert second == {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"6 times 7? {CONVERT['ASKED']}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "1042"},
            "extra_info": {"split": "test", "index": 1, **ROW},
        }
    assert {file.name for file in tmp_path.iterdir()} == {"test.jsonl", "out.jsonl", "out.parquet"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "a", "answer": "42"}', "raw.jsonl, line 2: the answer does not end in '#### ' and a number"),
        ('{"question": "a"}', "line 2: no text under 'answer'"),
        ('{"question": 1, "answer": "#### 1"}', "line 2: no text under 'question'"),
        ("{oh", "line 2: not valid JSON"),
    ],
)
def test_bad_source_row_is_named_and_leaves_no_file(tmp_path, line, words):
    (tmp_path / "raw.jsonl").write_text(f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(DatasetError) as reported:
        CONVERT["convert"](tmp_path / "raw.jsonl", tmp_path / "out.jsonl")
    assert words in str(reported.value)
    assert [file.name for file in tmp_path.iterdir()] == ["raw.jsonl"]
    assert CONVERT["main"]([str(tmp_path / "raw.jsonl"), str(tmp_path / "out.jsonl")]) == str(reported.value)


def test_bundled_rows_have_labels_and_do_not_overlap():
    train, heldout = (load_tasks(EXAMPLE / name, columns=True) for name in ("train.jsonl", "heldout.jsonl"))
    assert (len(train), len(heldout)) == (64, 32)
    assert {task.label.lstrip("-").replace(".", "").isdigit() for task in train + heldout} == {True}
    assert not {task.prompt[0]["content"] for task in train} & {task.prompt[0]["content"] for task in heldout}
