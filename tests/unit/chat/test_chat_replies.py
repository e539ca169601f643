"""Whole replies, from sampled ids to what an agent sees, over the templates of each family."""

import pytest
from chat_cases import TOOLS, make_renderer
from reply_cases import parse
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from penstock.chat.parsers.deepseek import CALL_END
from penstock.chat.parsers.harmony import Harmony
from penstock.chat.parsers.llama import Llama
from penstock.chat.parsers.mistral import Mistral
from penstock.chat.tokenizer import Tokenizer
from templates.template_cases import renderer

EAGER = pytest.mark.parametrize("eager", [False, True])
A6 = ("multiply", '{"a": 6}')
USER = {"role": "user", "content": "hi"}
CALLS = [{"id": f"call_{i}", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}} for i in range(2)]


def read(model, ids, *, eager=False, prompt=None):
    """What an agent sees of sampled ids, one at a time."""
    decoder, reader = model.decoder(), model.parser(calls=True, eager=eager, prompt=prompt)
    return parse(reader, *(decoder.push([token_id]) for token_id in ids), decoder.finish())


@EAGER
@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral v7", "deepseek v3", "harmony"])
def test_what_a_template_writes_is_read_back(name, eager):
    model = renderer(name)
    prompt = model.root([USER], TOOLS)
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [CALLS[0] | {"id": "abcdefghi"}]}]
    whole = tuple(model.tokenizer.encode(model.template.render(talk, TOOLS, generate=False)))
    assert whole[: len(prompt)] == prompt
    assert set(model.stop_ids) & set(whole[len(prompt) :])
    assert read(model, whole[len(prompt) :], eager=eager, prompt=prompt) == ("", "", [A6])


def ids_of(model, text):
    return model.tokenizer.encode(text)


def test_harmony_ends_reply_at_tokens_and_shows_none_of_them():
    model = renderer("harmony")
    token = model.tokenizer.core.token_to_id
    assert {token("<|return|>"), token("<|call|>")} <= set(model.stop_ids)
    assert token("<|end|>") not in model.stop_ids
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    assert read(model, ids_of(model, said)) == ("Hm.", "42", [])
    assert "return" not in model.decoder().push(ids_of(model, said))


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral v7", "gemma", "deepseek r1"])
def test_what_ends_a_reply_is_never_shown(name):
    model = renderer(name)
    assert model.stop_ids
    assert model.decoder().push(model.stop_ids) == ""


def test_special_tokens_that_are_no_markup_are_not_shown():
    assert read(renderer("qwen3"), ids_of(renderer("qwen3"), "a<|im_start|>b<tool_call>")) == ("", "ab<tool_call>", [])


def test_prompt_that_opens_reasoning_has_its_reply_begin_inside_it():
    model = renderer("deepseek r1")
    ids = ids_of(model, "Six sevens.\n</think>\n\nIt is 42.")
    asked = model.root([USER])
    answered = model.root([USER, {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, {"role": "tool", "content": "42"}])
    assert read(model, ids) == read(model, ids, prompt=asked) == ("Six sevens.", "It is 42.", [])
    assert read(model, ids_of(model, "It is 42."), prompt=answered) == ("", "It is 42.", [])


@EAGER
def test_a_forced_call_closes_the_reasoning_first(eager):
    model = renderer("deepseek r1")
    prompt, begun = model.root([USER], TOOLS), model.begin("multiply")
    assert begun.text.startswith("\n</think>\n\n")
    rest = '{"a": 6}\n```' + CALL_END
    for known in (None, prompt, prompt + begun.ids):
        reader = model.parser(calls=True, eager=eager, prompt=known)
        assert parse(reader, begun.text, rest) == ("", "", [A6])
    assert model.tokenizer.decode(begun.ids) == begun.text


def test_a_forced_name_cannot_smuggle_special_tokens():
    model = renderer("llama3")
    begun = model.begin("<|eot_id|>")
    assert "<|eot_id|>" in begun.text
    assert not model.tokenizer.special_ids & set(begun.ids)


def test_raw_text_is_encoded_as_it_is():
    model = renderer("llama3")
    ids = model.encode_raw("<|eot_id|> é")
    assert not model.tokenizer.special_ids & set(ids)
    assert model.tokenizer.decode(ids) == "<|eot_id|> é"


def test_reasoning_of_a_tool_loop_goes_back_to_the_template():
    reply = {"role": "assistant", "content": "", "reasoning_content": "Six sevens.", "tool_calls": CALLS[:1]}
    for name in ("qwen3", "harmony"):
        ids = renderer(name).root([USER, reply, {"role": "tool", "tool_call_id": "call_0", "content": "42"}], TOOLS)
        assert "Six sevens." in renderer(name).tokenizer.decode(ids)


def test_ids_of_calls_fit_template_and_results_still_find_them():
    talk = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        *({"role": "tool", "tool_call_id": c["id"]} for c in CALLS),
    ]
    plain = Mistral().prepare(talk)
    ids = [call["id"] for call in plain[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in plain[2:]] == ids
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert len(set(ids)) == 2
    assert Mistral().prepare(plain) == plain


def test_several_calls_are_rendered_one_at_a_time():
    reply = {"role": "assistant", "content": "Hm.", "tool_calls": CALLS}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in CALLS]
    plain = Llama().prepare([USER, reply, *results, USER])
    assert [message["role"] for message in plain] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [message["content"] for message in plain[1:5]] == ["Hm.", "call_0", "", "call_1"]
    model = renderer("llama3")
    assert model.root([USER, reply, *results], TOOLS)
    assert model.extend(reply, results, last_id=None, tools=True) is None
    assert model.extend({**reply, "content": "", "tool_calls": CALLS[:1]}, results[:1], last_id=None, tools=True, thought=False)


def test_reasoning_is_dropped_where_templates_take_one_part():
    reply = {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.", "tool_calls": CALLS[:1]}
    assert "reasoning_content" not in Harmony().prepare([reply])[0]
    assert renderer("harmony").root([USER, reply, {"role": "tool", "content": "42"}], TOOLS)


def test_tools_reach_a_model_whose_template_refuses_system_texts(tmp_path):
    template = """{%- for message in messages %}
        {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}{{ raise_exception('no') }}{% endif %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    model = make_renderer(tmp_path, template)
    text = model.tokenizer.decode(model.root([{"role": "system", "content": "Be brief."}, USER], TOOLS))
    assert text.startswith("user\nBe brief.\n\nYou can call functions")
    assert "multiply" in text


def test_markup_is_shown_by_vocabularies_that_are_not_byte_level():
    core = Core(models.BPE({piece: i for i, piece in enumerate(["▁a", "b", "[TOOL_CALLS]", "</s>"])}, []))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens(["[TOOL_CALLS]", "</s>"])
    decoder = Tokenizer(core).decoder(hidden={3})
    assert [decoder.push([token_id]) for token_id in (0, 2, 0, 1, 3)] == ["a", "[TOOL_CALLS]", " a", "b", ""]
