"""Text to token ids and back for one model folder, with `tokenizers` alone.

A caller's text never becomes a special token. Messages go through `shield` before the chat template sees them, which breaks
every special token written out in them apart; the template's own special tokens are parsed as usual. So a user who writes
`<|im_end|>` gets those ten characters into the prompt, as plain text, and cannot end a turn.
"""

import codecs
import re
import secrets
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer as Core
from tokenizers import decoders

from penstock.errors import ModelError, RenderError, boundary

UNFINISHED = "\ufffd"
"""What a decoder shows for bytes that are no whole character, or not yet."""

_UTF8 = codecs.getincrementaldecoder("utf-8")

CONTROL = re.compile(r"<\||<\uff5c|\[[A-Z/_]+\]$")
"""How tokens look that frame turns. Some families do not mark all of theirs as special; those that the chat template writes are."""

LONGEST_WAIT = 32
"""Tokens after which bytes that make no character are taken to be none; four would do for UTF-8."""


class TextDecoder(Protocol):
    """Token ids to text, as they come: what it has given out never changes, and in sum equals `decode` of all of them."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain with these; half a character is kept back."""
        ...

    def finish(self) -> str:
        """What was kept back."""
        ...


class Tokenizer:
    """The tokenizer of one model. Special tokens are those that the model folder marks as such, and its end-of-text ids."""

    def __init__(
        self, core: Core, *, template: str | None = None, named: Mapping[str, str] | None = None, eos_ids: Sequence[int] = ()
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.template = template
        """The chat template's source; None where the folder has none."""
        self.named = dict(named or {})
        """Special tokens by the name that templates use: `bos_token`, `eos_token`, …"""
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        added = core.get_added_tokens_decoder()
        self.special_ids = frozenset({*(i for i, token in added.items() if token.special), *self.eos_ids})
        framing = {i for i, token in added.items() if CONTROL.match(token.content) and token.content in (template or "")}
        texts = sorted({text for i in self.special_ids | framing if (text := core.id_to_token(i))}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._break = f"~{secrets.token_hex(8)}~"
        self._byte_level = isinstance(core.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}
        self._spellings: dict[frozenset[int], _Spelling] = {}
        """By what is hidden: a model has one or two such sets."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and what lies beside it; ModelError says what is missing."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder}: no tokenizer.json; give a model folder in the Hugging Face layout with a fast tokenizer")
        with boundary(ModelError, f"{file} cannot be read"):
            core = Core.from_file(str(file))
        settings = _read_json(folder / "tokenizer_config.json")
        named = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _token_text(value))}
        eos_ids = [i for i in (core.token_to_id(named["eos_token"]),) if i is not None] if "eos_token" in named else []
        for name in ("generation_config.json", "config.json"):
            if listed := _read_json(folder / name).get("eos_token_id"):
                eos_ids += listed if isinstance(listed, list) else [listed]
                break
        return cls(core, template=_find_template(folder, settings), named=named, eos_ids=eos_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special tokens parsed except where `shield` broke them; nothing is added or cut."""
        with boundary(RenderError, "the tokenizer cannot take this text"):
            parts = [part for part in text.split(self._break) if part] if self._break in text else [text]
            encodings = self.core.encode_batch_fast(parts, add_special_tokens=False)  # `encode` would find offsets too
            return encodings[0].ids if len(encodings) == 1 else [i for encoding in encodings for i in encoding.ids]

    def shield(self, value: Any) -> Any:
        """`value` (a string, or JSON with strings in it) with every special token's text broken apart, for `encode`."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self._break.join(found.group()), value) if self._special.search(value) else value
        if isinstance(value, dict):
            return {self.shield(key): self.shield(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list | tuple):
            return [self.shield(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that make no character become U+FFFD."""
        decoder = self.decoder()
        return decoder.push(ids) + decoder.finish()

    def decoder(self, *, hidden: Set[int] | None = None) -> TextDecoder:
        """A fresh incremental decoder. Tokens that are `hidden` have no text: the special ones, unless others are named."""
        unseen = self.special_ids if hidden is None else hidden
        if not self._byte_level:
            return _WindowDecoder(self, unseen)
        key = frozenset(unseen)
        if key not in self._spellings:
            self._spellings[key] = _Spelling(self, key)
        return _ByteDecoder(self._spellings[key])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, special or not."""
        known = self._bytes.get(token_id)
        if known is None:
            text = self.core.id_to_token(token_id) or ""
            known = _byte_level(text) if self._byte_level else self.core.decode([token_id], False).encode()
            self._bytes[token_id] = known
        return known


class _Spelling(dict[int, bytes]):
    """The bytes of each token, found when it is first asked for; hidden ones have none."""

    def __init__(self, tokenizer: Tokenizer, hidden: Set[int]) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = known = self._tokenizer.token_bytes(token_id)
        return known


class _ByteDecoder:
    """For byte-level vocabularies: a token is bytes, and only an unfinished character waits."""

    def __init__(self, spelling: _Spelling) -> None:
        self._spell = spelling.__getitem__
        self._utf8 = _UTF8("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._spell, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For every other vocabulary: decode the last few tokens again and give out what grew.

    The window begins at the token before the unfinished ones, since some decoders treat the first token in a special way.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._fixed = 0
        """How many tokens of the window had been given out when it began."""
        self._given = 0
        """How many characters of the window's text have been given out."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in ids if token_id not in self._hidden])

    def finish(self) -> str:
        return self._text()[self._given :]

    def _push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:  # the library's decoder would leave it out, or treat it as a word
            rest = self.finish()
            self._given += len(rest)
            return rest + (self._tokenizer.core.id_to_token(token_id) or "")
        self._window.append(token_id)
        text = self._text()
        unfinished = len(self._window) - self._fixed < LONGEST_WAIT
        certain = len(text.rstrip(UNFINISHED)) if unfinished else len(text)
        new, self._given = text[self._given : certain], max(self._given, certain)
        if certain == len(text):
            self._window = self._window[self._fixed :]
            self._fixed, self._given = len(self._window), len(self._text())
        return new

    def _text(self) -> str:
        return self._tokenizer.core.decode(self._window, True)


def _byte_table() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or one counted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_table()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()  # an added token is written as it is


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; the default one is the chat's
        named = {entry["name"]: entry["template"] for entry in template}  # pyright: ignore[reportUnknownVariableType]
        return named.get("default")  # pyright: ignore[reportUnknownVariableType]
    return template


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    with boundary(ModelError, f"{file} cannot be read"):
        return orjson.loads(file.read_bytes())
