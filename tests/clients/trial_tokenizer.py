"""The tokenizer of the scripted model, in a folder as an engine and a trainer read it."""

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.testing import CHATML, write_tokenizer

CORPUS = ("What is 2 plus 3? The sum is 5. Write hello to the file and tell me what you did, please. " * 40,)


@cache
def tokenizer_folder(template: str = CHATML) -> Path:
    """Only the template differs between these folders."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    return write_tokenizer(Path(folder.name), corpus=CORPUS, vocab_size=420, template=template)
