"""`penstock eval rubric`: a judge over answers in a file."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.evals.rubric import Judged, JudgedRow


def rubric(
    file: Annotated[Path, typer.Option("--data", "-d", help="JSONL: rows with solution, and if you have them prompt and label.")],
    text: Annotated[str, typer.Option("--rubric", "-r", metavar="TEXT|@FILE", help="What makes an answer good.")],
    model: Annotated[str, typer.Option(help="The judge, such as openai/gpt-5-mini; with --url, its name there.")],
    url: Annotated[str, typer.Option(help="Of any OpenAI-compatible endpoint, up to /v1.")] = "",
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Verdicts on each row.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all verdicts to this file, as JSON.")] = None,
    api_key_env: Annotated[str, typer.Option(help="The environment variable that has the key; else the provider's own.")] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one answer of the judge.")] = 60.0,
    score_min: Annotated[float, typer.Option(help="The lowest score.")] = 0.0,
    score_max: Annotated[float, typer.Option(help="The highest.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print a line for each row, with tabs.")] = False,
) -> None:
    """Let another model score answers by a rubric. Exit code 1 where a verdict is missing."""
    from penstock.evals.rubric import judge_file
    from penstock.graders.judge import find_endpoint
    from penstock.graders.rubric import read_rubric
    from penstock.graders.verdict import Scale

    if as_json and plain:
        raise ConfigError("--json and --plain go without each other")
    if score_min >= score_max:
        raise ConfigError(f"--score-min {score_min:g} is not below --score-max {score_max:g}; turn them around")
    found = asyncio.run(
        judge_file(
            file,
            rubric=read_rubric(Path(text[1:])) if text.startswith("@") else text,
            endpoint=find_endpoint(model, url=url, api_key_env=api_key_env, timeout_s=timeout),
            scale=Scale(score_min, score_max),
            samples=number,
            output=output,
            tell=lambda done, total: typer.echo(f"{done}/{total} verdicts", err=True),
        )
    )
    typer.echo(orjson.dumps(found.as_json()).decode() if as_json else "\n".join(map(_plain, found.rows)) if plain else _text(found))
    if found.errors:
        raise typer.Exit(1)


def _plain(row: "JudgedRow") -> str:
    """Row, name, mean score, number of verdicts, number of missing ones."""
    mean = f"{sum(row.scores) / len(row.scores):.6g}" if row.scores else ""
    name = " ".join(row.name.split())
    return "\t".join([str(row.row), name, mean, str(len(row.scores)), str(len(row.errors))])


def _text(found: "Judged") -> str:
    own, lines = found.statistics, [f"\n{len(found.rows)} rows judged by {found.model}, {found.samples} x each.\n"]
    for row in found.rows:
        said = " ".join((row.explanations or row.errors or ("",))[0].split())
        scores = " ".join(f"{score:.3g}" for score in row.scores) or "no verdict"
        lines.append(f"  {row.name[:24]:<25}{scores:<16}{said[:120]}".rstrip())
    if own.mean is not None:
        lines.append(f"\n  {'mean':<12}{own.mean:.3f}   from {own.low:.3g} to {own.high:.3g}, deviation {own.deviation:.3f}")
    if found.errors:
        lines.append(f"  {'missing':<12}{found.errors} verdicts")
    return "\n".join(lines) + "\n"
