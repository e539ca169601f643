"""`osmosis eval rubric`: scores the answers in a file with a judge, without a controller."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osmosis_ai.cli.output import CliError, Operation, terminal
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.evals.rubric import RubricResult
    from penstock.graders.judge import Endpoint


def rubric(
    context: typer.Context,
    file: Annotated[Path, typer.Option("--data", "-d", help="JSONL: rows with messages or solution_str.")],
    text: Annotated[str, typer.Option("--rubric", "-r", metavar="TEXT|@FILE", help="What makes an answer good.")],
    model: Annotated[str, typer.Option("--model", help="The judge, such as openai/gpt-5-mini.")],
    number: Annotated[int, typer.Option("--number", "-n", help="Verdicts on each row.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all verdicts to this file, as JSON.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Else the provider's environment variable has it.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds for one answer of the judge.")] = None,
    score_min: Annotated[float, typer.Option("--score-min", help="The lowest score.")] = 0.0,
    score_max: Annotated[float, typer.Option("--score-max", help="The highest.")] = 1.0,
) -> Operation:
    """Let another model score answers by a rubric. OPENAI_BASE_URL leads models of OpenAI's name elsewhere."""
    from penstock.evals.rubric import judge_file
    from penstock.graders.judge import Scale
    from penstock.graders.rubric import read_rubric

    if score_min >= score_max:
        raise CliError(f"--score-min {score_min:g} is not below --score-max {score_max:g}; turn them around")
    if timeout is not None and timeout <= 0:
        raise CliError(f"--timeout is {timeout:g}; give a positive number of seconds")
    term = terminal(context)
    judging = judge_file(
        file,
        rubric=read_rubric(Path(text[1:]).expanduser()) if text.startswith("@") else text,
        endpoint=_endpoint(model, api_key, timeout),
        scale=Scale(score_min, score_max),
        samples=number,
        output=_file(output),
        progress=lambda done, total: None if term.mode == "json" else typer.echo(f"{done}/{total} verdicts", err=True),
    )
    return _result(asyncio.run(judging), model, _file(output))


def _endpoint(model: str, key: str | None, timeout_s: float | None) -> "Endpoint":
    from penstock.graders.judge import find_endpoint

    limit_s = 60.0 if timeout_s is None else timeout_s
    provider, _, name = model.rpartition("/")
    url = os.environ.get("OPENAI_BASE_URL") if provider in ("", "openai") else None
    try:
        if url:
            return find_endpoint(name, url=url, key=key or os.environ.get("OPENAI_API_KEY", ""), timeout_s=limit_s)
        return find_endpoint(model, key=key or "", timeout_s=limit_s)
    except ConfigError as error:
        raise CliError(f"{error}, or give --api-key" if "key" in str(error) else str(error)) from error


def _file(output: Path | None) -> Path | None:
    return output / "rubric_eval_result.json" if output is not None and output.is_dir() else output


def _result(found: "RubricResult", model: str, output: Path | None) -> Operation:
    own = found.statistics
    resource: dict[str, Any] = {
        "model": model,
        "data_path": found.file,
        "number": found.samples,
        "statistics": {"count": own.count, "mean": own.mean, "min": own.low, "max": own.high, "std": own.deviation},
        "record_count": len(found.rows),
        "error_count": found.errors,
    }
    records = [
        {"index": row.row, "label": row.name, "scores": row.scores, "explanations": row.explanations, "errors": row.errors}
        for row in found.rows
    ]
    resource |= {"output_path": str(output)} if output else {"records": records}
    if found.errors:
        first = next(error for row in found.rows for error in row.errors)
        raise CliError(f"{found.errors} verdicts are missing; the first: {first}", "PLATFORM_ERROR", **resource)
    lines = [f"{row.name}\t{' '.join(f'{score:g}' for score in row.scores)}" for row in found.rows]
    mean = "" if own.mean is None else f", mean {own.mean:.3f}"
    return Operation(operation="eval.rubric", message=f"Judged {len(found.rows)} rows{mean}.", resource=resource, hints=lines)
