"""`penstock eval`: run an agent on tasks, compare evaluations, grade again, and score answers by a rubric."""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli import dry_run
from penstock.cli.output import PLAIN, check_format, warn
from penstock.config import CONFIG_FILE
from penstock.errors import ConfigError, PenstockError
from penstock.system.async_tools import INTERRUPTED

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.evals.rubric import JudgedRow, RubricResult
    from penstock.evals.run import Evaluation


app = typer.Typer(help="Measure an agent.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Plain = Annotated[bool, typer.Option("--plain", help=PLAIN)]


@app.command("run")
def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.toml]", help="The run's config file, the same as for train.")
    ] = None,
    agent: Annotated[Path | None, typer.Option(help="Without a file: the Python file of the agent.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="The tasks; goes before dataset.eval of the file.")] = None,
    model: Annotated[str | None, typer.Option(help="As for `penstock model pull`, or a checkpoint's folder.")] = None,
    engine: Annotated[str | None, typer.Option(help="What samples: embedded, vllm, sglang, openai, anthropic, litellm.")] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Of an endpoint or server; alone, it speaks OpenAI's.")
    ] = None,
    api_key_env: Annotated[str | None, typer.Option(metavar="NAME", help="The variable that holds the endpoint's key.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the evaluation's folder.")] = None,
    samples: Annotated[int | None, typer.Option(help="Attempts at each task.")] = None,
    rows: Annotated[str | None, typer.Option(help="Which tasks, such as 0-9,17.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Rollouts that run at once.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an evaluation of the same name is kept aside.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Make failed attempts again too.")] = False,
    as_json: AsJson = False,
    plain: Plain = False,
    dry: dry_run.Option = False,
) -> None:
    """Run an agent on tasks and report its rewards.

    Run the same command to resume an evaluation that stopped. Ctrl-C stops it (exit code 130); finished rollouts are kept.
    """
    from penstock import api
    from penstock.evals.run import evaluation_config
    from penstock.view.eval_view import EvalView

    check_format(as_json=as_json, plain=plain)
    flags: dict[str, Any] = {
        "model.name": model,
        "engine.name": engine or ("openai" if base_url else None),
        "engine.url": base_url,
        "engine.api_key_env": api_key_env,
        "run.name": name,
        "eval.samples": samples,
        "eval.rows": rows,
        "rollout.concurrency": concurrency,
    }
    set_flags = [f"{key}={orjson.dumps(value).decode()}" for key, value in flags.items() if value is not None]
    config = _config(file, agent, dataset, [*set_flags, *(overrides or [])])
    if dry:
        dry_run.try_once(
            evaluation_config(config), "eval", as_json=as_json, following="penstock eval run" + (f" {file}" if file else "")
        )
    view = EvalView(plain=plain)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = api.evaluate(config=config, progress=view, fresh=fresh, retry_failed=retry_failed)
    except KeyboardInterrupt:
        warn("quit; run the same command to resume")
        raise typer.Exit(INTERRUPTED) from None
    train = "" if agent or not config.engine.trainable else "penstock train" + (f" {file}" if file else "")
    _print_evaluation(found, train, as_json=as_json, plain=plain)
    if found.status == "stopped":
        raise typer.Exit(INTERRUPTED)
    if found.outcome.all_failed:
        if not as_json:
            why = [f"{kind} {each.text}" for kind, each in found.outcome.shortfalls.items() if each.count]
            warn(f"no rollout completed: {'; '.join(why)}")
        raise typer.Exit(1)


@app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="An evaluation's folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one's, over the same tasks.")],
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Compare two evaluations task by task, on the tasks that both tried."""
    from penstock.evals.outcome import compare as paired
    from penstock.view.eval_view import comparison_lines, comparison_text

    check_format(as_json=as_json, plain=plain)
    found = asyncio.run(paired(first, second))
    text = comparison_lines if plain else comparison_text
    typer.echo(orjson.dumps(found.as_json()).decode() if as_json else text(found))


@app.command("regrade")
def regrade(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An evaluation's folder.")],
    agent: Annotated[Path | None, typer.Option(help="The Python file with the other grader; else the same file as before.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the new evaluation's folder.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key, such as grader.strict.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; one of the same name is kept aside.")] = False,
    as_json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Grade an evaluation's rollouts again, without a model call.

    A grader sees the messages as they were recorded, in the OpenAI form, whatever framework the agent used.
    """
    from penstock.evals.regrade import regrade as grade_again
    from penstock.evals.regrade import regrade_config
    from penstock.view.eval_view import regrade_lines, regrade_text

    check_format(as_json=as_json, plain=plain)
    config = regrade_config(folder, agent=agent, name=name or f"{folder.resolve().name}-regraded", overrides=overrides or ())
    with contextlib.redirect_stdout(sys.stderr):
        made, found = asyncio.run(grade_again(folder, config, fresh=fresh))
    page = _write_page(made.path)
    if as_json:
        fields = {"folder": str(made.path), "outcome": found.as_json(), "report": str(page) if page else None}
        typer.echo(orjson.dumps(fields).decode())
    elif plain:
        typer.echo(regrade_lines(found, made.path, page))
    else:
        typer.echo(regrade_text(found, folder, made.path))


@app.command("rubric")
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
    from penstock.graders.judge import Scale, find_endpoint
    from penstock.graders.rubric import read_rubric

    check_format(as_json=as_json, plain=plain)
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
            progress=lambda done, total: typer.echo(f"{done}/{total} verdicts", err=True),
        )
    )
    typer.echo(
        orjson.dumps(found.as_json()).decode()
        if as_json
        else "\n".join(map(_rubric_line, found.rows))
        if plain
        else _rubric_text(found)
    )
    if found.errors:
        raise typer.Exit(1)


def _config(file: Path | None, agent: Path | None, dataset: Path | None, overrides: list[str]) -> "RunConfig":
    from penstock.config import make_config, override
    from penstock.run.inputs import load_run_config

    if file is not None and agent is not None:
        raise ConfigError("--agent goes without a file: set agent.entry in the file, or leave the file out")
    if file is None:
        if agent is None and Path(CONFIG_FILE).exists():
            return _config(Path(CONFIG_FILE), None, dataset, overrides)
        if agent is None or dataset is None:
            raise ConfigError(f"there is no {CONFIG_FILE} here; name a config file, or give --agent and --dataset")
        tree: dict[str, Any] = {"agent": {"entry": str(agent)}, "dataset": {"train": str(dataset)}, "run": {"name": agent.stem}}
        override(tree, overrides)
        return make_config(tree, "the command line")
    config = load_run_config(file, overrides, "eval", warn=warn)
    if dataset is not None:
        config = config.model_copy(update={"dataset": config.dataset.model_copy(update={"eval": dataset})})
    return config


def _print_evaluation(found: "Evaluation", train: str, *, as_json: bool, plain: bool) -> None:
    from penstock.evals.run import as_json as result_fields
    from penstock.view.eval_view import as_text, evaluation_lines

    page = _write_page(Path(found.folder))
    if as_json:
        typer.echo(orjson.dumps(result_fields(found) | {"report": str(page) if page else None}).decode())
    elif plain:
        typer.echo(evaluation_lines(found, page))
    else:
        typer.echo(as_text(found, page, train))


def _write_page(folder: Path) -> Path | None:
    """Write the report and return its path; a report that cannot be written must not fail an evaluation that was made."""
    from penstock.view.eval_page import write_eval_page

    try:
        return asyncio.run(write_eval_page(folder))
    except (PenstockError, OSError) as error:
        warn(f"no report: {error}")
        return None


def _rubric_line(row: "JudgedRow") -> str:
    """Row, name, mean score, number of verdicts, number of missing ones."""
    mean = f"{sum(row.scores) / len(row.scores):.6g}" if row.scores else ""
    name = " ".join(row.name.split())
    return "\t".join([str(row.row), name, mean, str(len(row.scores)), str(len(row.errors))])


def _rubric_text(found: "RubricResult") -> str:
    own, lines = found.statistics, [f"\n{len(found.rows)} rows judged by {found.model}, {found.samples} x each.\n"]
    for row in found.rows:
        reason = " ".join((row.explanations or row.errors or ("",))[0].split())
        scores = " ".join(f"{score:.3g}" for score in row.scores) or "no verdict"
        lines.append(f"  {row.name[:24]:<25}{scores:<16}{reason[:120]}".rstrip())
    if own.mean is not None:
        lines.append(f"\n  {'mean':<12}{own.mean:.3f}   from {own.low:.3g} to {own.high:.3g}, deviation {own.deviation:.3f}")
    if found.errors:
        lines.append(f"  {'missing':<12}{found.errors} verdicts")
    return "\n".join(lines) + "\n"
