"""GSM8K's own files to rows that flows take: python examples/gsm8k/convert.py RAW.jsonl OUT.jsonl (or OUT.parquet) [LIMIT]"""

import importlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import DatasetError
from penstock.sdk.dataset import DatasetRow, read_rows
from penstock_compat.graders.gsm8k import ground_truth

SOURCE = "openai/gsm8k"
ASKED = 'Think step by step and give the final answer after "####".'
BATCH = 1024

Write = Callable[[Iterable[dict[str, Any]]], None]


def convert(raw: Path, out: Path, limit: int | None = None) -> int:
    """Write the rows of `raw` to `out`, of which nothing is left where one of them is bad; how many there were."""
    rows = (row_of(row, raw.stem, index) for index, row in enumerate(itertools.islice(read_rows(raw), limit)))
    part, count = out.with_name(f"{out.name}.part"), 0
    try:
        with writer(part, parquet=out.suffix == ".parquet") as write:
            while batch := list(itertools.islice(rows, BATCH)):
                write(batch)
                count += len(batch)
        if not count:
            raise DatasetError(f"{raw}: has no rows; give a file of GSM8K")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return count


def row_of(row: DatasetRow, split: str, index: int) -> dict[str, Any]:
    question, answer = (text_of(row, name) for name in ("question", "answer"))
    try:
        truth = ground_truth(answer)
    except DatasetError as cause:
        raise DatasetError(f"{row.where}: {cause}") from cause
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {ASKED}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def text_of(row: DatasetRow, name: str) -> str:
    value = row.columns.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DatasetError(f"{row.where}: no text under {name!r}; a row of GSM8K has 'question' and 'answer'")
    return value


@contextmanager
def writer(file: Path, *, parquet: bool) -> Generator[Write]:
    """What writes batches of rows to a new file."""
    if not parquet:
        with file.open("wb") as lines:
            yield lambda rows: lines.writelines(written(rows))
        return
    arrow: Any = importlib.import_module("pyarrow")
    tables: Any = importlib.import_module("pyarrow.parquet")
    made: list[Any] = []

    def write(rows: Iterable[dict[str, Any]]) -> None:
        table = arrow.Table.from_pylist(list(rows))
        if not made:
            made.append(tables.ParquetWriter(file, table.schema))
        made[0].write_table(table)

    try:
        yield write
    finally:
        for each in made:
            each.close()


def written(rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for row in rows:
        yield orjson.dumps(row) + b"\n"


def main(arguments: list[str]) -> str | None:
    """What went wrong, as one line; None where all went well."""
    if len(arguments) not in (2, 3) or not all(each.isdigit() for each in arguments[2:]):
        return __doc__
    raw, out, *limit = arguments
    try:
        count = convert(Path(raw), Path(out), int(limit[0]) if limit else None)
    except (DatasetError, OSError) as error:
        return str(error)
    print(f"{out}: {count:,} rows")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
