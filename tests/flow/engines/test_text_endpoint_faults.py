"""Endpoints that refuse, fail, hang or talk nonsense: retried where that helps, named where it does not, and no key shown."""

import asyncio
import json

import pytest
from text_endpoint_cases import KEY, WELL, Answer, Endpoint, all_chunks, chunk, open_endpoint

from penstock.engines import SECTIONS
from penstock.engines.text_endpoints.base import TextPart, ToolCallPart
from penstock.errors import ConfigError, EngineBusy, EngineError, RequestError
from penstock.records import Usage

SECRET = "key-that-nobody-may-see"
QUICK = {"first_token_s": 0.2, "stall_s": 0.2, "retries": 1}


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY, SECRET)


def ask(*answers: Answer, kind: str = "openai", **fields):
    """What comes of one request to an endpoint that answers so, and the endpoint."""

    async def work():
        async with Endpoint(*answers) as endpoint:
            return await all_chunks(open_endpoint(kind, endpoint.url, **fields)), endpoint

    return asyncio.run(work())


def refused(error: type[Exception], *answers: Answer, **fields) -> str:
    with pytest.raises(error) as raised:
        ask(*answers, **fields)
    assert SECRET not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("first", [Answer(b"", 429, {"retry-after": "0"}), Answer(b"", 500), Answer(b"", 529), Answer(WELL[:0])])
def test_what_may_pass_is_sent_again_before_anything_came(first):
    found, endpoint = ask(first)
    assert "".join(part.text for each in found for part in each.parts if isinstance(part, TextPart)) == "42"
    assert (found[-1].finish, found[-1].usage) == ("stop", Usage(prompt_tokens=7, completion_tokens=2))
    assert len(endpoint.requests) == 2 and endpoint.requests[0] == endpoint.requests[1]


WHOLE = {
    "openai": {
        "choices": [
            {
                "message": {"content": "42", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
    },
    "anthropic": {
        "type": "message",
        "content": [{"type": "text", "text": "42"}, {"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        "usage": {"input_tokens": 7, "output_tokens": 2},
        "stop_reason": "tool_use",
    },
}


@pytest.mark.parametrize("kind", WHOLE)
def test_an_endpoint_that_does_not_stream_is_read_whole(kind):
    [found], _ = ask(Answer(json.dumps(WHOLE[kind]).encode(), headers={"content-type": "application/json"}), kind=kind)
    assert found.parts[:2] == (TextPart("42"), ToolCallPart("c", "f"))
    assert (found.finish, found.usage) == ("stop", Usage(prompt_tokens=7, completion_tokens=2))


def test_request_shows_the_key_in_one_place():
    _, endpoint = ask(extra={"reasoning_effort": "low"})
    assert endpoint.requests == [
        {
            "model": "far",
            "messages": [{"role": "user", "content": "6 times 7?"}],
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "low",
        }
    ]
    assert endpoint.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert [name for name, value in endpoint.headers[0].items() if SECRET in value] == ["authorization"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(b'{"error": {"message": "bad key key-that-nobody-may-see"}}', 401), f"answered 401.*check the key in {KEY}"),
        (
            Answer(b'{"error": {"message": "no model far"}}', 404),
            r"/v1/chat/completions answered 404.*no model far.*model.name = 'far'",
        ),
        (Answer(b'{"error": {"message": "temperature?"}}', 400), "answered 400.*temperature?"),
        (Answer(b"", 307, {"location": "http://127.0.0.1:9/"}), "answered 307"),
    ],
)
def test_what_would_be_refused_again_is_reported_at_once(answer, said):
    async def work() -> None:
        async with Endpoint(answer) as endpoint:
            with pytest.raises(RequestError, match=said) as raised:
                await all_chunks(open_endpoint("openai", endpoint.url))
            assert (raised.value.code, raised.value.status, len(endpoint.requests)) == ("engine_error", 400, 1)
            assert SECRET not in str(raised.value)

    asyncio.run(work())


def test_agent_hears_of_conversation_that_is_long_as_it_expects():
    async def work() -> None:
        long = Answer(b'{"error": {"message": "This model\'s maximum context length is 8 tokens"}}', 400)
        async with Endpoint(long) as endpoint:
            with pytest.raises(RequestError) as raised:
                await all_chunks(open_endpoint("openai", endpoint.url))
            assert raised.value.code == "context_length_exceeded"

    asyncio.run(work())


BEGUN = chunk({"content": "4"})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(BEGUN), "ended without saying how the reply finished"),
        (Answer(BEGUN + b"data: [DONE]\n\n"), "ended without saying how the reply finished"),
        (Answer(b"<html>", headers={"content-type": "application/json"}), "sent an event that no reply has: <html>"),
        (Answer(BEGUN, hangs=True), "was silent for 0.2 s"),
        (Answer(BEGUN + b"data: {nonsense\n\n"), "sent an event that no reply has: {nonsense"),
        (Answer(b'data: {"choices": 3}\n\n'), "sent an event that no reply has"),
        (Answer(b'data: {"choices": [{"delta": {"content": 4}}]}\n\n'), "sent an event that no reply has"),
        (Answer(BEGUN + b'data: {"error": {"message": "out of memory", "code": "x"}}\n\n'), "reported an error: out of memory"),
        (Answer(BEGUN + chunk({}, finish_reason="content_filter")), r"broke the reply off \(content_filter\)"),
        (
            Answer(chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": "{}"}}]})),
            "called a tool without naming it",
        ),
    ],
)
def test_broken_reply_is_named_and_not_repeated(answer, said):
    async def work() -> None:
        async with Endpoint(answer) as endpoint:
            with pytest.raises(EngineError, match=said):
                await all_chunks(open_endpoint("openai", endpoint.url, **QUICK))
            assert len(endpoint.requests) == 1

    asyncio.run(work())


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (Answer(b"", hangs=True), EngineError, "was silent for 0.2 s; given up after 2 attempts"),
        (Answer(b"", 503), EngineBusy, "answered 503 .*given up after 2 attempts"),
        (Answer(b"<html>", 502), EngineError, "answered 502 .*given up after 2 attempts"),
    ],
)
def test_patience_has_an_end(answer, error, said):
    with pytest.raises(error, match=said):
        ask(answer, answer, **QUICK)


def test_a_wait_longer_than_our_patience_is_not_waited_for():
    text = refused(EngineBusy, Answer(b'{"error": "slow down"}', 429, {"retry-after": "3600"}))
    assert "slow down" in text


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_endpoint_that_is_not_there_is_named_before_anything_begins(kind):
    section = SECTIONS.load(kind)(name=kind, url="http://127.0.0.1:1", api_key_env=KEY)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1/v1/models"):
        section.preflight("far")


def test_endpoint_without_a_model_list_passes():
    async def work() -> None:
        async with Endpoint() as endpoint:
            section = SECTIONS.load("openai")(name="openai", url=endpoint.url, api_key_env=KEY)
            await asyncio.to_thread(section.preflight, "far")
            endpoint.lists = Answer(b'{"error": {"message": "who are you?"}}', 401)
            with pytest.raises(ConfigError, match=f"{KEY}"):
                await asyncio.to_thread(section.preflight, "far")

    asyncio.run(work())


def test_the_vendors_key_goes_to_the_vendor_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    async def work() -> None:
        async with Endpoint(Answer(b"", 401)) as endpoint:
            with pytest.raises(RequestError, match=r"engine\.api_key_env"):
                await all_chunks(open_endpoint("openai", endpoint.url, key=None))
            assert not [value for value in endpoint.headers[0].values() if SECRET in value]

    asyncio.run(work())
    own = SECTIONS.load("openai")(name="openai")
    assert (own.address, own.key_variable, own.key()) == ("https://api.openai.com/v1", "OPENAI_API_KEY", SECRET)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        own.preflight("far")
