"""Tasks of the benches: what is asked can be answered."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

AGENTS = Path(__file__).parents[2] / "bench" / "algorithm_agents"
AGENT: dict[str, Any] = runpy.run_path(str(AGENTS / "three_tools.py"))
carry_out, NOTHING = AGENT["carry_out"], AGENT["NOTHING"]
CALLS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "calculate": lambda words: {"a": int(words[2]), "operator": words[3], "b": int(words[4])},
    "price": lambda words: {"thing": next(word for word in reversed(words) if word != "cost")},
    "convert": lambda words: {"amount": int(words[4]), "unit": words[5], "to": words[2]},
}


@pytest.mark.parametrize("file", ["three_tools.jsonl", "three_tools-heldout.jsonl"])
def test_every_question_of_the_three_tools_has_a_call_that_finds_its_answer(file: str):
    rows = [json.loads(line) for line in (AGENTS / file).read_text().splitlines()]
    for row in rows:
        name, words = row["metadata"]["tool"], row["prompt"].rstrip("?").split()
        assert carry_out(name, json.dumps(CALLS[name](words))).split()[0] == row["label"], row
    assert {row["metadata"]["tool"] for row in rows} == {"calculate", "price", "convert"}


@pytest.mark.parametrize("arguments", ["", "[]", '{"a": 1}', '{"thing": "moon"}', '{"amount": "x", "unit": "m", "to": "cm"}'])
def test_a_call_that_cannot_be_carried_out_is_told_so(arguments: str):
    assert [carry_out(name, arguments) for name in ("calculate", "price", "convert", "none")] == [NOTHING] * 4
