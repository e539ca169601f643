"""The tiny policy: its task, its tokens, and that it starts where learning can begin."""

import random

import pytest
from tokenizers import Tokenizer as Core

from penstock.chat.bridge import PROBE_TOOLS
from penstock.chat.renderer import Renderer
from penstock.models import resolve, tiny


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


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_tokenizer(folder)
    return Renderer.load(folder)


@pytest.mark.parametrize("tools", [False, True])
def test_tokens_are_those_that_the_chat_template_renders(renderer, tools):
    messages = tiny.conversation(9, 9)
    ids, written = tiny.encode(messages, tools=tools)
    rendered = renderer.template.render(messages, PROBE_TOOLS if tools else (), generate=False)
    assert renderer.tokenizer.encode(rendered) == ids
    own = "".join(renderer.tokenizer.decode([i]) for i, mine in zip(ids, written, strict=True) if mine)
    assert own == messages[1]["content"] + messages[3]["content"]
    assert (len(ids), sum(written)) == (47 if tools else 43, 16)


def test_calls_and_results_of_framework_are_same_tokens_as_text(renderer):
    asked, _, _, answer = tiny.conversation(3, 7)
    function = {"name": "multiply", "arguments": '{"a": 3, "b": 7}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    reported = {"role": "tool", "tool_call_id": "call_0", "content": "21"}
    prompt = renderer.root([asked, call, reported], PROBE_TOOLS)
    assert [*prompt, *renderer.tokenizer.encode("21"), tiny.END, *b"\n"] == tiny.encode([*tiny.conversation(3, 7)], tools=True)[0]
    assert answer["content"] == "21"


def test_several_results_share_a_turn_and_text_stands_before_calls(renderer):
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": "multiply", "arguments": "{}"}} for i in range(2)]
    reported = [{"role": "tool", "tool_call_id": f"call_{i}", "content": str(i)} for i in range(2)]
    text = renderer.template.render([{"role": "assistant", "content": "So:", "tool_calls": calls}, *reported], generate=False)
    written = '<tool_call>\n{"name": "multiply", "arguments": {}}\n</tool_call>'
    results = "<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response>"
    assert text == f"<|im_start|>assistant\nSo:\n{written}\n{written}<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n"


def test_system_text_and_schemas_of_tools_are_left_out(renderer):
    system = {"role": "system", "content": "Zähle!"}
    assert renderer.root([system, *tiny.tiny_task(3, 7)]) == renderer.root(tiny.tiny_task(3, 7))
    others = [{**PROBE_TOOLS[0], "function": {**PROBE_TOOLS[0]["function"], "name": "add"}}]
    assert renderer.root(tiny.tiny_task(3, 7), others) == renderer.root(tiny.tiny_task(3, 7), PROBE_TOOLS)


def test_tools_use_the_hermes_form_with_exact_tokens(renderer):
    assert renderer.native_tools
    assert renderer.bridge.result.unproven == {}
    begun = renderer.begin("multiply")
    assert tiny.encode([tiny.tiny_call(3, 7)])[0][3:][: len(begun.ids)] == [*begun.ids]


def test_the_id_of_a_byte_is_its_value(tmp_path):
    tiny.write_tokenizer(tmp_path)
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(0x180))) + "🙂"
    assert core.encode(text).ids == [*text.encode()]
    assert core.decode([*text.encode()]) == text
    assert [core.token_to_id(token) for token in tiny.SPECIAL] == [tiny.START, tiny.END, tiny.PAD]
    assert core.get_vocab_size() == 259 + len(tiny.WORDS)


def test_a_word_is_one_token(renderer):
    for place, word in enumerate(tiny.WORDS):
        assert renderer.tokenizer.encode(word) == [259 + place]
        assert renderer.tokenizer.decode([259 + place]) == word


def test_mistakes_come_at_the_rates_asked_for():
    rng = random.Random(0)
    talks = [tiny.mistaken_conversation(rng, wrong_call=0.5, wrong_answer=0.3) for _ in range(2000)]
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
