"""GSM8K, grade-school mathematics: a worked answer ends in `#### ` and its number.

>>> score("6 * 7 = 42\\n#### 42", "42"), score("It is 42.", "42"), score("It is 42.", "42", flexible=True)
(1.0, 0.0, 1.0)
"""

import re

from penstock.errors import DatasetError

MARK = "####"
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(rf"{MARK} *({_NUMBER})")
_ANY = re.compile(_NUMBER)


def score(text: str, truth: str, *, flexible: bool = False) -> float:
    """Returns 1.0 if the last `#### <number>` of `text` equals `truth`, else 0.0; `flexible` takes its last number."""
    found = (_ANY if flexible else _MARKED).findall(text)
    return 1.0 if found and plain_number(found[-1]) == plain_number(truth) else 0.0


def ground_truth(answer: str) -> str:
    """Returns the number at the end of a worked answer of the dataset, without commas."""
    _, mark, number = answer.rpartition(f"{MARK} ")
    truth = plain_number(number)
    if not mark or not _ANY.fullmatch(truth):
        raise DatasetError(f"the answer does not end in '{MARK} ' and a number; take a row of GSM8K's own files")
    return truth


def plain_number(text: str) -> str:
    """Returns a number without commas, dollar signs and surrounding space."""
    return text.replace(",", "").replace("$", "").strip()
