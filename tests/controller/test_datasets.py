"""Datasets: a name stands for whole, checked content or for none, whatever happens on the way."""

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from served_controller import ROWS

from penstock.errors import ControllerError, DatasetError
from penstock_controller.database import ControllerDatabase
from penstock_controller.datasets import Datasets

OTHER = b'{"prompt": "9 times 9?", "label": "81"}\n'


@contextmanager
def opened(folder, **options):
    (folder / "files").mkdir(exist_ok=True)
    database = ControllerDatabase(folder / "c.db")
    datasets = Datasets(database, folder / "files", **options)
    try:
        yield datasets
    finally:
        datasets.close()
        database.close()


async def stream(content, size=7):
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.fixture
def datasets(tmp_path):
    with opened(tmp_path) as found:
        yield found


def kept(folder):
    """Returns the names of the stored files."""
    return [each.name for each in (folder / "files").iterdir()]


async def bring(datasets, name, content=ROWS, extension="jsonl", overwrite_id=None):
    """Uploads a file and completes it."""
    begun = datasets.begin(name, len(content), extension, overwrite_id)
    await datasets.receive(begun.id, stream(content))
    return await datasets.complete(begun.id)


async def test_a_file_is_kept_by_its_digest_and_counted(datasets, tmp_path):
    made = await bring(datasets, "sums")
    assert (made.status, made.rows, made.size) == ("uploaded", 2, len(ROWS))
    assert made.digest == hashlib.sha256(ROWS).hexdigest() and made.path.name == f"{made.digest}.jsonl"
    assert made.path.read_bytes() == ROWS
    assert datasets.get("sums") == datasets.get(made.id) == made
    assert kept(tmp_path) == [made.path.name]


async def test_status_is_pending_uploading_then_uploaded(datasets):
    begun = datasets.begin("sums", len(ROWS), "jsonl")
    seen = [datasets.get("sums").status]

    async def watched():
        async for part in stream(ROWS):
            seen.append(datasets.get(begun.id).status)
            yield part

    await datasets.receive(begun.id, watched())
    await datasets.complete(begun.id)
    seen.append(datasets.get("sums").status)
    assert list(dict.fromkeys(seen)) == ["pending", "uploading", "uploaded"]


@pytest.mark.parametrize("content", [ROWS[:-1], ROWS + b"\n"], ids=["short", "long"])
async def test_wrong_size_is_refused_and_can_be_retried(datasets, tmp_path, content):
    begun = datasets.begin("sums", len(ROWS), "jsonl")
    with pytest.raises(ControllerError, match=str(len(ROWS))) as refused:
        await datasets.receive(begun.id, stream(content))
    assert (refused.value.code, refused.value.status) == ("SIZE_MISMATCH", 400)
    assert not kept(tmp_path)
    await datasets.receive(begun.id, stream(ROWS))
    assert (await datasets.complete(begun.id)).rows == 2


async def test_bad_rows_are_all_reported_each_time(datasets, tmp_path):
    bad = ROWS + b'{"label": 3}\nnot json\n' + ROWS + b'{"prompt": []}\n'
    with pytest.raises(DatasetError) as refused:
        await bring(datasets, "sums", bad)
    assert [issue.key for issue in refused.value.issues] == ["line 3", "line 4", "line 7"]
    assert str(tmp_path) not in str(refused.value) + str(refused.value.issues)
    known = datasets.get("sums")
    assert (known.status, known.digest) == ("error", None) and known.message == str(refused.value)
    with pytest.raises(DatasetError) as again:
        await datasets.complete(known.id)
    assert again.value.issues == refused.value.issues
    assert not kept(tmp_path)
    assert (await bring(datasets, "sums")).id == known.id  # a name without content is free


@pytest.mark.parametrize(
    ("content", "extension", "word"),
    [
        (b"\n", "jsonl", "blank"),
        (b"prompt,label\n", "csv", "no rows"),
        (b"PAR1", "parquet", "parquet"),
        (b"\xff\xfe{}\n", "jsonl", "byte order"),
    ],
)
def test_file_that_is_no_dataset_has_a_reason(tmp_path, content, extension, word):
    with opened(tmp_path) as datasets, pytest.raises(DatasetError, match=word):
        asyncio.run(bring(datasets, "sums", content, extension))


async def test_csv_and_parquet_are_read_too(datasets, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"prompt": ["1 + 1?"], "label": ["2"]}), tmp_path / "sums.parquet")
    assert (await bring(datasets, "a", b'prompt,label\n"1, 2 or 3?",2\n', "csv")).rows == 1
    assert (await bring(datasets, "b", (tmp_path / "sums.parquet").read_bytes(), "parquet")).rows == 1


async def test_a_name_in_use_is_refused_with_its_id(datasets):
    made = await bring(datasets, "sums")
    with pytest.raises(ControllerError) as refused:
        datasets.begin("sums", 5, "jsonl")
    assert (refused.value.status, refused.value.details) == (409, {"existing_dataset_id": made.id})
    with pytest.raises(ControllerError, match="others"):
        datasets.begin("others", 5, "jsonl", made.id)


async def test_overwriting_keeps_the_old_content_until_it_is_complete(datasets):
    made = await bring(datasets, "sums")
    begun = datasets.begin("sums", len(OTHER), "jsonl", made.id)
    assert begun.status == "pending" and datasets.get("sums") == made
    await datasets.receive(begun.id, stream(OTHER))
    assert datasets.get("sums") == made and made.path.read_bytes() == ROWS
    new = await datasets.complete(begun.id)
    assert (new.id, new.rows, new.path.read_bytes()) == (made.id, 1, OTHER)
    assert made.path.read_bytes() == ROWS  # runs that were begun with it refer to it


@pytest.mark.parametrize("how", ["bad", "aborted", "broken"])
async def test_overwriting_that_comes_to_nothing_leaves_the_old_content(datasets, tmp_path, how):
    async def broken():
        yield b"{"
        raise ConnectionResetError

    made = await bring(datasets, "sums")
    begun = datasets.begin("sums", len(OTHER), "jsonl", made.id)
    if how == "broken":
        with pytest.raises(ControllerError):
            await datasets.receive(begun.id, broken())
    else:
        await datasets.receive(begun.id, stream(OTHER.replace(b'"81"', b" 81 ") if how == "bad" else OTHER))
    if how == "bad":
        with pytest.raises(DatasetError):
            await datasets.complete(begun.id)
    datasets.abort(begun.id)
    datasets.abort(begun.id)
    assert datasets.get("sums") == made
    assert kept(tmp_path) == [made.path.name]


async def test_complete_may_be_repeated_and_asked_for_twice_at_once(datasets):
    begun = datasets.begin("sums", len(ROWS), "jsonl")
    with pytest.raises(ControllerError, match="arrived"):
        await datasets.complete(begun.id)
    await datasets.receive(begun.id, stream(ROWS))
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(datasets.complete(begun.id)) for _ in range(2)]
    first, second, third = [task.result() for task in both] + [await datasets.complete(begun.id)]
    assert first == second == third and first.status == "uploaded"
    logged = datasets.logs.page(first.id, limit=50, cursor=None).entries
    assert [entry["step"] for entry in logged] == ["upload", "upload", "validation"]


def test_long_validation_continues_as_processing(tmp_path):
    many = ROWS * 20_000

    async def whole(datasets):
        begun = datasets.begin("sums", len(many), "jsonl")
        await datasets.receive(begun.id, stream(many, 1 << 16))
        answer = await datasets.complete(begun.id)
        while (await datasets.complete(begun.id)).status == "processing":
            pass
        return answer

    with opened(tmp_path, check_wait_s=0.001) as datasets:
        assert asyncio.run(whole(datasets)).status == "processing"
        assert datasets.get("sums").rows == 40_000


async def test_an_upload_that_was_begun_again_refuses_the_first(datasets, tmp_path):
    first = datasets.begin("sums", len(ROWS), "jsonl")
    key = datasets.upload(first.id).key
    again = datasets.begin("sums", len(OTHER), "jsonl")
    assert again.id == first.id
    with pytest.raises(ControllerError, match="again"):
        await datasets.receive(first.id, stream(ROWS), key=key)

    async def overtaken():
        yield OTHER[:3]
        datasets.begin("sums", len(ROWS), "jsonl")
        yield OTHER[3:]

    with pytest.raises(ControllerError, match="again"):
        await datasets.receive(again.id, overtaken(), key=datasets.upload(again.id).key)
    await datasets.receive(again.id, stream(ROWS), key=datasets.upload(again.id).key)
    made = await datasets.complete(again.id)
    assert made.rows == 2 and kept(tmp_path) == [made.path.name]


@pytest.mark.parametrize(
    ("name", "size", "extension", "field"),
    [
        ("../x", 5, "jsonl", "file_name"),
        ("", 5, "jsonl", "file_name"),
        (".x", 5, "jsonl", "file_name"),
        ("x" * 201, 5, "jsonl", "file_name"),
        ("x", 0, "jsonl", "file_size"),
        ("x", -1, "jsonl", "file_size"),
        ("x", 2_000_001, "jsonl", "file_size"),
        ("x", 5, "txt", "extension"),
        ("x", 5, "../csv", "extension"),
    ],
)
def test_invalid_dataset_fields_are_refused(tmp_path, name, size, extension, field):
    with opened(tmp_path, max_mb=2) as datasets:
        with pytest.raises(ControllerError) as refused:
            datasets.begin(name, size, extension)
        assert (refused.value.status, refused.value.details) == (400, {"field": field})
        assert datasets.page(limit=50, offset=0) == ([], 0)


FULL = """
import asyncio, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_datasets import opened, stream
from penstock.errors import ControllerError

content = b'{"prompt": "x"}\\n' * 200_000
with opened(Path(sys.argv[1])) as datasets:
    begun = datasets.begin("sums", len(content), "jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
    try:
        asyncio.run(datasets.receive(begun.id, stream(content, 1 << 16)))
    except ControllerError as error:
        print(error.code, error.status, datasets.get("sums").status, error)
"""


def test_full_disk_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path), str(Path(__file__).parent)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.stdout.startswith("DISK_FULL 507 pending") and "free disk space" in child.stdout, child.stderr
    assert not list((tmp_path / "files").iterdir())


def test_a_file_of_this_machine_is_added_once(datasets, tmp_path):
    (tmp_path / "sums.jsonl").write_bytes(ROWS)
    (tmp_path / "more.jsonl").write_bytes(OTHER)
    made = datasets.add_file(tmp_path / "sums.jsonl", "sums")
    assert datasets.add_file(tmp_path / "sums.jsonl", "sums") == made
    with pytest.raises(ControllerError, match="exists"):
        datasets.add_file(tmp_path / "more.jsonl", "sums")
    assert datasets.add_file(tmp_path / "more.jsonl", "sums", overwrite=True).rows == 1
    with pytest.raises(DatasetError, match="none"):
        datasets.add_file(tmp_path / "none.jsonl", "none")


UPLOAD = """
import asyncio, os, signal, sys
from pathlib import Path
from penstock_controller.database import ControllerDatabase
from penstock_controller.datasets import Datasets

folder, content, last = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
database = ControllerDatabase(folder / "c.db")
datasets = Datasets(database, folder / "files")
steps = 0

def killed(event, arguments):
    global steps
    if event in ("open", "os.rename", "os.remove") and str(folder / "files") in str(arguments[0]):
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

write = database.write
def writing(statement, values=()):
    changed = write(statement, values)
    if statement == "COMMIT":
        killed("open", [folder / "files"])
    return changed
database.write = writing
sys.addaudithook(killed)

async def stream():
    yield content

async def whole():
    begun = datasets.begin("sums", len(content), "jsonl", datasets.get("sums").id)
    await datasets.receive(begun.id, stream())
    print((await datasets.complete(begun.id)).digest)

asyncio.run(whole())
"""


@pytest.mark.slow
def test_kill_at_any_step_leaves_old_or_new_content(tmp_path):
    ends = []
    for last in range(1, 40):
        folder = tmp_path / str(last)
        folder.mkdir()
        with opened(folder) as datasets:
            made = asyncio.run(bring(datasets, "sums"))
        child = subprocess.run([sys.executable, "-c", UPLOAD, str(folder), OTHER.hex(), str(last)], capture_output=True, timeout=60)
        assert child.returncode in (0, -signal.SIGKILL), child.stderr
        with opened(folder) as datasets:
            upload = datasets.upload("sums")
            known = datasets.get("sums")
            assert known.path.read_bytes() == (OTHER if known.rows == 1 else ROWS)
            if upload is not None and upload.digest is not None:
                known = asyncio.run(datasets.complete(made.id))
                assert known.path.read_bytes() == OTHER
            elif known.rows == 2:
                datasets.abort(made.id)
            ends.append((known.rows, upload.state if upload else None))
            assert not [each for each in (folder / "files").iterdir() if each.name.startswith(".")]
        if child.returncode == 0:
            break
    else:
        raise AssertionError("the upload never came to its end")
    assert {rows for rows, _ in ends} == {1, 2} and len(ends) > 5


def test_leftovers_and_old_uploads_are_removed(tmp_path):
    async def half(datasets):
        begun = datasets.begin("sums", len(ROWS), "jsonl")
        await datasets.receive(begun.id, stream(ROWS))

    with opened(tmp_path) as datasets:
        asyncio.run(half(datasets))
        datasets.begin("old", 5, "jsonl")
    (tmp_path / "files" / ".0123.abcd.part").write_bytes(b"half")
    database = ControllerDatabase(tmp_path / "c.db")
    database.write("UPDATE uploads SET begun_at = '2020-01-01T00:00:00.000Z' WHERE size = 5")
    database.close()
    with opened(tmp_path) as datasets:
        assert not list((tmp_path / "files").glob("*.part"))
        assert datasets.get("old").status == "cancelled"
        assert asyncio.run(datasets.complete(datasets.get("sums").id)).rows == 2


async def test_logs_are_paged_in_both_directions(datasets):
    made = await bring(datasets, "sums")
    back = datasets.logs.page(made.id, limit=2, cursor=None)
    assert [entry["step"] for entry in back.entries] == ["upload", "validation"]
    first = datasets.logs.page(made.id, limit=2, cursor=back.next_cursor)
    assert [entry["message"] for entry in first.entries] == [f"a jsonl file of {len(ROWS)} bytes is expected"]
    assert first.next_cursor is None
    on = datasets.logs.page(made.id, limit=50, cursor=None, newer=True)
    assert len(on.entries) == 3 and not datasets.logs.page(made.id, limit=50, cursor=on.next_cursor, newer=True).entries
    assert json.dumps(on.entries[1]["details"]) == json.dumps({"sha256": made.digest})
