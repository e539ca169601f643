"""The most likely tokens of a vLLM server, read from its events."""

import json

import pytest

from penstock.engines.servers.vllm import VllmReader, request_body
from penstock.records import Sampling

ASKED = Sampling(max_tokens=9, top_logprobs=2)


def read(sampling: Sampling, *, behaviour_known: bool = True):
    reader = VllmReader([1], sampling, version=3, behaviour_known=behaviour_known)
    likely = [{"token_id:7": -3.0, "token_id:5": -0.5, "token_id:6": -1.0}, {"token_id:8": -0.1, "token_id:9": -2.5}]
    logprobs = {"token_logprobs": [-3.0, -0.1], "tokens": ["token_id:7", "token_id:8"], "top_logprobs": likely}
    choice = {"token_ids": [7, 8], "logprobs": logprobs, "finish_reason": "stop", "prompt_token_ids": [1]}
    reader.feed(json.dumps({"choices": [choice]}).encode())
    return reader.take_chunk()


def test_most_likely_come_first_as_many_as_were_asked_for():
    assert request_body("m", [1], ASKED).items() >= {"logprobs": 2, "return_tokens_as_token_ids": True}.items()
    assert read(ASKED).most_likely == (((5, -0.5), (6, -1.0)), ((8, -0.1), (9, -2.5)))


def test_nothing_is_asked_for_by_default():
    body = request_body("m", [1], Sampling(max_tokens=9))
    assert body["logprobs"] == 0 and "return_tokens_as_token_ids" not in body
    assert read(Sampling(max_tokens=9)).most_likely == ()


@pytest.mark.parametrize(("behaviour_known", "reported"), [(True, 0), (False, 2)])
def test_of_a_tempered_token_only_the_plain_distribution_is_reported(behaviour_known: bool, reported: int):
    tempered = Sampling(max_tokens=9, temperature=0.7, top_logprobs=2)
    assert len(read(tempered, behaviour_known=behaviour_known).most_likely) == reported
