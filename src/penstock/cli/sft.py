"""`penstock sft`: a warm start by supervised training on good rollouts of a run, or on a file of conversations."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from penstock.cli.output import warn
from penstock.config import TrainSection, validate
from penstock.errors import ConfigError
from penstock.system.async_tools import INTERRUPTED, TERMINATE_S, Interrupts
from penstock.view.formatting import counts

if TYPE_CHECKING:
    from penstock.train.supervised import Examples, SupervisedResult

USUAL = "smollm2-135m"


def sft(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|FILE.jsonl", help="A run folder with graded rollouts, or a file with `messages` in each line."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The model folder to write; name it in [model] of a run.")],
    model: Annotated[str | None, typer.Option(help="The start policy; by default that of the run, or smollm2-135m.")] = None,
    min_reward: Annotated[float, typer.Option(help="Rollouts of a run with at least this reward are learnt from.")] = 1.0,
    epochs: Annotated[int, typer.Option(min=1, help="How often each conversation is learnt from.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations in an update.")] = 16,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate; by default 2e-5, and 5e-4 for lora.")] = None,
    method: Annotated[str, typer.Option(help="full, or lora: an adapter, merged into the model that is written.")] = "full",
    rank: Annotated[int | None, typer.Option(help="Of the adapter's matrices; by default 16.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of conversations.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a policy on conversations before it trains on its own: one that never succeeds has nothing to learn from."""
    from penstock.cli.output import stage_progress
    from penstock.models.pull import resolve

    given = {"lr": lr, "method": method, "rank": rank}
    section = validate(TrainSection, {key: value for key, value in given.items() if value is not None}, "penstock sft")
    if not source.exists():
        raise ConfigError(f"{source}: no such file or run folder")
    with stage_progress() as progress:
        chosen = model or _model_of(source) or USUAL
        folder = resolve(chosen, progress).path
        examples = _examples(source, folder, min_reward=min_reward)
        from penstock.train.supervised import train_supervised  # torch is loaded here, after what can be refused without it

        def work(stopped: Callable[[], bool]) -> "SupervisedResult":
            return train_supervised(
                folder,
                out,
                examples,
                section,
                epochs=epochs,
                batch_size=batch_size,
                seed=seed,
                on_update=lambda done, total, loss: progress(f"learning, loss {loss:.3f}", done, total),
                tell=warn,
                stopped=stopped,
            )

        result = asyncio.run(_until_stopped(work))
    typer.echo(orjson.dumps({**result._asdict(), "folder": str(out)}).decode() if as_json else _as_text(result, out))
    if result.updates_left:
        raise typer.Exit(INTERRUPTED)


async def _until_stopped(work: "Callable[[Callable[[], bool]], SupervisedResult]") -> "SupervisedResult":
    stop = asyncio.Event()
    with Interrupts(stop, lambda: warn("stopping after this update"), terminate_s=TERMINATE_S):
        return await asyncio.to_thread(work, stop.is_set)


def _model_of(source: Path) -> str | None:
    from penstock.run.folder import find_run_folder

    return find_run_folder(source).config().model.name if source.is_dir() else None


def _examples(source: Path, model: Path, *, min_reward: float) -> "Examples":
    if source.is_dir():
        return asyncio.run(_good_rollouts(source, min_reward))
    from penstock.chat.renderer import Renderer
    from penstock.train.supervised import conversations

    return conversations(source, Renderer.load(model))


async def _good_rollouts(source: Path, min_reward: float) -> "Examples":
    from penstock.run.recorded_run import open_recorded_run
    from penstock.train.supervised import good_rollouts

    async with open_recorded_run(source, channel="train") as recorded:
        return await good_rollouts(recorded.pages(), min_reward=min_reward)


def _as_text(result: "SupervisedResult", out: Path) -> str:
    if result.updates_left:
        total = result.updates + result.updates_left
        return f"stopped after {result.updates} of {total} updates\n  next        run the same command to resume"
    left_out = counts(result.left_out) if result.left_out else "none"
    return "\n".join(
        [
            f"learnt {result.conversations} conversations ({result.tokens} tokens) in {result.updates} updates",
            f"  loss        {result.first_loss:.3f} → {result.last_loss:.3f} per token",
            f"  left out    {left_out}",
            f"  model       {out}",
            f"  next        penstock train … --set 'model.name=\"{out}\"'",
        ]
    )
