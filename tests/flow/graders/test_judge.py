"""A judge over real HTTP: its verdicts, its retries, and what it must never do."""

import asyncio
import socket

import pytest
from judge_double import judge_double, says

from penstock.errors import ConfigError
from penstock.graders.judge import Case, JudgeError, LlmJudge, Scale, find_endpoint

KEY = "a-key-that-nobody-may-see"
GOOD = says('{"score": 0.5, "explanation": "half of it"}')


def verdict(url, **settings):
    async def ask():
        async with LlmJudge(find_endpoint("any", url=url, key=KEY, **settings), "Be right.", Scale(0, 1)) as judge:
            return await judge.verdict(Case("42"))

    return asyncio.run(ask())


def test_verdict_takes_one_request_with_key_in_its_header():
    with judge_double(lambda number, body: GOOD) as double:
        assert verdict(double.url, temperature=0.0) == (0.5, "half of it")
    assert (len(double.asked), double.keys, double.asked[0]["model"], double.asked[0]["temperature"]) == (
        1,
        [f"Bearer {KEY}"],
        "any",
        0.0,
    )
    assert KEY not in str(double.asked)


def test_unusable_answer_is_reported_and_second_one_counts():
    with judge_double(lambda number, body: says('{"score": 2}') if number == 1 else GOOD) as double:
        assert verdict(double.url).score == 0.5
    first, second = (body["messages"] for body in double.asked)
    assert second[:2] == first and "the score 2 is not in 0 to 1" in second[3]["content"]


def test_two_unusable_answers_are_an_error_that_quotes_the_second():
    with judge_double(lambda number, body: says(f"I cannot judge, {KEY} {number}")) as double, pytest.raises(JudgeError) as raised:
        verdict(double.url)
    assert len(double.asked) == 2
    assert "no usable verdict, twice" in str(raised.value) and "I cannot judge, *** 2" in str(raised.value)


def test_busy_endpoint_is_asked_again_and_refusal_is_not():
    busy = (429, {"retry-after": "0"}, "slow down")
    with judge_double(lambda number, body: busy if number < 3 else GOOD) as double:
        assert verdict(double.url).score == 0.5
    with judge_double(lambda number, body: busy) as double, pytest.raises(JudgeError, match="429") as raised:
        verdict(double.url)
    assert (len(double.asked), raised.value.status) == (3, 429)
    with judge_double(lambda number, body: (401, {}, f"wrong key {KEY}")) as double, pytest.raises(JudgeError) as raised:
        verdict(double.url)
    assert (len(double.asked), raised.value.status) == (1, 401)
    assert KEY not in str(raised.value) and "wrong key ***" in str(raised.value)


def test_a_redirect_is_not_followed_with_the_key():
    with judge_double(lambda number, body: GOOD) as other:
        aside = (302, {"location": f"{other.url}/chat/completions"}, "")
        with judge_double(lambda number, body: aside) as double, pytest.raises(JudgeError, match="302"):
            verdict(double.url)
    assert other.asked == []


@pytest.mark.parametrize("body", ["", "not JSON", "{}", '{"choices": []}', '{"choices": [{"message": "x"}]}'])
def test_what_is_no_chat_completion_is_named(body):
    with judge_double(lambda number, asked: (200, {}, body)) as double, pytest.raises(JudgeError, match="completion"):
        verdict(double.url)


def test_a_silent_or_absent_endpoint_is_named():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match=r"0\.05"):
            verdict(url, timeout_s=0.05)
    with pytest.raises(JudgeError, match=r"127\.0\.0\.1"):
        verdict(url)


def test_a_providers_name_leads_to_its_endpoint_and_its_key(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = find_endpoint("anthropic/claude-x")
    assert (found.url, found.model, found.key) == ("https://api.anthropic.com/v1", "claude-x", KEY)
    assert KEY not in repr(found)
    assert find_endpoint("org/name", url="http://127.0.0.1:1/v1/").model == "org/name"
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        find_endpoint("gpt-x")
    with pytest.raises(ConfigError, match="nobody"):
        find_endpoint("nobody/gpt")
    with pytest.raises(ConfigError, match="address"):
        find_endpoint("gpt", url="localhost:8000")
