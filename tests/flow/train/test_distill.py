"""Distillation: the policy's own rollouts, judged token by token by a teacher in this process or behind a server."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
import torch
from test_algorithms_learn import credit_of, make_policy, sample_groups
from training_cases import make_decoder, on_policy, plain_logprobs, random_tree, section

from penstock.config import TrainSection
from penstock.engines.embedded.decoder import Decoder
from penstock.errors import ConfigError, EngineError, TrainError
from penstock.records import Sequence
from penstock.train.advantages.base import AlgorithmFunction, SequenceTokens
from penstock.train.advantages.distill import DistillSettings, distill
from penstock.train.algorithm import load_advantage
from penstock.train.learner import Learner
from penstock.train.teachers import ServedTeacher, open_teacher


def test_credit_worked_by_hand():
    tokens = SequenceTokens("r", [0] * 3, [0.0] * 3, [-1.0, -1.0, -1.0], [], [-1.0, -3.0, -0.5])
    assert distill([tokens], DistillSettings()) == [pytest.approx([0.0, -2.0, 0.5])]
    forward = distill([tokens], DistillSettings(kl="forward"))
    assert forward == [pytest.approx([0.0, 0.135335 - 1.0, 1.648721 - 1.0], rel=1e-5)]
    assert distill([tokens], DistillSettings(cap=1.0)) == [pytest.approx([0.0, -1.0, 0.5])]


def divergence(policy: Decoder, teacher: Decoder, seed: int) -> float:
    """The mean gap between the policy's and the teacher's log-probabilities of what the policy samples."""
    torch.manual_seed(seed)
    section = TrainSection()
    learner = Learner(policy, section)
    gaps: list[float] = []
    for number in range(4):
        for s in credit_of(sample_groups(policy, number), section, learner, AlgorithmFunction(lambda group: [1.0] * 8)).sequences:
            kept = torch.tensor(s.trained[1:])
            gaps += (plain_logprobs(policy, s) - plain_logprobs(teacher, s))[kept].tolist()
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize("kl", ["reverse", "forward"])
def test_the_policy_comes_closer_to_its_teacher(kl: str):
    settings = section(
        lr=3e-3, steps=20, grad_clip=1.0, advantage="distill", advantage_settings={"kl": kl, "teacher": "in the test"}
    )
    policy, teacher = make_policy(0), make_policy(3)
    with torch.no_grad():
        teacher.embed.weight.mul_(3.0)  # a teacher with strong opinions
    before = divergence(policy, teacher, 0)
    learner = Learner(policy, settings, teacher=teacher)
    advantage = load_advantage(settings)
    for number in range(20):
        credit = credit_of(sample_groups(policy, number), settings, learner, advantage)
        learner.compute(learner.pack(credit.sequences, rollouts=credit.counts["rollouts"]))
        learner.apply()
    after = divergence(policy, teacher, 0)
    assert before > 0.05 and after < 0.7 * before, (before, after)


class VllmAnswers(BaseHTTPRequestHandler):
    """Answers as vLLM does to a request with `prompt_logprobs`, with the numbers of a small decoder."""

    teacher = make_decoder(seed=4)
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        ids = body["prompt"]
        s = replace(random_tree(0)[0], token_ids=tuple(ids), temperatures=(1.0,) * len(ids))
        with torch.no_grad():
            logprobs = plain_logprobs(self.teacher, s).tolist()
        reported = [None, *({str(i): {"logprob": value, "rank": 1}} for i, value in zip(ids[1:], logprobs, strict=True))]
        self._answer({"choices": [{"prompt_logprobs": reported if "prompt_logprobs" in body else None}]})

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nobody reads it."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), VllmAnswers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def at_one(tree: list[Sequence]) -> list[Sequence]:
    return [replace(s, temperatures=(1.0,) * len(s.token_ids)) for s in tree]


def test_a_served_teacher_says_what_the_same_model_says_here(url: str):
    decoder = make_decoder()
    tree = on_policy(decoder, at_one(random_tree(2)))
    settings = section(advantage="distill", advantage_settings={"teacher": url})
    advantage = load_advantage(settings)
    rewards = [[0.0] * sum(s.trained) for s in tree]
    served = Learner(decoder, settings, teacher=ServedTeacher(url)).credit_tokens(tree, rewards, advantage).sequences
    here = Learner(decoder, settings, teacher=VllmAnswers.teacher).credit_tokens(tree, rewards, advantage).sequences
    for a, b in zip(served, here, strict=True):
        assert a.advantages == pytest.approx(b.advantages, abs=1e-4) and any(a.advantages)
    assert VllmAnswers.asked[-1]["model"] == "teacher"


def test_what_a_served_teacher_cannot_say_is_one_line(url: str):
    [*_, hot] = [replace(s, temperatures=(0.5,) * len(s.token_ids)) for s in random_tree(2)]
    with pytest.raises(TrainError, match="temperature"):
        ServedTeacher(url).logprobs([hot])
    with pytest.raises(EngineError, match="asked"):
        ServedTeacher("http://127.0.0.1:9", "x").logprobs(at_one(random_tree(2))[:1])


def test_a_run_without_a_teacher_is_refused(tmp_path: Any):
    with pytest.raises(ConfigError, match=r"train\.advantage_settings\.teacher"):
        open_teacher(DistillSettings(), tmp_path, like=torch.zeros(1))
