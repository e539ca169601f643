"""A disk that is full: the gateway reports this and when to come again, lives on, and serves on its own once there is room."""

import asyncio
import os
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from penstock.chat.renderer import Renderer
from penstock.gateway.auth import GatewayTokens
from penstock.pool.sqlite import SqlitePool, check_file
from penstock.records import End
from penstock.testing import ScriptedEngine, workbench, write_tokenizer

CONTROL = GatewayTokens(b"a secret for tests only").control
LONG = "to and fro " * 1000
PAGES = 200


@contextmanager
def page_limit(folder: Path) -> Iterator[Path]:
    """SQLite's own limit, reached because of another table in the file."""
    with closing(sqlite3.connect(folder / "pool.db", isolation_level=None)) as other:
        other.execute(f"CREATE TABLE ballast AS SELECT zeroblob({PAGES * 8192}) AS bytes")
        yield folder
        other.execute("DROP TABLE ballast")


@contextmanager
def file_system(folder: Path) -> Iterator[Path]:
    """No byte is left for anyone."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield folder
    ballast.unlink()


@pytest.fixture(params=["page limit", "file system"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, object]]:
    """A folder on a small disk, and what fills it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "page limit":
        yield folder, page_limit
        return
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield folder, file_system
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_is_503_and_served_again_when_space_returns(disk, tmp_path: Path) -> None:
    folder, filled = disk
    renderer = Renderer.load(write_tokenizer(tmp_path / "model"))
    answered, refused = Counter[str](), Counter[str]()

    async def main() -> None:
        pool = SqlitePool(folder, max_pages=PAGES if filled is page_limit else None)
        engine = ScriptedEngine(lambda prompt: "42.", renderer.tokenizer)
        async with workbench(engine, renderer, pool=pool, serves=True) as bench:
            session = await bench.rollout()
            agent, control, number = bench.http(session.token), bench.http(CONTROL), iter(range(1000))

            async def call(*, stream: bool = False) -> bool:
                messages = [{"role": "user", "content": f"{next(number)}: {LONG}"}]
                reply = await agent.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
                if reply.status_code == 200 and ("[DONE]" in reply.text or not stream):
                    answered["whole"] += 1
                    return True
                assert "not_recorded" in reply.text
                assert stream or (reply.status_code, reply.headers["retry-after"]) == (503, "1")
                refused["stream" if stream else "whole"] += 1
                return False

            async def order(path: str, body: object) -> None:
                reply = await control.post(f"/rollouts{path}", json=body)
                assert reply.status_code in (200, 503), reply.text
                assert reply.status_code == 200 or reply.headers["retry-after"] == "1"
                refused["control"] += reply.status_code == 503

            assert await call()
            with filled(folder):
                while await call():  # room that the log had already is still used
                    pass
                async with asyncio.TaskGroup() as together:
                    for kind in range(30):
                        together.create_task(call(stream=bool(kind % 2)))
                for turn in range(200):
                    await order("", {"rollout_id": f"new-{turn}"})
                await order(f"/{session.rollout_id}/grade", {"reward": 1.0, "source": LONG[:200]})
                assert (await agent.get("/health")).status_code == 200
            assert await call() and await call(stream=True)
            await order(f"/{session.rollout_id}/grade", {"reward": 1.0, "source": LONG[:200]})
            await order(f"/{session.rollout_id}/end", {})
            attempt = await bench.attempt(session)
            assert [step.index for step in attempt.steps] == list(range(answered["whole"]))
            assert (attempt.end, len(attempt.grades)) == (End.COMPLETED, 1)
        await pool.close()

    asyncio.run(main())
    print(f"answered {answered.total()}, all recorded; refused {dict(refused)}")
    assert min(refused[kind] for kind in ("whole", "stream", "control")) > 0
    assert check_file(folder / "pool.db", lambda done, of: None).findings == []
