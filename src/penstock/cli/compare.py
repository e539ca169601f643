"""`penstock compare`: whether one training run did better than another, pair by pair."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from penstock.view.formatting import aligned

if TYPE_CHECKING:
    from penstock.evals.compare_runs import PairedRewards, RunComparison


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training run.")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="The folder of another run on the same tasks.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare two training runs on held-out tasks and in training.

    Pairs held-out tasks, and training groups of the same task in draw order. Runs with the same seed draw the same tasks.
    """
    from penstock.evals.compare_runs import compare_runs

    found = asyncio.run(compare_runs(first, second))
    typer.echo(orjson.dumps(found.as_json(), option=orjson.OPT_NON_STR_KEYS).decode() if as_json else as_text(found))


def as_text(found: "RunComparison") -> str:
    rows = [("A", found.first), ("B", found.second)]
    for name, pairs in (("held-out", found.held_out), ("training", found.training)):
        rows += _rows(name, pairs)
    if not found.same_seed:
        rows.append(("note", "the runs have other seeds: in training they drew tasks in another order"))
    return f"\n{aligned(rows)}\n"


def _rows(name: str, pairs: "PairedRewards | None") -> list[tuple[str, str]]:
    if pairs is None:
        return [(name, "nothing in common")]
    gain = pairs.difference
    left_out = f", {pairs.left_out} that only one of them has left out" if pairs.left_out else ""
    verdict = "B is better" if gain.low > 0 else "A is better" if gain.high < 0 else "no difference is established"
    return [
        (name, f"A {pairs.first:.3f}, B {pairs.second:.3f} over {pairs.pairs} pairs{left_out}"),
        ("", f"{gain.value:+.3f}, 95 % between {gain.low:+.3f} and {gain.high:+.3f} (p = {gain.p:.2g}): {verdict}"),
        ("", f"B has more in {pairs.better} pairs, less in {pairs.worse}"),
    ]
