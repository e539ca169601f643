"""A function of the author's as the grader: what it received, and what it may give."""

import asyncio
import json

import pytest

from penstock.errors import ConfigError, GraderError
from penstock.sdk.context import GraderContext
from penstock.sdk.samples import RolloutSample
from penstock_compat.graders.function import FunctionGrader, FunctionGraderConfig

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "6 times 7?"},
    {"role": "assistant", "content": "One moment."},
    {"role": "tool", "content": "42"},
    {"role": "tool", "content": "again 42"},
    {"role": "assistant", "content": "42"},
]


def graded(folder, code, **metadata):
    """The reward that the function gives."""
    (folder / "score.py").write_text(code)
    ctx = GraderContext(label="42", samples={"main": RolloutSample(id="main", transcript=TALK)}, metadata=metadata)
    asyncio.run(FunctionGrader(FunctionGraderConfig(path=folder / "score.py")).grade(ctx))
    return ctx.reward


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def compute_score(**given): return {'score': 0.25, 'acc': 1}", 0.25),
        ("async def compute_score(**given): return 1", 1.0),
        ("class Score:\n    def __call__(self, **given): return 0.5\ncompute_score = Score()", 0.5),
    ],
)
def test_function_gives_number_or_mapping_at_once_or_later(tmp_path, code, reward):
    assert graded(tmp_path, code) == reward


def test_function_is_reported_row_all_that_policy_said_and_talk(tmp_path):
    code = (
        "import json, pathlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    given = [data_source, solution_str, ground_truth, extra_info]\n"
        "    pathlib.Path(__file__).with_name('given.json').write_text(json.dumps(given))\n"
        "    return 1\n"
    )
    assert graded(tmp_path, code, data_source="mine", extra_info={"level": 3}) == 1.0
    source, said, truth, extra = json.loads((tmp_path / "given.json").read_text())
    assert (source, said, truth) == ("mine", "One moment.\n42", "42")
    assert (extra["level"], extra["num_turns"], extra["messages"]) == (3, 4, TALK)


@pytest.mark.parametrize("given", ["None", "{'acc': 1}", "'1'", "float('nan')"])
def test_what_is_no_reward_is_refused(tmp_path, given):
    with pytest.raises(GraderError):
        graded(tmp_path, f"def compute_score(**_): return {given}")


def test_a_file_without_the_function_is_named(tmp_path):
    (tmp_path / "score.py").write_text("compute_score = 1")
    with pytest.raises(ConfigError, match="compute_score"):
        FunctionGrader(FunctionGraderConfig(path=tmp_path / "score.py"))
