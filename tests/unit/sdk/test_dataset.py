"""Datasets: rows become tasks, and every flaw is one line that names the file and the place."""

import json
import re
import sys

import pytest

from penstock.errors import DatasetError
from penstock.sdk.dataset import check_tasks, count_rows, load_tasks

ROW = {"system_prompt": "Be brief.", "user_prompt": "What is 2 times 3?", "ground_truth": "6"}


def written(folder, content, name="tasks.jsonl"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows(folder, *objects):
    return written(folder, "".join(json.dumps(row) + "\n" for row in objects))


def refused(path):
    with pytest.raises(DatasetError) as caught:
        load_tasks(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_osmosis_row_becomes_system_and_user_messages_with_label(tmp_path):
    (task,) = load_tasks(rows(tmp_path, ROW))
    assert task.prompt == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 times 3?"})
    assert task.label == "6"
    assert task.metadata is None


def test_prompt_may_be_text_or_messages(tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    text, listed = load_tasks(rows(tmp_path, {"prompt": "Hi"}, {"prompt": messages, "label": ""}))
    assert text.prompt == ({"role": "user", "content": "Hi"},)
    assert listed.prompt == tuple(messages)
    assert listed.label == ""


@pytest.mark.parametrize("metadata", [{"level": 3}, '{"level": 3}'])
def test_metadata_is_an_object_or_one_as_json_text(tmp_path, metadata):
    assert load_tasks(rows(tmp_path, {**ROW, "metadata": metadata}))[0].metadata == {"level": 3}


def test_blank_metadata_and_other_columns_are_left_alone(tmp_path):
    task = load_tasks(rows(tmp_path, {**ROW, "metadata": " ", "source": "web", "id": 7}))[0]
    assert task.metadata is None


def test_ids_stay_with_their_rows_and_differ_for_equal_rows(tmp_path):
    first = load_tasks(rows(tmp_path, ROW, {"prompt": "x"}, ROW))
    second = load_tasks(rows(tmp_path, {"prompt": "x"}, ROW, ROW))
    assert len({task.id for task in first}) == 3
    assert {task.id for task in first} == {task.id for task in second}
    assert first[1].id == second[0].id


def test_limit_reads_no_further(tmp_path):
    path = written(tmp_path, json.dumps(ROW) + "\n{broken")
    assert len(load_tasks(path, limit=1)) == 1
    assert refused(path).startswith(", line 2:")


def test_csv_cells_may_hold_commas_quotes_and_line_breaks(tmp_path):
    path = written(tmp_path, 'user_prompt,ground_truth,metadata\r\n"a, ""b""\nc",6,"{""k"": 1}"\r\nd,,\r\n', "tasks.csv")
    first, second = load_tasks(path)
    assert (first.prompt[0]["content"], first.label, first.metadata) == ('a, "b"\nc', "6", {"k": 1})
    assert (second.prompt[0]["content"], second.label, second.metadata) == ("d", None, None)


def test_csv_line_number_counts_lines_inside_cells(tmp_path):
    path = written(tmp_path, 'user_prompt,label\n"a\nb\nc",1\nd,1,2\n', "tasks.csv")
    assert refused(path).startswith(", line 5: 3 cells under 2 columns")


def test_parquet_structs_lose_the_nulls_that_arrow_adds(tmp_path):
    import pyarrow
    import pyarrow.parquet

    prompt = [{"role": "user", "content": "Hi", "name": None}, {"role": "assistant", "content": "Ho", "name": "x"}]
    table = pyarrow.Table.from_pylist([{"prompt": prompt, "metadata": {"k": 1}}, {"prompt": prompt[:1], "metadata": None}])
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    first, second = load_tasks(tmp_path / "tasks.parquet")
    assert first.prompt == ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "name": "x"})
    assert (first.metadata, second.metadata) == ({"k": 1}, None)


def test_parquet_flaw_names_the_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), tmp_path / "tasks.parquet")
    assert refused(tmp_path / "tasks.parquet").startswith(", row 2: no prompt")


def test_parquet_value_that_json_cannot_hold_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{"prompt": "a", "metadata": {"raw": b"\x00"}}])
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    assert "row 1: metadata holds a value of type bytes" in refused(tmp_path / "tasks.parquet")


FLAWS = {
    "empty file": (b"", "has no rows"),
    "blank line": (b'{"prompt": "a"}\n\n{"prompt": "b"}\n', ", line 2: blank line"),
    "invalid json": (b'{"prompt": "a"}\n{"prompt": }\n', ", line 2: not valid JSON"),
    "half a line": (b'{"prompt": "a', ", line 1: not valid JSON"),
    "not an object": (b'["a"]\n', ", line 1: list instead of an object"),
    "utf-8 mark": (b'\xef\xbb\xbf{"prompt": "a"}\n', ", line 1: begins with a byte order mark"),
    "utf-16": ('{"prompt": "a"}\n'.encode("utf-16"), ", line 1: begins with a byte order mark"),
    "latin-1": (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', ", line 2: not UTF-8"),
    "lone surrogate": (b'{"prompt": "a \\ud83d b"}\n', ", line 1: prompt holds a lone surrogate"),
    "lone surrogate in a key": (b'{"prompt": "a", "metadata": {"\\udc00": 1}}\n', ", line 1: metadata holds a lone surrogate"),
    "no prompt": (b'{"ground_truth": "1"}\n', ", line 1: no prompt"),
    "blank prompt": (b'{"user_prompt": "  "}\n', ", line 1: no prompt"),
    "null prompt": (b'{"prompt": null}\n', ", line 1: no prompt"),
    "no messages": (b'{"prompt": []}\n', ", line 1: no prompt"),
    "number prompt": (b'{"prompt": 3}\n', ", line 1: prompt is 3 (int)"),
    "number label": (b'{"prompt": "a", "label": 3}\n', ", line 1: label is 3 (int)"),
    "system without user": (b'{"system_prompt": "a"}\n', ", line 1: no prompt"),
    "false system": (b'{"user_prompt": "a", "system_prompt": false}\n', ", line 1: system_prompt is False"),
    "two prompts": (b'{"prompt": "a", "user_prompt": "b"}\n', ", line 1: has both"),
    "two labels": (b'{"prompt": "a", "label": "b", "ground_truth": "b"}\n', ", line 1: has both"),
    "message without role": (b'{"prompt": [{"content": "a"}]}\n', "prompt[0] has role None"),
    "message as text": (b'{"prompt": ["a"]}\n', "prompt[0] is str"),
    "number content": (b'{"prompt": [{"role": "user", "content": 1}]}\n', "prompt[0] has int content"),
    "metadata list": (b'{"prompt": "a", "metadata": [1]}\n', "metadata is list"),
    "metadata text list": (b'{"prompt": "a", "metadata": "[1]"}\n', "metadata is list"),
    "metadata bad text": (b'{"prompt": "a", "metadata": "{"}\n', ", line 1: metadata: not valid JSON"),
    "nan": (b'{"prompt": "a", "metadata": {"x": NaN}}\n', ", line 1: NaN is not JSON"),
    "infinite": (b'{"prompt": "a", "metadata": {"x": 1e999}}\n', "metadata holds inf"),
    "huge integer": (b'{"prompt": "a", "metadata": {"x": 9223372036854775808}}\n', "an integer beyond 64 bits"),
    "huger integer": (b'{"prompt": "a", "metadata": {"x": ' + b"9" * 5000 + b"}}\n", "JSON that cannot be read"),
    "deep": (b'{"prompt": "a", "metadata": {"x": ' + b"[" * 70 + b"]" * 70 + b"}}\n", "nested deeper"),
    "very deep": (b'{"prompt": ' + b"[" * 100_000 + b"\n", "JSON that cannot be read"),
    "key twice": (b'{"prompt": "a", "label": "x", "label": "y"}\n', "key 'label' is given twice"),
    "near column": (b'{"prompt": "a", "ground_thruth": "1"}\n', "unknown column 'ground_thruth'; did you mean 'ground_truth'?"),
    "column in capitals": (b'{"User_Prompt": "a"}\n', "did you mean 'user_prompt'?"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_is_one_line_that_names_file_and_place(tmp_path, flaw):
    content, expected = FLAWS[flaw]
    assert expected in refused(written(tmp_path, content))


CSV_FLAWS = {
    "empty": ("", "has no rows"),
    "header only": ("prompt,label\n", "has no rows"),
    "column twice": ("prompt,label,label\na,b,c\n", ", line 1: column 'label' is given twice"),
    "blank line": ("prompt\na\n\nb\n", ", line 3: blank line"),
    "open quote": ('prompt\n"a\n', ", line 2: not valid CSV"),
    "old line ends": ("prompt\ra\rb\r", "not valid CSV"),
    "space in header": ("prompt, label\na,b\n", "did you mean 'label'?"),
    "huge cell": ("prompt\n" + "x" * 200_000 + "\n", ", line 2: not valid CSV: field larger than field limit"),
}


@pytest.mark.parametrize("flaw", CSV_FLAWS)
def test_csv_flaw_is_one_line_that_names_file_and_place(tmp_path, flaw):
    content, expected = CSV_FLAWS[flaw]
    assert expected in refused(written(tmp_path, content, "tasks.csv"))


@pytest.mark.parametrize("name", ["none.jsonl", "none.csv", "none.parquet"])
def test_missing_file_is_named(tmp_path, name):
    assert "no such file" in refused(tmp_path / name)


def test_folder_and_unknown_ending_are_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    assert "cannot be read" in refused(tmp_path / "folder.jsonl")
    assert ".jsonl, .csv or .parquet" in refused(written(tmp_path, "a", "tasks.txt"))


def test_broken_parquet_is_one_line(tmp_path):
    assert re.search("cannot be read|can be read", refused(written(tmp_path, b"PAR1 no", "tasks.parquet")))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # the interpreter's own way to make an import fail; no seam is nearer
    assert "pip install pyarrow" in refused(written(tmp_path, b"PAR1", "tasks.parquet"))


def bad_rows(path, **options):
    with pytest.raises(DatasetError) as caught:
        check_tasks(path, **options)
    return caught.value


def test_every_bad_row_is_named_and_good_ones_are_counted(tmp_path):
    good = b'{"prompt": "x"}'
    lines = [good, b"{", good, b"", b'{"label": "1"}', b'"text"', b"\xff", b'{"prompt": 3}', good]
    found = bad_rows(written(tmp_path, b"\n".join(lines)))
    assert [issue.key for issue in found.issues] == [f"line {number}" for number in (2, 4, 5, 6, 7, 8)]
    first, *reported = str(found).splitlines()
    assert first.endswith("tasks.jsonl: 6 rows cannot be tasks") and len(reported) == 6
    assert check_tasks(written(tmp_path, good + b"\n" + good)) == 2


def test_first_twenty_bad_rows_are_named_and_all_counted(tmp_path):
    found = bad_rows(rows(tmp_path, *({"prompt": index} for index in range(100))))
    assert len(found.issues) == 20
    assert "100 rows cannot be tasks, the first 20 of them" in str(found)


def test_unknown_agent_rejects_only_unreadable_rows(tmp_path):
    path = rows(tmp_path, {"question": "no prompt"}, ["no object"])
    assert [issue.key for issue in bad_rows(path, columns=None).issues] == ["line 2"]
    assert count_rows(path) == 2


def test_csv_file_names_bad_rows_and_continues_after_them(tmp_path):
    path = tmp_path / "tasks.csv"
    path.write_text("prompt,label\nx,1\n\nx,1,2\n,1\nx,2\n")
    assert [issue.key for issue in bad_rows(path).issues] == ["line 3", "line 4", "line 5"]
