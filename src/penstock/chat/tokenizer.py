"""Tokenizer of one model folder: text to token ids and back, with the `tokenizers` library alone.

A caller's text never becomes a special token. Messages go through `shield` before the chat template sees them: it splits the text
of every special token, while the template's own special tokens are parsed as usual. A user who writes `<|im_end|>` gets those ten
characters as plain text, and cannot end a turn.
"""

import codecs
import re
import secrets
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders

from penstock.errors import ModelError, RenderError, boundary

UNFINISHED = "\ufffd"
"""What a decoder shows for bytes that are not, or not yet, a whole character."""

_UTF8 = codecs.getincrementaldecoder("utf-8")

CONTROL = re.compile(r"<\||<\uff5c|\[[A-Z/_]+\]$")
"""What tokens that frame turns look like. Not all models mark them as special; those in the chat template are treated as such."""

LONGEST_WAIT = 32
"""Tokens after which an unfinished character is given up; UTF-8 needs at most four bytes."""


class TextDecoder(Protocol):
    """Incremental decoder. Text once returned never changes, and all of it together equals `decode` of all ids."""

    def push(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that is final; an unfinished character is kept back."""
        ...

    def finish(self) -> str:
        """Return what was kept back."""
        ...


class Tokenizer:
    """Special tokens are those that the model folder marks as such, and its end-of-text ids."""

    is_known = True
    """See `DialectTokenizer`."""

    def __init__(
        self, core: HfTokenizer, *, template: str | None = None, named: Mapping[str, str] | None = None, eos_ids: Sequence[int] = ()
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.template = template
        """The chat template's source; None if the folder has none."""
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
        self._byte_tables: dict[frozenset[int], _TokenBytes] = {}
        """By the set of hidden ids; a model uses one or two such sets."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and the files next to it; ModelError names what is missing."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder}: no tokenizer.json; give a model folder in the Hugging Face layout with a fast tokenizer")
        with boundary(ModelError, f"{file} cannot be read; restore it or pull the model again"):
            core = HfTokenizer.from_file(str(file))
        settings = _read_json(folder / "tokenizer_config.json")
        named = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _token_text(value))}
        eos_ids = [i for i in (core.token_to_id(named["eos_token"]),) if i is not None] if "eos_token" in named else []
        for name in ("generation_config.json", "config.json"):
            if listed := _read_json(folder / name).get("eos_token_id"):
                eos_ids += listed if isinstance(listed, list) else [listed]
                break
        return cls(core, template=_find_template(folder, settings), named=named, eos_ids=eos_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Special tokens are parsed, except those that `shield` split; nothing is added or truncated."""
        with boundary(RenderError, "the tokenizer cannot take this text"):
            parts = [part for part in text.split(self._break) if part] if self._break in text else [text]
            encodings = self.core.encode_batch_fast(parts, add_special_tokens=False)  # `encode` would compute offsets too
            return encodings[0].ids if len(encodings) == 1 else [i for encoding in encodings for i in encoding.ids]

    def shield(self, value: Any) -> Any:
        """`value` (a string, or JSON with strings in it) with the text of every special token split, for `encode`."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self._break.join(found.group()), value) if self._special.search(value) else value
        if isinstance(value, dict):
            return {self.shield(key): self.shield(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list | tuple):
            return [self.shield(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; invalid bytes become U+FFFD."""
        decoder = self.decoder()
        return decoder.push(ids) + decoder.finish()

    def decoder(self, *, hidden: Set[int] | None = None) -> TextDecoder:
        """A new incremental decoder. `hidden` ids have no text; by default these are the special tokens."""
        hidden_ids = self.special_ids if hidden is None else hidden
        if not self._byte_level:
            return _WindowDecoder(self, hidden_ids)
        key = frozenset(hidden_ids)
        if key not in self._byte_tables:
            self._byte_tables[key] = _TokenBytes(self, key)
        return _ByteDecoder(self._byte_tables[key])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special or not."""
        known = self._bytes.get(token_id)
        if known is None:
            text = self.core.id_to_token(token_id) or ""
            known = _byte_level(text) if self._byte_level else self.core.decode([token_id], False).encode()
            self._bytes[token_id] = known
        return known


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, computed on first use; hidden ones have none."""

    def __init__(self, tokenizer: Tokenizer, hidden: Set[int]) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = known = self._tokenizer.token_bytes(token_id)
        return known


class _ByteDecoder:
    """For byte-level vocabularies: a token is a fixed string of bytes."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._utf8 = _UTF8("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For all other vocabularies: decode the last few tokens again and return what was added.

    The window begins one token before the unfinished ones, because some decoders treat the first token specially.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._fixed = 0
        """Tokens at the window's beginning whose text was returned before."""
        self._returned = 0
        """Characters of the window's text that were returned."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in ids if token_id not in self._hidden])

    def finish(self) -> str:
        return self._text()[self._returned :]

    def _push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:  # the library's decoder would drop it, or treat it as a word
            rest = self.finish()
            self._returned += len(rest)
            return rest + (self._tokenizer.core.id_to_token(token_id) or "")
        self._window.append(token_id)
        text = self._text()
        unfinished = len(self._window) - self._fixed < LONGEST_WAIT
        certain = len(text.rstrip(UNFINISHED)) if unfinished else len(text)
        new, self._returned = text[self._returned : certain], max(self._returned, certain)
        if certain == len(text):
            self._window = self._window[self._fixed :]
            self._fixed, self._returned = len(self._window), len(self._text())
        return new

    def _text(self) -> str:
        return self._tokenizer.core.decode(self._window, True)


def _byte_table() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_table()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()  # an added token is plain text


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates by name; the default one is for chats
        named = {entry["name"]: entry["template"] for entry in template}  # pyright: ignore[reportUnknownVariableType]
        return named.get("default")  # pyright: ignore[reportUnknownVariableType]
    return template


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    with boundary(ModelError, f"{file} cannot be read; restore it or pull the model again"):
        return orjson.loads(file.read_bytes())
