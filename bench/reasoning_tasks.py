"""Tasks of two families of reasoning-gym (PyPI, Apache-2.0), written to `build/reasoning` for `bench.algorithms`.

    pip install reasoning-gym
    python -m bench.reasoning_tasks

Each row has three worked examples of its family before the question. Letters are counted where the answer is 1, 2 or 3, a third of
the rows each: else most answers are 1, and a policy that always says so earns more than it can by counting. Runs score replies by
`algorithm_agents/reasoning.py` and need no reasoning-gym; that both give the same rewards is checked here, over replies of several
forms.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.algorithm_agents.reasoning import score

OUT = Path(__file__).parents[1] / "build" / "reasoning"
FAMILIES: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "letter_counting": {"min_words": 3, "max_words": 5},
}
BALANCED: dict[str, tuple[str, ...]] = {"letter_counting": ("1", "2", "3")}
EXAMPLES, TRAINED, HELD_OUT = 3, 129, 33


def rows(family: str) -> list[dict[str, Any]]:
    reasoning_gym: Any = importlib.import_module("reasoning_gym")
    size = EXAMPLES + TRAINED + HELD_OUT
    entries: list[Any] = list(reasoning_gym.create_dataset(family, size=20 * size, seed=7, **FAMILIES[family]))
    if answers := BALANCED.get(family):
        by_answer = [[entry for entry in entries if entry["answer"] == answer] for answer in answers]
        entries = [entry for alike in zip(*by_answer, strict=False) for entry in alike]
    entries = entries[:size]
    parts = (("user", "question"), ("assistant", "answer"))
    worked = [{"role": role, "content": entry[part]} for entry in entries[:EXAMPLES] for role, part in parts]
    return [
        {
            "prompt": [*worked, {"role": "user", "content": entry["question"]}],
            "label": entry["answer"],
            "metadata": {"family": family},
        }
        for entry in entries[EXAMPLES:]
    ]


def check_scores(family: str) -> None:
    """Raises ValueError if a reply earns something else here than by reasoning-gym's own scoring."""
    reasoning_gym: Any = importlib.import_module("reasoning_gym")
    theirs = reasoning_gym.get_score_answer_fn(family)
    for entry in reasoning_gym.create_dataset(family, size=200, seed=8, **FAMILIES[family]):
        answer = entry["answer"]
        for reply in (answer, "", "none", f"{answer} times", f"The answer is {answer}.", f"{answer} or {answer}", "1", "10", "-3"):
            if abs(score(reply, answer) - theirs(reply, entry)) > 1e-9:
                raise ValueError(
                    f"{family}: {reply!r} for {answer!r} earns {theirs(reply, entry)}, and {score(reply, answer)} here"
                )


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        try:
            made = rows(family)
            check_scores(family)
        except ImportError as error:
            sys.exit(f"{error}: pip install reasoning-gym")
        for name, part in ((family, made[:TRAINED]), (f"{family}-heldout", made[TRAINED:])):
            (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
            print(f"{len(part)} tasks in {OUT / name}.jsonl")


if __name__ == "__main__":
    main()
