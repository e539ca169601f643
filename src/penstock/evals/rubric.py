"""Scores the answers in a file with a judge model. Nothing is sampled or recorded."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple, cast

import orjson

from penstock.errors import ConfigError, DatasetError, GraderError
from penstock.graders.judge import Case, Endpoint, LlmJudge, Scale, Verdict
from penstock.graders.rubric import format_conversation
from penstock.system.files import write_file

ANSWERS = ("solution", "solution_str", "messages")
TASKS = ("prompt", "original_input")
REFERENCES = ("label", "ground_truth")
"""Keys of a row, in order of preference: the answer, the task, the reference."""
CONCURRENCY = 8


class RubricCase(NamedTuple):
    name: str
    """Its `id`, else `row N`, from 1 on."""
    case: Case


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """The verdicts on one row."""

    row: int
    """From 1 on."""
    name: str
    scores: tuple[float, ...]
    explanations: tuple[str, ...]
    """One for each score."""
    errors: tuple[str, ...]
    """One for each verdict that is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreStatistics:
    """Statistics of some scores; None if there are no scores."""

    count: int
    mean: float | None
    low: float | None
    high: float | None
    deviation: float | None
    """The standard deviation of these scores, not an estimate for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RubricResult:
    file: str
    model: str
    samples: int
    rows: tuple[JudgedRow, ...]
    statistics: ScoreStatistics
    """Over all scores together."""

    @property
    def errors(self) -> int:
        """The number of missing verdicts."""
        return sum(len(row.errors) for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"errors": self.errors}


def read_answers(path: Path) -> list[RubricCase]:
    """Returns the rows of a JSONL file; DatasetError names the first that cannot be judged."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise DatasetError(f"{path}: cannot be read: {cause}; give a JSONL file of answers") from cause
    found = [_case(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DatasetError(f"{path}: has no row; write one JSON object on each line, with 'solution'")
    return found


async def judge_file(
    path: Path,
    *,
    rubric: str,
    endpoint: Endpoint,
    scale: Scale = Scale(0.0, 1.0),  # noqa: B008  # a tuple
    samples: int = 1,
    output: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RubricResult:
    """Ask the judge `samples` times about every row of `path`; a row without a verdict has its errors.

    `rubric` is the text itself. `progress(done, total)` is called after each verdict. `output` gets the result as JSON.
    """
    rows = read_answers(path)
    if samples < 1:
        raise ConfigError(f"{samples} verdicts for each row: ask for at least one")
    if not rubric.strip():
        raise ConfigError("the rubric is empty; write what makes an answer good")
    _check_output(output)
    verdicts = await _verdicts(LlmJudge(endpoint, rubric, scale), rows, samples, progress)
    judged = [_row(number, row, verdicts[number * samples : (number + 1) * samples]) for number, row in enumerate(rows)]
    scores = [score for row in judged for score in row.scores]
    result = RubricResult(file=str(path), model=endpoint.model, samples=samples, rows=tuple(judged), statistics=statistics(scores))
    if output is not None:
        _write(output, orjson.dumps(result.as_json(), option=orjson.OPT_INDENT_2))
    return result


def statistics(scores: Sequence[float]) -> ScoreStatistics:
    """Works for any number of scores, also none."""
    if not scores:
        return ScoreStatistics(count=0, mean=None, low=None, high=None, deviation=None)
    return ScoreStatistics(count=len(scores), mean=mean(scores), low=min(scores), high=max(scores), deviation=pstdev(scores))


async def _verdicts(
    judge: LlmJudge, rows: Sequence[RubricCase], samples: int, progress: Callable[[int, int], None]
) -> list[Verdict | str]:
    """Returns the verdicts in the order of the rows; an error message in place of a missing one."""
    asked = [row.case for row in rows for _ in range(samples)]
    found: list[Verdict | str] = [""] * len(asked)
    left, done = iter(range(len(asked))), 0

    async def work() -> None:
        nonlocal done
        for place in left:
            try:
                found[place] = await judge.verdict(asked[place])
            except GraderError as error:
                found[place] = str(error)
            done += 1
            progress(done, len(asked))

    async with judge, asyncio.TaskGroup() as workers:
        for _ in range(min(CONCURRENCY, len(asked))):
            workers.create_task(work())
    return found


def _row(number: int, row: RubricCase, verdicts: Sequence[Verdict | str]) -> JudgedRow:
    given = [each for each in verdicts if isinstance(each, Verdict)]
    return JudgedRow(
        row=number + 1,
        name=row.name,
        scores=tuple(each.score for each in given),
        explanations=tuple(each.explanation for each in given),
        errors=tuple(each for each in verdicts if isinstance(each, str)),
    )


def _case(line: str, number: int, path: Path) -> RubricCase:
    try:
        row: Any = orjson.loads(line)
    except ValueError as cause:
        raise DatasetError(f"{path}, row {number}: not valid JSON: {cause}") from cause
    if not isinstance(row, dict):
        raise DatasetError(f"{path}, row {number}: not a JSON object; write one with 'solution'")
    fields = cast("dict[str, Any]", row)
    answer = _text(fields, ANSWERS)
    if not answer.strip():
        raise DatasetError(f"{path}, row {number}: has no answer to judge; put it under 'solution'")
    context = fields.get("metadata")
    case = Case(
        answer,
        task=_text(fields, TASKS),
        reference=_text(fields, REFERENCES),
        context="" if context is None else orjson.dumps(context).decode(),
    )
    return RubricCase(str(fields.get("id") or f"row {number}"), case)


def _text(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first of `keys` that the row has, messages as a conversation."""
    value: Any = next((row[key] for key in keys if row.get(key) is not None), "")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, dict) for each in cast("list[Any]", value)):
        return format_conversation(cast("list[Any]", value))
    return orjson.dumps(value).decode()


def _check_output(output: Path | None) -> None:
    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise ConfigError(f"{output}: a file cannot be written there; name one in a folder that exists")


def _write(path: Path, text: bytes) -> None:
    try:
        write_file(path, text)
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be written: {cause.strerror}; give another file with -o") from cause
