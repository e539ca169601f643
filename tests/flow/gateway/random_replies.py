"""Random replies as models of each family sample them: text, reasoning and tool calls in its markup, tokenized in any way."""

import json
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from templates.template_cases import FAMILIES, renderer

FRAGMENTS = [
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
MARKUP = [
    "<|im_end|>",
    "<|im_start|>user\n",
    "<tool_call>",
    "</tool_call>",
    "</s>",
    "[INST]",
    "{{ messages }}",
    "\ufffd",
    "</think>",
]
WORDS = ["Yes.", "It is 42.", "Réponse: 日本", "I look it up.", "No 🙂", "one two three"]


@dataclass(frozen=True)
class Sample:
    """One reply as the engine samples it."""

    ids: tuple[int, ...]
    finish: str
    canonical: bool
    """Whether the ids are what the template would make of the reply; not known of a reply that says something odd."""


class MarkupToken(str):
    """One token of the family's markup; the same text without this class is only text."""


class ReplySampler:
    """Samples random replies of one family."""

    def __init__(self, name: str, random: Random) -> None:
        self.name = name
        self.renderer = renderer(name)
        self.tokenizer = self.renderer.tokenizer
        self.random = random
        self.atoms = (*FAMILIES[name].special, *FAMILIES[name].plain)
        """Texts that are one token."""

    def id(self, text: str) -> int:
        found = self.tokenizer.core.token_to_id(text)
        assert found is not None, text
        return found

    def turn_end(self, *, calls: bool) -> int:
        """The token that ends a reply's turn in history."""
        if self.name == "harmony":
            return self.id("<|call|>" if calls else "<|end|>")
        return self.id(FAMILIES[self.name].ends[0])

    def text(self, most: int = 5) -> str:
        """Something that anybody may say, ugly or not."""
        if self.random.random() < 0.5:
            return self.random.choice(WORDS)
        return "".join(self.random.choice(FRAGMENTS + MARKUP) for _ in range(self.random.randint(0, most)))

    def sample(self, *, tools: bool) -> Sample:
        """Any reply: mostly something sensible, sometimes noise or nothing."""
        luck = self.random.random()
        if luck < 0.05:
            return self._noise()
        thought = self.text() if self.name in REASONING_FAMILIES and self.random.random() < 0.5 else ""
        calls = [self._arguments() for _ in range(self.random.choice([1, 1, 2]))] if tools and luck < 0.5 else []
        said = "" if luck < 0.1 or (calls and luck < 0.35) else self.text()
        parts = self._parts(thought, said, calls)
        ids, cut = self._cut(parts)
        end, ended = self._end(bool(calls))
        plain = not any(mark in text for text in (thought, said, json.dumps(calls)) for mark in (*self.atoms, *MARKUP))
        tidy = said == said.strip() and thought == thought.strip() and "\x00" not in said
        canonical = plain and tidy and ended and not cut and self._renders(thought, said, calls)
        return Sample((*ids, *end), "stop" if end else "length", canonical)

    def _noise(self) -> Sample:
        """Ids from anywhere, though none that ends a reply, or no ids at all."""
        ends = {self.id(text) for text in FAMILIES[self.name].ends}
        size = self.tokenizer.core.get_vocab_size()
        ids = [self.random.randrange(size) for _ in range(self.random.randint(0, 12))]
        return Sample(tuple(i for i in ids if i not in ends), "length", False)

    def _arguments(self) -> dict[str, object]:
        return {
            key: self.random.choice([self.text(2), 7, None, [1, "é"]])
            for key in self.random.sample("ab", self.random.randint(0, 2))
        }

    def _end(self, calls: bool) -> tuple[list[int], bool]:
        """How the reply ends: as the family does, by another of its stop tokens, or cut; and whether it is the first."""
        ends = FAMILIES[self.name].ends
        own = "<|call|>" if calls and self.name == "harmony" else ends[0]
        luck = self.random.random()
        if luck < 0.75:
            return [self.id(own)], self.name != "harmony" or calls
        return ([self.id(self.random.choice(ends))], False) if luck < 0.85 else ([], False)

    def _renders(self, thought: str, said: str, calls: list[dict[str, object]]) -> bool:
        """Whether the family's template writes such a reply as the model does."""
        if self.name.startswith("mistral") and calls:
            return False  # ids of calls are the gateway's, not the sampled ones
        if calls and said and self.name in ("llama3", "harmony"):
            return False
        if len(calls) > 1 and self.name in ("llama3", "harmony"):
            return False
        return bool(said) or bool(calls)

    def _cut(self, parts: list[str]) -> tuple[list[int], bool]:
        """The ids of `parts`, each cut anywhere, markup aside, so that they are not a tokenizer's; or as a tokenizer has them."""
        if self.random.random() < 0.5:
            whole = "".join(parts)
            return [i for part in parts for i in self._encode(part)] if self._shields(parts) else self.tokenizer.encode(
                whole
            ), False
        ids: list[int] = []
        for part in parts:
            if isinstance(part, MarkupToken):
                ids += self._encode(part)
                continue
            cuts = sorted({0, len(part), *(self.random.randint(0, len(part)) for _ in range(4))})
            for start, end in pairwise(cuts):
                ids += self._encode(part[start:end])
        return ids, True

    def _shields(self, parts: list[str]) -> bool:
        return any(atom in part for part in parts if not isinstance(part, MarkupToken) for atom in self.atoms)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.shield(text) if self._shields([text]) else text)

    def _parts(self, thought: str, said: str, calls: list[dict[str, object]]) -> list[str]:
        """The reply's text, markup tokens apart."""
        written = [json.dumps(call, ensure_ascii=False) for call in calls]
        if self.name == "harmony":
            return _harmony(thought, said, written)
        head = [] if not thought else [MarkupToken("<think>"), f"\n{thought}\n", MarkupToken("</think>"), "\n\n"]
        if thought and self.name == "deepseek r1":
            head = [f"{thought}\n", MarkupToken("</think>"), "\n\n"]
        if self.name.startswith("deepseek"):
            return [*head, said, *_deepseek(written)]
        if self.name.startswith("mistral"):
            space = " " if self.name == "mistral v3" else ""
            listed = ", ".join(
                f'{{"name": "multiply", "arguments": {text}, "id": "abc{place:06d}"}}' for place, text in enumerate(written)
            )
            return [
                space + said if said or not calls else "",
                *([MarkupToken("[TOOL_CALLS]"), f"{space}[{listed}]"] if calls else []),
            ]
        if self.name == "llama3":
            return [said, "; ".join(f'{{"name": "multiply", "parameters": {text}}}' for text in written)]
        return [*head, said, *_hermes(said, written)]


REASONING_FAMILIES = ("qwen3", "qwen3 without thinking", "deepseek v3", "deepseek r1", "harmony")


def _hermes(said: str, written: list[str]) -> list[str]:
    parts: list[str] = []
    for place, text in enumerate(written):
        parts += [
            "\n" if said or place else "",
            MarkupToken("<tool_call>"),
            f'\n{{"name": "multiply", "arguments": {text}}}\n',
            MarkupToken("</tool_call>"),
        ]
    return parts


def _deepseek(written: list[str]) -> list[str]:
    if not written:
        return []
    mark = {
        name: MarkupToken(f"<\uff5c{name}\uff5c>")
        for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
    }
    parts = [mark["tool▁calls▁begin"]]
    for place, text in enumerate(written):
        parts += ["\n" if place else "", mark["tool▁call▁begin"], "function", mark["tool▁sep"]]
        parts += [f"multiply\n```json\n{text}\n```", mark["tool▁call▁end"]]
    return [*parts, mark["tool▁calls▁end"]]


def _harmony(thought: str, said: str, written: list[str]) -> list[str]:
    parts = (
        [
            MarkupToken("<|channel|>"),
            "analysis",
            MarkupToken("<|message|>"),
            thought,
            MarkupToken("<|end|>"),
            MarkupToken("<|start|>"),
            "assistant",
        ]
        if thought
        else []
    )
    if said or not written:
        parts += [MarkupToken("<|channel|>"), "final", MarkupToken("<|message|>"), said]
    for text in written[:1]:
        parts += [MarkupToken("<|end|>"), MarkupToken("<|start|>"), "assistant"] if said else []
        parts += [" to=functions.multiply", MarkupToken("<|channel|>"), "commentary json", MarkupToken("<|message|>"), text]
    return parts
