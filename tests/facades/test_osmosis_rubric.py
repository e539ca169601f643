"""`osmosis_ai.evaluate_rubric` against a judge on a real port."""

import asyncio

import pytest
from judge_double import judge_double, says

import osmosis_ai


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")


def evaluated(monkeypatch, answer, solution="It is 42.", **fields):
    with judge_double(lambda number, body: answer) as double:
        monkeypatch.setenv("OPENAI_BASE_URL", double.url)
        found = asyncio.run(osmosis_ai.evaluate_rubric(solution, "Be right.", "openai/gpt-x", **fields))
    return found, double


def test_judge_gets_all_fields_of_an_answer(monkeypatch):
    fields = {"ground_truth": "42", "original_input": "6 x 7?", "metadata": {"level": 3}, "score_max": 10.0}
    found, double = evaluated(monkeypatch, says('{"score": 7, "explanation": "fine"}'), **fields)
    asked = double.asked[0]["messages"][1]["content"]
    assert (found.score, found.explanation, double.asked[0]["model"], double.keys) == (7.0, "fine", "gpt-x", ["Bearer a-key"])
    assert all(part in asked for part in ("Be right.", "It is 42.", "6 x 7?", '{"level": 3}', "0 to 10"))


def test_conversation_is_scored_too(monkeypatch):
    _, double = evaluated(monkeypatch, says('{"score": 1}'), [{"role": "assistant", "content": "hello"}], api_key="another")
    assert "assistant: hello" in double.asked[0]["messages"][1]["content"] and double.keys == ["Bearer another"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (says("no idea"), "ProviderRequestError"),
        (says('{"score": 2}'), "ProviderRequestError"),
        ((404, {}, "no such model"), "ModelNotFoundError"),
        ((401, {}, "wrong key"), "ProviderRequestError"),
    ],
)
def test_what_goes_wrong_has_the_error_of_its_kind(monkeypatch, answer, kind):
    with pytest.raises(osmosis_ai.ProviderRequestError) as raised:
        evaluated(monkeypatch, answer)
    assert (type(raised.value).__name__, raised.value.provider, raised.value.model) == (kind, "openai", "gpt-x")


def test_missing_key_and_unknown_provider_are_errors(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(osmosis_ai.MissingAPIKeyError, match="OPENAI_API_KEY"):
        asyncio.run(osmosis_ai.evaluate_rubric("x", "y", "gpt-x"))
    with pytest.raises(osmosis_ai.ProviderRequestError, match="nobody"):
        asyncio.run(osmosis_ai.evaluate_rubric("x", "y", "nobody/gpt-x"))
    with pytest.raises(ValueError, match="score_max"):
        asyncio.run(osmosis_ai.evaluate_rubric("x", "y", "gpt-x", score_min=1.0))
