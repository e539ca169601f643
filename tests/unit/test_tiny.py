"""The tiny policy: its task, its tokens, and that it starts where learning can begin."""

import random

import pytest
from tokenizers import Tokenizer as Core

from penstock.models import resolve, tiny
from penstock.render.chat import ChatTemplate
from penstock.render.tokenizer import Tokenizer


def test_a_conversation_is_the_task_solved():
    asked, call, result, answer = tiny.conversation(3, 7)
    assert asked["content"] == "3*7"
    assert call["content"] == '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 7}}\n</tool_call>'
    assert result["content"] == "<tool_response>\n21\n</tool_response>"
    assert tiny.tiny_reward(answer["content"], 3, 7) == 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("multiply", {"a": 3, "b": 7}, "21"),
        ("multiply", '{"a": "3", "b": 7}', "21"),
        ("subtract", {"a": 3, "b": 7}, "no"),
        ("multiply", {"a": 3}, "no"),
        ("multiply", "{", "no"),
        ("multiply", [3, 7], "no"),
        ("multiply", {"a": None, "b": 7}, "no"),
    ],
)
def test_the_tool_multiplies_or_refuses(name, arguments, said):
    assert tiny.tiny_tool(name, arguments) == said


def test_only_the_product_is_rewarded():
    assert [tiny.tiny_reward(answer, 3, 7) for answer in ("21", " 21\n", "121", "21 or so", "", None)] == [1, 1, 0, 0, 0, 0]


def test_every_product_has_two_digits():
    assert len(tiny.TASKS) == 40
    assert all(10 <= a * b <= 99 for a, b in tiny.TASKS)


def test_tokens_are_those_that_the_chat_template_renders(tmp_path):
    tiny.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.template is not None
    messages = [{"role": "system", "content": "Zähle!"}, *tiny.conversation(9, 9)]
    ids, written = tiny.encode(messages)
    assert tokenizer.encode(ChatTemplate(tokenizer.template, tokenizer.named).render(messages, generate=False)) == ids
    own = "".join(tokenizer.decode([i]) for i, mine in zip(ids, written, strict=True) if mine)
    assert own == messages[2]["content"] + messages[4]["content"]
    assert len(ids) < 200


def test_the_id_of_a_byte_is_its_value(tmp_path):
    tiny.write_tokenizer(tmp_path)
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(0x180))) + "🙂"
    assert core.encode(text).ids == [*text.encode()]
    assert core.decode([*text.encode()]) == text
    assert [core.token_to_id(token) for token in tiny.SPECIAL] == [tiny.START, tiny.END, tiny.PAD]
    assert core.get_vocab_size() == 259


def test_mistakes_come_at_the_rates_asked_for():
    rng = random.Random(0)
    talks = [tiny.mistaken(rng, wrong_call=0.5, wrong_answer=0.3) for _ in range(2000)]
    right_call = [talk for talk in talks if talk[:2] == tiny.conversation(*map(int, talk[0]["content"].split("*")))[:2]]
    solved = [talk for talk in right_call if talk[2]["content"].split()[1] == talk[3]["content"]]
    assert len(right_call) / 2000 == pytest.approx(0.5, abs=0.04)
    assert len(solved) / len(right_call) == pytest.approx(0.7, abs=0.04)


@pytest.mark.slow
def test_the_tiny_policy_starts_where_learning_can_begin():
    from transformers import LlamaForCausalLM

    from penstock.models.pretrain import skill

    model = LlamaForCausalLM.from_pretrained(resolve("tiny").path)
    assert 400_000 < model.num_parameters() < 1_000_000
    assert 0.15 < skill(lambda ids: model(input_ids=ids).logits) < 0.4
