"""A conversation that an agent reports is compared with the replies that were recorded."""

import pytest

from penstock.rollout.transcripts import Transcript, make_samples, misreported, was_sampled

CALL = {"id": "c", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}
ASKS = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL], "reasoning_content": "hm"}
ANSWERS = {"role": "assistant", "content": "It is 42. "}
RECORDED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "6 times 7?"},
    ASKS,
    {"role": "tool", "tool_call_id": "c", "content": "42"},
    ANSWERS,
]
REPLIES = [ASKS, ANSWERS]

STRANDS = [
    {"role": "user", "content": [{"text": "6 times 7?"}]},
    {
        "role": "assistant",
        "content": [
            {"reasoningContent": {"reasoningText": {"text": "hm"}}},
            {"text": "Let me see."},
            {"toolUse": {"toolUseId": "c", "name": "multiply", "input": {"b": 7, "a": 6}}},
        ],
        "metadata": {"usage": {"inputTokens": 3}},
    },
    {"role": "user", "content": [{"toolResult": {"toolUseId": "c", "status": "success", "content": [{"text": "42"}]}}]},
    {"role": "assistant", "content": [{"text": "It is 42. "}]},
]
AGENTS = [
    {"role": "user", "content": "6 times 7?"},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
    {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "id": "m",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "name": "multiply", "arguments": '{"a":6,"b":7}', "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 42."}]},
]
HONEST = {"openai": RECORDED, "strands": STRANDS, "agents": AGENTS, "trimmed": AGENTS[-1:]}


@pytest.mark.parametrize("form", HONEST)
def test_what_was_sampled_is_known_again_in_every_form(form):
    assert was_sampled(HONEST[form], RECORDED, REPLIES)


def test_results_of_tools_may_follow_the_last_reply():
    assert was_sampled(STRANDS[:3], RECORDED[:3], REPLIES[:1])
    assert was_sampled(AGENTS[:5], RECORDED[:3], REPLIES[:1])


def test_history_that_last_call_did_not_send_was_sampled_anyway():
    assert was_sampled(AGENTS, RECORDED[-1:], REPLIES)


def test_faulty_calls_that_strands_fixes_are_known_again():
    faulty = {"function": {"name": "no such\ntool", "arguments": "{not json"}}
    said = [{"role": "assistant", "content": [{"toolUse": {"toolUseId": "c", "name": "INVALID_TOOL_NAME", "input": {}}}]}]
    recorded = [{"role": "assistant", "content": None, "tool_calls": [faulty]}]
    assert was_sampled(said, recorded, recorded)


LIES = {
    "another answer": [*STRANDS[:3], {"role": "assistant", "content": [{"text": "It is 43."}]}],
    "another call": [*AGENTS[:3], {**AGENTS[3], "arguments": '{"a": 6, "b": 8}'}, *AGENTS[4:]],
    "another tool": [*AGENTS[:3], {**AGENTS[3], "name": "divide"}, *AGENTS[4:]],
    "other thoughts": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "42!"}]}, *AGENTS[2:]],
    "one more": [*RECORDED, {"role": "assistant", "content": "It is 43."}],
    "one before": [{"role": "assistant", "content": "It is 43."}, *RECORDED],
    "words of the user after it": [*RECORDED, {"role": "user", "content": "It is 43."}],
    "the last left out": RECORDED[:-1],
    "another order": [ANSWERS, *RECORDED[:3]],
    "nothing": [],
    "only the user": RECORDED[:2],
    "a role of its own": [*RECORDED, {"role": "Assistant", "content": "It is 43."}],
    "a type of its own": [*AGENTS, {"type": "answer", "text": "It is 43."}],
    "a block of its own": [*STRANDS[:3], {"role": "assistant", "content": [{"text": "It is 42. ", "content": "It is 43."}]}],
    "a list of words": [*STRANDS[:3], {"role": "assistant", "content": ["It is 42. "]}],
    "a number": [*STRANDS[:3], {"role": "assistant", "content": [{"text": 42}]}],
}


@pytest.mark.parametrize("lie", LIES)
def test_what_was_not_sampled_is_found(lie):
    assert not was_sampled(LIES[lie], RECORDED, REPLIES)


def test_grader_gets_the_frameworks_form_only_of_what_was_sampled():
    recorded = {"one": Transcript(RECORDED, [], (0, 1), REPLIES), "two": Transcript(RECORDED, [], (2, 3), REPLIES)}
    reported = {"one": STRANDS, "two": LIES["another answer"], "ghost": STRANDS}
    samples = make_samples(recorded, reported)
    assert [samples[name].messages for name in reported] == [STRANDS, RECORDED, []]
    assert [samples[name].reported_messages for name in reported] == list(reported.values())
    assert [samples[name].transcript for name in reported] == [RECORDED, RECORDED, []]
    assert misreported(samples, reported) == ["two", "ghost"]


def test_replies_are_what_policy_said_not_what_request_brought_along():
    given = {"role": "assistant", "content": "It is 43."}
    edited = {"role": "assistant", "content": "Let me see. ", "tool_calls": [CALL]}  # sent back without its thoughts
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "answer", "arguments": "{}"}}]}
    messages = [given, call, {"role": "user", "content": "6 times 7?"}, edited, {"role": "user", "content": "Well?"}, ANSWERS]
    sample = make_samples({"main": Transcript(messages, [], (0, 1), REPLIES)}, {})["main"]
    assert (sample.messages, sample.replies) == (messages, [edited, ANSWERS])
