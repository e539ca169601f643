"""A run in PostgreSQL, from the command line: it trains and continues, starts over, and is not taken for another of its name."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cli_cases import called
from postgres_server import server_url

pytestmark = pytest.mark.slow
TINY = Path(__file__).parents[2] / "examples" / "multiply" / "tiny.toml"


def train(folder: Path, steps: int, *more: str, url: str | None = None) -> CompletedProcess[str]:
    where = f'pool.url="{server_url() if url is None else url}"'
    training = [f"train.steps={steps}", "dataset.eval_limit=1", "train.attack_grader=false"]
    settings = ['pool.name="postgres"', where, 'run.name="shared"', *training]
    folder.mkdir(exist_ok=True)
    return called(folder, "train", TINY, "--json", *more, *(part for setting in settings for part in ("--set", setting)))


def test_run_resumes_and_a_namesake_is_rejected(tmp_path: Path) -> None:
    first = train(tmp_path / "here", 1)
    assert first.returncode == 0, first.stderr
    again = train(tmp_path / "here", 2)
    assert (again.returncode, json.loads(again.stdout)["steps"]) == (0, 2)
    for _ in range(2):
        another = train(tmp_path / "there", 1)
        assert another.returncode == 2
        said = json.loads(another.stderr.splitlines()[-1])["error"]["message"]
        assert said.endswith("groups of another run called 'shared'; set another run.name")
    fresh = train(tmp_path / "here", 1, "--fresh")
    assert (fresh.returncode, json.loads(fresh.stdout)["rollouts"]) == (0, json.loads(first.stdout)["rollouts"])
    kept = called(tmp_path / "here", "pool", "stats", "runs/shared.old1", "--json")
    assert sum(channel["steps"] for channel in json.loads(kept.stdout)["channels"].values()) > 0


@pytest.mark.parametrize(
    ("url", "why"), [("", "needs pool.url"), ("postgresql://me:secret@host/db", "holds a password, which would be stored")]
)
def test_bad_address_is_rejected_before_the_run(tmp_path: Path, url: str, why: str) -> None:
    refused = train(tmp_path / "here", 1, url=url)
    said = json.loads(refused.stderr.splitlines()[-1])["error"]["message"]
    assert (refused.returncode, why in said, "secret" in refused.stdout + refused.stderr) == (2, True, False)
    assert not (tmp_path / "here" / "runs").exists()
