"""Tasks of two families of reasoning-gym (PyPI, Apache-2.0), written to `build/reasoning` for `bench.algorithms`.

    pip install reasoning-gym
    python -m bench.reasoning_tasks

Each row has three worked examples of its family before the question, and the entry that the family's own scoring takes.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "build" / "reasoning"
FAMILIES: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "letter_counting": {"min_words": 3, "max_words": 5},
}
EXAMPLES, TRAINED, HELD_OUT = 3, 128, 32


def rows(family: str) -> list[dict[str, Any]]:
    reasoning_gym: Any = importlib.import_module("reasoning_gym")
    entries: list[Any] = list(reasoning_gym.create_dataset(family, size=EXAMPLES + TRAINED + HELD_OUT, seed=7, **FAMILIES[family]))
    parts = (("user", "question"), ("assistant", "answer"))
    worked = [{"role": role, "content": entry[part]} for entry in entries[:EXAMPLES] for role, part in parts]
    return [
        {
            "prompt": [*worked, {"role": "user", "content": entry["question"]}],
            "label": entry["answer"],
            "metadata": {"family": family, "entry": json.loads(json.dumps(entry, default=str))},
        }
        for entry in entries[EXAMPLES:]
    ]


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        try:
            made = rows(family)
        except ImportError as error:
            sys.exit(f"{error}: pip install reasoning-gym")
        for name, part in ((family, made[:TRAINED]), (f"{family}-heldout", made[TRAINED:])):
            (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
            print(f"{len(part)} tasks in {OUT / name}.jsonl")


if __name__ == "__main__":
    main()
