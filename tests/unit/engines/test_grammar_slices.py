"""Classes of tokens that a grammar takes as a whole make masks faster, and change none."""

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llguidance")

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.chat.grammars import GrammarWriter
from penstock.chat.parsers.hermes import Hermes
from penstock.engines.embedded.sampling import SLICES
from penstock.records import ReplyFormat

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def tokenizer() -> str:
    """Of 3,000 tokens with up to 20 characters and more."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    made.train([str(page) for page in sorted(DOCS.glob("*.md"))], trainer)
    assert max(map(len, made.get_vocab())) > 20
    return made.to_str()


@pytest.mark.parametrize("length", [None, 0, 3, 9, 12, 17, 40])
def test_masks_inside_strings_are_the_same_without_classes(tokenizer: str, length: int | None):
    text = {"type": "string"} if length is None else {"type": "string", "maxLength": length}
    schema = {"type": "array", "items": {"anyOf": [text, {"type": "string", "pattern": "^[a-z ]{2,12}$"}]}, "minItems": 200}
    lark = GrammarWriter(Hermes(), None, ()).reply(ReplyFormat(schema=schema), (), frozenset(), thinking=False).lark
    fast, plain = (LLMatcher(LLTokenizer(tokenizer, eos_token=0, slices=slices), lark) for slices in (list(SLICES), []))
    rng, most = random.Random(length), 0
    for _ in range(200):
        mask = plain.compute_bitmask()
        assert fast.compute_bitmask() == mask
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        most = max(most, len(allowed))
        token_id = int(rng.choice(allowed))
        assert fast.consume_token(token_id) and plain.consume_token(token_id)
    assert most > (1000 if length is None or length > 8 else 50)
