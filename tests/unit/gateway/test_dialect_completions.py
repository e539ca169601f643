import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai_cases import answer_to, cut, events_in, message, parse, streamed, tokenizer

from penstock.chat.parsers.base import Text
from penstock.errors import RequestError
from penstock.gateway.dialects.completions import CompletionsDialect


def ask(**body):
    return parse(CompletionsDialect, **{"prompt": "6 times 7 is"} | body)


def whole(call, text, finish="stop"):
    return orjson.loads(CompletionsDialect(tokenizer()).json_body(answer_to(call, message(text), finish)))


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [40, 73], [[40, 73]]])
def test_a_prompt_is_text_or_token_ids(prompt):
    call = ask(prompt=prompt)
    assert call.raw in ("Hi", (40, 73))
    assert (call.messages, call.tools, call.reads_calls) == ((), (), False)


WRONG = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["one", "two"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "two"]}, "prompt"),
    ({"prompt": [True, 2]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [100_000]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"n": 2, "best_of": 4}, "best_of"),
    ({"logprobs": 50}, "logprobs"),
    ({"logprobs": 0, "echo": True}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"stream_options": []}, "stream_options"),
]


@pytest.mark.parametrize(("body", "name"), WRONG, ids=[f"{place}-{name}" for place, (_, name) in enumerate(WRONG)])
def test_what_cannot_be_done_is_refused_by_name(body, name):
    with pytest.raises(RequestError) as refusal:
        ask(**body)
    assert (refusal.value.status, refusal.value.param) == (400, name)


def test_what_is_done_and_what_is_not_is_said():
    call = ask(max_tokens=9, n=2, best_of=2, stop="x", seed=1, user="me", suffix="", logprobs=0, novel=1, other=None)
    assert (call.sampling.max_tokens, call.choices, call.sampling.stop, call.logprobs) == (9, 2, ("x",), True)
    assert call.ignored == ("novel",)


def test_the_whole_answer_is_a_completion_that_the_sdk_validates():
    body = whole(ask(return_token_ids=True, logprobs=0), " 42.", "length")
    (choice,) = Completion.model_validate(body).choices
    assert (choice.text, choice.finish_reason, choice.logprobs.text_offset) == (" 42.", "length", [0, 1, 2, 3])
    assert choice.logprobs.token_logprobs == [-0.5] * 4
    assert (body["choices"][0]["prompt_token_ids"], body["usage"]["total_tokens"]) == ([1, 2, 3], 7)
    assert tokenizer().decode(body["choices"][0]["token_ids"]) == " 42."


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_comes_first_where_it_is_asked_for(stream):
    call = ask(echo=True, stream=stream)
    if stream:
        events = events_in(streamed(CompletionsDialect, answer_to(call, message(" 42.")), [[Text(" 42.")]]))
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "6 times 7 is 42."
    else:
        assert whole(call, " 42.")["choices"][0]["text"] == "6 times 7 is 42."


def test_a_prompt_of_token_ids_is_spelt_out():
    call = ask(prompt=list(tokenizer().encode("6 times 7 is")), echo=True)
    answer = answer_to(call, message(" 42."))
    spelt = tokenizer().decode(answer.prompt.ids)
    assert orjson.loads(CompletionsDialect(tokenizer()).json_body(answer))["choices"][0]["text"] == spelt + " 42."


@given(st.text(), st.integers(1, 5), st.sampled_from(["stop", "length"]))
def test_however_reply_is_cut_stream_adds_up_to_whole_answer(text, size, finish):
    call = ask(stream=True, logprobs=0, return_token_ids=True, stream_options={"include_usage": True})
    *events, usage, done = events_in(
        streamed(CompletionsDialect, answer_to(call, message(text), finish), [[Text(part)] for part in cut(text, size)])
    )
    choices, (expected,) = [event["choices"][0] for event in events], whole(call, text, finish)["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]
    for column in ("tokens", "token_logprobs", "text_offset"):
        assert [value for choice in choices[1:] for value in choice["logprobs"][column]] == expected["logprobs"][column]
    assert (choices[-1]["finish_reason"], usage["choices"], done) == (finish, [], "[DONE]")
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)


def test_stream_that_breaks_ends_with_error_and_no_end_mark():
    (event,) = events_in(
        CompletionsDialect(tokenizer()).error_event(RequestError("the engine failed", status=502, code="engine_error"))
    )
    assert event["error"]["code"] == "engine_error"
