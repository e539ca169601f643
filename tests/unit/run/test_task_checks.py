"""What is notified of a run's tasks before it begins."""

from pathlib import Path

import pytest
from rollout_cases import make_agent

from penstock.errors import RenderError
from penstock.records import Task
from penstock.run.inputs import long_prompts, missing_labels

PATH = Path("tasks.jsonl")


def task(content: str = "2*3", label: str | None = None) -> Task:
    return Task(id="t", prompt=({"role": "user", "content": content},), label=label)


async def run(ctx):
    return None


async def grade(ctx):
    return 1.0


def agent(grader_reads_label: bool = False):
    from penstock import Grader

    class ReadsLabel(Grader):
        async def grade(self, ctx):
            return float(ctx.label == "6")

    made = make_agent(run, grade)
    return (
        type(made)(**{name: getattr(made, name) for name in made.__slots__} | {"grader": ReadsLabel})
        if grader_reads_label
        else made
    )


def test_rows_without_a_label_are_counted_where_others_have_one():
    reported = missing_labels([task(label="6"), task(), task()], agent(), PATH)
    assert reported.startswith("tasks.jsonl: 2 of 3 rows have no label (the first is row 1)")
    assert "add the column `label`" in reported


@pytest.mark.parametrize(("reads", "reported"), [(True, True), (False, False)])
def test_dataset_without_labels_is_reported_of_if_grader_reads_them(reads, reported):
    assert bool(missing_labels([task(), task()], agent(reads), PATH)) is reported


def test_with_all_labels_nothing_is_reported():
    assert missing_labels([task(label="6")], agent(True), PATH) == ""


def render(messages):
    content = messages[0]["content"]
    if "?" in content:
        raise RenderError("cannot")
    return list(range(len(content) + 10))


def test_prompts_past_context_are_counted_with_longest_and_remedy():
    reported = long_prompts([task("x" * 50), task("x" * 100), task("x" * 200), task("?" * 300)], render, 110, PATH)
    assert reported.startswith("tasks.jsonl: 2 of 4 prompts are longer than the model's context of 110 tokens (row 2 has 210)")
    assert "a model with a longer context" in reported


def test_prompts_that_fit_are_not_reported():
    assert long_prompts([task("x" * 99)], render, 110, PATH) == ""
