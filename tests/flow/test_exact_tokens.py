"""Promise 1 over generated conversations: every prompt begins with the exact ids that came before, whatever was sampled."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import pytest
from gateway_cases import TOOL, chat, messages_of, real_renderer, renderer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import cache_folder
from penstock.gateway.graph import prompts
from penstock.render.renderer import Renderer
from penstock.testing import CHATML, Scripted, ScriptedEngine, memory_pool, workbench

NATIVE = """
{%- if tools %}{{ '<|im_start|>system\n<tools>' + tools | tojson + '</tools> Use <tool_call>.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

SCRAPS = [
    " ",
    "  ",
    "\n",
    "\r\n",
    "a",
    " the",
    "The",
    "é",
    "e\u0301",
    "🙂",
    "🏽",
    "\u200d",
    "日本",
    "12",
    "345",
    "0.5",
    "<",
    "|",
    "\x00",
]
MARKUP = ["<|im_end|>", "<|im_start|>user\n", "<tool_call>", "</tool_call>", "<tool_response>", "</s>", "{{ messages }}", "\ufffd"]
texts = st.lists(st.sampled_from(SCRAPS + MARKUP) | st.text(max_size=3), max_size=5).map("".join)
calls = st.tuples(texts, st.dictionaries(st.sampled_from("ab"), texts | st.integers(), max_size=2)).map(
    lambda pair: f"{pair[0]}<tool_call>\n{json.dumps({'name': 'multiply', 'arguments': pair[1]}, ensure_ascii=False)}\n</tool_call>"
)


@dataclass(frozen=True)
class Turn:
    """One call: where it goes on from, what it adds, what is sampled."""

    start: str
    back: int
    new: str
    results: list[str]
    reply: str | list[int]
    cuts: list[int]
    end: str
    stream: bool
    echo: str


turns = st.builds(
    Turn,
    start=st.sampled_from(["go on", "go on", "go on", "again", "branch", "fresh", "edit", "restart"]),
    back=st.integers(0, 9),
    new=texts,
    results=st.lists(texts, min_size=1, max_size=2),
    reply=texts | calls | calls | st.lists(st.integers(0, 49_151), max_size=12),
    cuts=st.lists(st.integers(0, 99), max_size=8),
    end=st.sampled_from(["eos", "eos", "length", "other eos"]),
    stream=st.booleans(),
    echo=st.sampled_from(["as it came", "stripped", "as parts", "new ids"]),
)


@dataclass
class Talk:
    """The test's own account of a rollout: what each conversation's tokens must be, by what its messages say."""

    renderer: Renderer
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    histories: list[list[dict]] = field(default_factory=lambda: [[]])

    def sampled(self, turn: Turn) -> tuple[int, ...]:
        """The reply's ids: as given, or its text cut anywhere and each part encoded alone, so not as a tokenizer would."""
        special = self.renderer.tokenizer.core.token_to_id
        ends = {"eos": [special("<|im_end|>")], "other eos": [special("<|endoftext|>")], "length": []}
        if isinstance(turn.reply, list):
            size, ends_early = self.renderer.tokenizer.core.get_vocab_size(), {i for end in ends.values() for i in end}
            ids = [i % size for i in turn.reply if i % size not in ends_early]
        else:
            places = sorted({0, len(turn.reply), *(cut % (len(turn.reply) + 1) for cut in turn.cuts)})
            parts = [turn.reply[a:b] for a, b in pairwise(places)]
            shield, encode = self.renderer.tokenizer.shield, self.renderer.tokenizer.encode
            ids = [token_id for part in parts for token_id in encode(shield(part))]
        return (*ids, *ends[turn.end])

    def messages(self, turn: Turn) -> tuple[list[dict], list[dict]]:
        """The history that the call goes on from, and the messages that it adds."""
        history = self.histories[turn.back % len(self.histories)] if turn.start in ("branch", "edit") else self.histories[-1]
        if turn.start == "fresh":
            history = []
        if turn.start == "edit" and history:
            history = [*history[:-1], {"role": "assistant", "content": "What the agent says it said."}]
        if turn.start == "again" and history:
            return history[: history[-1]["_from"]], history[history[-1]["_from"] : -1]
        asked = history[-1].get("tool_calls") if history and history[-1]["role"] == "assistant" else None
        if asked:
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": text}
                for call, text in zip(asked, turn.results, strict=False)
            ]
            return history, results if turn.back % 2 else [*results, {"role": "user", "content": turn.new}]
        return history, [{"role": "user", "content": turn.new}]


def key(messages) -> str:
    """What messages say, for the test's own account: ids of calls and white space around replies do not count."""
    plain = []
    for m in messages:
        calls = [[c["function"]["name"], json.loads(c["function"]["arguments"])] for c in m.get("tool_calls") or ()]
        text = m["content"] or ""
        plain.append([m["role"], text.strip() if m["role"] == "assistant" else text, calls])
    return json.dumps(plain, sort_keys=True)


def added_text(messages) -> str:
    """What new messages add after a closed reply, written out for ChatML by hand."""
    text = "\n"
    for role, group in groupby(messages, key=lambda message: message["role"]):
        contents = [message["content"] for message in group]
        if role == "tool":
            role, contents = "user", ["\n".join(f"<tool_response>\n{content}\n</tool_response>" for content in contents)]
        text += "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for content in contents)
    return text + "<|im_start|>assistant\n"


def check_prompt(talk: Talk, prompt, history, new) -> None:
    """Compare a prompt with the test's own account of what must come before, and of what is added."""
    core, end = talk.renderer.tokenizer.core, talk.renderer.tokenizer.core.token_to_id("<|im_end|>")
    known = next(
        (i for i in range(len(history), 0, -1) if key(history[:i]) in talk.tokens and history[i - 1]["role"] == "assistant"), 0
    )
    if known == 0:
        assert prompt == talk.renderer.root(strip(history + new), [TOOL])
        return
    before = talk.tokens[key(history[:known])]
    before += () if before[-1] == end else (end,)
    assert prompt[: len(before)] == before
    rest, canonical = prompt[len(before) :], tuple(core.encode(added_text(history[known:] + new), add_special_tokens=False).ids)
    assert core.decode(rest, skip_special_tokens=False) == core.decode(canonical, skip_special_tokens=False)
    if not any(special in str(history[known:] + new) for special in ("<|im_end|>", "<|im_start|>")):
        assert rest == canonical


def strip(messages):
    return [{k: v for k, v in m.items() if k != "_from"} for m in messages]


def echoed(message, echo: str):
    """A reply as agents send it back."""
    if echo == "stripped":
        return message | {"content": (message["content"] or "").strip()}
    if echo == "as parts":
        return message | {"content": [{"type": "text", "text": message["content"] or ""}]}
    if echo == "new ids" and "tool_calls" in message:
        return message | {"tool_calls": [call | {"id": f"mine-{i}"} for i, call in enumerate(message["tool_calls"])]}
    return message


async def converse(plan: list[Turn], talk: Talk) -> None:
    replies: list[Scripted] = []
    engine = ScriptedEngine(lambda _: replies[-1], talk.renderer.tokenizer, chunk=3)
    pool = memory_pool()
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(workbench(engine, talk.renderer, pool=pool))
        session = await bench.rollout()
        http = bench.http(session.token)
        for turn in plan:
            if turn.start == "restart":  # another gateway, which knows the rollout from the pool alone
                http = (await stack.enter_async_context(workbench(engine, talk.renderer, pool=pool))).http(session.token)
            history, new = talk.messages(turn)
            ids = talk.sampled(turn)
            replies.append(Scripted(ids=ids, finish="stop" if turn.end != "length" else "length"))
            sent = [echoed(m, turn.echo) if m["role"] == "assistant" else m for m in strip(history + new)]
            response = await chat(
                http,
                *sent,
                tools=[TOOL],
                stream=turn.stream,
                stop_token_ids=[talk.renderer.tokenizer.core.token_to_id("<|endoftext|>")],
            )
            assert response.status_code == 200, response.text
            check_prompt(talk, engine.prompts[-1], history, new)
            reply = messages_of(response)[0] | {"_from": len(history)}
            conversation = [*history, *new, reply]
            talk.tokens[key(conversation)] = engine.prompts[-1] + ids
            talk.histories.append(conversation)
        attempt = await bench.attempt(session)
        assert list(prompts(attempt).values()) == engine.prompts
        assert [step.completion_ids for step in attempt.steps] == [tuple(reply.ids) for reply in replies]
        assert [step.message for step in attempt.steps] == [strip(h)[-1] for h in talk.histories[1:]]


SMOLLM2 = cache_folder() / "models" / "smollm2-135m"
KINDS = ["bytes", "merges", "native tools", *(["smollm2"] if (SMOLLM2 / "tokenizer.json").is_file() else [])]


def renderer_of(kind: str) -> Renderer:
    if kind == "smollm2":
        return real_renderer(SMOLLM2)
    return renderer(merges=kind != "bytes", template=NATIVE if kind == "native tools" else CHATML)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(KINDS), plan=st.lists(turns, min_size=2, max_size=7))
def test_every_prompt_begins_with_the_exact_tokens_that_came_before(kind, plan):
    asyncio.run(converse(plan, Talk(renderer_of(kind))))
