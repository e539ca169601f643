"""Writes tasks.jsonl and heldout.jsonl: the same rows every time, and no pair of numbers in both."""

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

TRAIN, HELD_OUT = 256, 64
SHOWN = {(7, 8), (23, 41)}


def rows() -> list[str]:
    """All rows, the held-out ones last."""
    chance = random.Random(20)
    pairs = sorted(set(combinations_with_replacement(range(2, 100), 2)) - SHOWN)
    drawn = [chance.sample(pair, 2) for pair in chance.sample(pairs, TRAIN + HELD_OUT)]
    return [json.dumps({"user_prompt": f"What is {a} times {b}?", "ground_truth": str(a * b)}) + "\n" for a, b in drawn]


if __name__ == "__main__":
    here, written = Path(__file__).parent, rows()
    (here / "tasks.jsonl").write_text("".join(written[:TRAIN]))
    (here / "heldout.jsonl").write_text("".join(written[TRAIN:]))
