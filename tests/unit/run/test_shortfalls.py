"""Failed, ungraded and wrong: three numbers, each with its most common reason."""

from penstock.run.shortfalls import (
    ScoredEnd,
    Shortfall,
    add_shortfalls,
    read_shortfalls,
    shortfall_rows,
    shortfalls,
    shortfalls_json,
)

ENDS = [
    ScoredEnd("completed", "", 1.0),
    ScoredEnd("completed", "", 0.0),
    ScoredEnd("completed", "", 0.0),
    ScoredEnd("completed", "", 0.5),
    ScoredEnd("agent_error", "KeyError: 'x'", None),
    ScoredEnd("agent_error", "KeyError: 'x'", None),
    ScoredEnd("timeout", "120 s", None),
    ScoredEnd("grader_error", "no reward", None),
    ScoredEnd("completed", "", None),
]


def test_three_numbers_each_with_its_most_common_reason():
    assert shortfalls(ENDS, 1.0) == {
        "failed": Shortfall(3, "2 of them agent_error: KeyError: 'x'"),
        "ungraded": Shortfall(2, "1 of them no reward"),
        "wrong": Shortfall(3, "2 of them reward 0, below 1"),
    }


def test_a_broken_agent_is_not_a_bad_model():
    found = shortfalls([ScoredEnd("agent_error", "boom", None)] * 2, 1.0)
    assert shortfall_rows(found) == [("failed", "2 (agent_error: boom)"), ("ungraded", "0"), ("wrong", "0")]


def test_they_are_read_back_and_added_up():
    one, two = shortfalls(ENDS[:5], 1.0), shortfalls(ENDS[5:], 1.0)
    total = add_shortfalls([read_shortfalls(shortfalls_json(one)), two, read_shortfalls(None)])
    assert [(kind, each.count) for kind, each in total.items()] == [("failed", 3), ("ungraded", 2), ("wrong", 3)]
    assert total["failed"].reason == "1 of them agent_error: KeyError: 'x'"
