"""Writes tasks.jsonl and heldout.jsonl, and the same for the tiny policy: always the same rows, and no pair of numbers in both."""

import json
import random
from itertools import combinations_with_replacement, product
from pathlib import Path

TRAIN, HELD_OUT = 256, 64
TINY_TRAIN = 32
SHOWN = {(7, 8), (23, 41)}


def rows() -> list[str]:
    """All rows, the held-out ones last."""
    chance = random.Random(20)
    pairs = sorted(set(combinations_with_replacement(range(2, 100), 2)) - SHOWN)
    drawn = [chance.sample(pair, 2) for pair in chance.sample(pairs, TRAIN + HELD_OUT)]
    return [row(f"What is {a} times {b}?", a * b) for a, b in drawn]


def tiny_rows() -> list[str]:
    """All 40 tasks that the tiny policy knows, in its own few characters; the held-out ones last."""
    pairs = list(product(range(2, 10), range(5, 10)))
    random.Random(20).shuffle(pairs)
    return [row(f"{a}*{b}", a * b) for a, b in pairs]


def row(question: str, answer: int) -> str:
    """One line of a dataset."""
    return json.dumps({"user_prompt": question, "ground_truth": str(answer)}) + "\n"


if __name__ == "__main__":
    here = Path(__file__).parent
    for prefix, written, train in (("", rows(), TRAIN), ("tiny_", tiny_rows(), TINY_TRAIN)):
        (here / f"{prefix}tasks.jsonl").write_text("".join(written[:train]))
        (here / f"{prefix}heldout.jsonl").write_text("".join(written[train:]))
