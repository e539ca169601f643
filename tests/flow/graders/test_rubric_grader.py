"""A rubric as the grader of an evaluation, and `penstock eval rubric`, against a judge on a real port."""

import json
from pathlib import Path

import pytest
from cli_cases import served
from eval_cases import attempts
from judge_double import judge_double, says

from penstock.cli.app import run

KEY = "a-key-that-nobody-may-see"
AGENT = """
from penstock import AgentWorkflow

class Asker(AgentWorkflow):
    async def run(self, ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)
"""
CONFIG = """
run.name = "judged"
model.name = "tiny"
engine.name = "cli_engine:open_engine"
dataset.train = "tasks.jsonl"
[grader]
name = "rubric"
path = "rubric.md"
model = "judge-of-tests"
api_key_env = "JUDGE_KEY"
score_max = 10
"""


def by_row(number, body):
    """9 for what is asked with a 0 in it, else nothing that can be used."""
    return says('{"score": 9, "explanation": "<i>well done</i>"}' if "0 times" in body["messages"][1]["content"] else "Hm.")


ROWS = [{"prompt": f"{n} times 3?", "label": str(3 * n)} for n in range(2)]
pytestmark = pytest.mark.project(agent=AGENT, config=CONFIG, name="eval.toml", tasks=ROWS)


@pytest.fixture(autouse=True)
def judge_settings(project, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (project / "rubric.md").write_text("Is it right?\n")


def result(capsys, *arguments, code=0):
    capsys.readouterr()
    assert run(["eval", *arguments, "--json"]) == code, capsys.readouterr()
    said = capsys.readouterr()
    return json.loads(said.out or said.err.splitlines()[-1])


def everything(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_judge_grades_rollouts_and_is_no_part_of_them(project, capsys):
    with judge_double(by_row) as double:
        found = result(capsys, "run", "eval.toml", "--set", f"grader.url='{double.url}'")
    outcome, folder = found["outcome"], Path(found["folder"])
    assert (outcome["ends"], outcome["reward"]["value"], outcome["steps"]) == ({"completed": 1, "grader_error": 1}, 4.5, 2)
    assert "no usable verdict, twice" in next(iter(outcome["reasons"]["grader_error"]))
    assert set(double.keys) == {f"Bearer {KEY}"} and KEY.encode() not in everything(project)
    asked = next(body["messages"][1]["content"] for body in double.asked if "0 times" in str(body))
    assert "Is it right?" in asked and "user: 0 times 3?" in asked and "tokens" in asked and "reference" in asked
    assert [grade.source for grade in attempts(folder)[0].grades] == ["rubric"]
    page = Path(found["report"]).read_text()
    assert "judge: &lt;i&gt;well done&lt;/i&gt;" in page


def test_another_rubric_is_another_evaluation(project, capsys):
    with judge_double(by_row) as double:
        arguments = ("run", "eval.toml", "--set", f"grader.url='{double.url}'", "--rows", "0")
        result(capsys, *arguments)
        (project / "rubric.md").write_text("Is it short?\n")
        assert "rubric.md was another" in result(capsys, *arguments, code=2)["error"]["message"]


def test_rubric_judges_stored_rollouts(project, capsys):
    graded = "\nfrom penstock import Grader\n\nclass Fine(Grader):\n    async def grade(self, ctx):\n        return 1.0\n"
    (project / "agent.py").write_text(AGENT + graded)
    (project / "eval.toml").write_text(CONFIG.partition("[grader]")[0])
    result(capsys, "run", "eval.toml", "--rows", "0")
    settings = {"name": "rubric", "rubric": "Is it right?", "model": "judge"}
    with judge_double(by_row) as double:
        flags = [part for key, value in {**settings, "url": double.url}.items() for part in ("--set", f"grader.{key}={value}")]
        found = result(capsys, "regrade", "runs/evals/judged", *flags, "--set", "grader.score_max=9")
    assert (found["outcome"]["reward"]["value"], len(double.asked)) == (9.0, 1)
    assert json.loads((project / "runs/evals/judged-regraded/artifacts/eval-0.0.1/verdict.json").read_text())["score"] == 9.0


def test_a_judge_without_its_key_is_refused_before_anything_runs(project, capsys):
    flags = ("--set", "grader.url='http://127.0.0.1:9/v1'", "--set", "grader.api_key_env='NO_SUCH_KEY'")
    assert "the environment has no NO_SUCH_KEY; set it" in result(capsys, "run", "eval.toml", *flags, code=2)["error"]["message"]
    assert not (project / "runs").exists()


@pytest.mark.slow
def test_gateway_of_ours_can_be_asked_and_garbage_is_error(project, capsys, tmp_path, monkeypatch):
    with served(tmp_path / "judge") as gateway:
        opened = gateway.rollout()
        monkeypatch.setenv("JUDGE_KEY", opened["token"])
        found = result(capsys, "run", "eval.toml", "--rows", "0", "--set", f"grader.url='{opened['base_url']}'", code=1)
    assert (found["outcome"]["ends"], found["outcome"]["steps"]) == ({"grader_error": 1}, 1)
    reason = next(iter(found["outcome"]["reasons"]["grader_error"]))
    assert "no usable verdict, twice" in reason and "tokens" in reason  # which is what its engine says to everything


ROWS = [
    {"solution": "It is 0 times 3.", "prompt": "?", "label": "0", "id": "first"},
    {"solution_str": "no", "original_input": [{"role": "user", "content": "?"}], "ground_truth": "yes", "metadata": {"level": 3}},
]


def write_rows(*rows) -> None:
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def judged(url, *flags):
    return ["rubric", "-d", "answers.jsonl", "-r", "@rubric.md", "--model", "m", "--url", url, "--score-max", "10", *flags]


def test_answers_in_file_are_judged_each_as_often_as_asked(project, capsys):
    write_rows(*ROWS)
    with judge_double(by_row) as double:
        found = result(capsys, *judged(double.url, "-n", "2", "-o", "out.json"), code=1)
    assert [row["scores"] for row in found["rows"]] == [[9.0, 9.0], []]
    assert [row["name"] for row in found["rows"]] == ["first", "row 2"]
    assert (found["statistics"]["mean"], found["statistics"]["deviation"], found["errors"]) == (9.0, 0.0, 2)
    assert json.loads(Path("out.json").read_text()) == found
    assert "user: ?" in str(double.asked) and '{\\"level\\":3}' in json.dumps(double.asked)
    assert len(double.asked) == 2 + 2 * 2 and set(double.keys) == {None}


def test_judged_file_is_printed_as_text_and_tabs(project, capsys):
    write_rows(ROWS[0], ROWS[0] | {"id": "second\tone"})
    with judge_double(by_row) as double:
        assert run(["eval", *judged(double.url)]) == 0
        out, err = capsys.readouterr()
        assert run(["eval", *judged(double.url), "--plain"]) == 0
    assert "2 rows judged by m" in out and "mean        9.000" in out and "2/2 verdicts" in err
    assert capsys.readouterr().out == "1\tfirst\t9\t1\t0\n2\tsecond one\t9\t1\t0\n"


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        ([], [], "has no row"),
        ([{"answer": "x"}], [], "row 1: has no answer to judge"),
        ([[1]], [], "row 1: not a JSON object"),
        (ROWS[:1], ["--score-min", "10"], "not below"),
        (ROWS[:1], ["-r", "@none.md"], "none.md: the rubric cannot be read"),
        (ROWS[:1], ["-r", "  "], "the rubric is empty"),
        (ROWS[:1], ["-d", "none.jsonl"], "none.jsonl: cannot be read"),
        (ROWS[:1], ["-o", "no/such/file.json"], "a file cannot be written there"),
        (ROWS[:1], ["-n", "0"], "-n"),
        (ROWS[:1], ["--plain"], "go without each other"),
        (ROWS[:1], ["--api-key-env", "NO_SUCH_KEY"], "no NO_SUCH_KEY"),
    ],
)
def test_a_mistake_is_one_line_and_asks_nobody(project, capsys, rows, flags, said):
    write_rows(*rows)
    with judge_double(by_row) as double:
        assert said in result(capsys, *judged(double.url, *flags), code=2)["error"]["message"]
    assert double.asked == []
