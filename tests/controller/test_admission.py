"""A submission becomes a run that can be carried out, or is refused with everything that is wrong and nothing left behind."""

import asyncio
import json
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from core_cases import CONFIG, files_of, messages, until_async, write_project

from penstock.config import RunKind
from penstock.errors import ConfigError, ControllerError, PenstockError
from penstock_controller.admission import CodeOrigin, admit, resolve_submission
from penstock_controller.context import Controller, ControllerLimits, open_controller
from penstock_controller.home import Home
from penstock_controller.identity import OWNER, Identity
from penstock_controller.monitor import kill_stray_processes
from penstock_controller.runs import Run, RunFiles, RunStatus
from penstock_controller.snapshots import make_snapshot

TABLES = tomllib.loads(CONFIG)
BODY = {"run_config": {"tables": TABLES, "file": "penstock.toml"}}
EXPERIMENT = {"rollout": "tiny", "entrypoint": "agent.py", "model_path": "tiny", "dataset": "tasks"}


@pytest.fixture
def home(tmp_path: Path) -> Generator[Home]:
    yield Home(tmp_path / "home")
    for folder in (tmp_path / "home" / "runs").glob("*"):
        kill_stray_processes(RunFiles(folder))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


def workspace(folder: Path) -> Path:
    write_project(folder / "rollouts" / "tiny")
    for name in ("configs/eval", "configs/training", "data"):
        (folder / name).mkdir(parents=True)
    return folder


SOMEONE = Identity("token-1", "someone", person="someone")


async def submit(controller: Controller, folder: Path, body: dict[str, Any], kind: RunKind = "eval") -> Run:
    with make_snapshot(folder) as snapshot:
        return await admit(controller, kind, body, snapshot=snapshot.path, origin=CodeOrigin(branch="main", creator=SOMEONE))


def refused(home: Home, folder: Path, body: dict[str, Any], kind: RunKind = "eval") -> PenstockError:
    async def work() -> PenstockError:
        async with open_controller(home, ControllerLimits(runs=0)) as controller:
            with pytest.raises((ConfigError, ControllerError)) as error:
                await submit(controller, folder, body, kind)
            assert controller.runs.waiting() == [] and list(home.runs.iterdir()) == []
            return error.value

    return asyncio.run(work())


SECRET = "open-sesame-8471"
TELLTALE = """import os
        print("the key is", os.environ["KEY"])
        if messages[0]["content"].startswith("2"):
            raise ValueError(os.environ["KEY"])
        messages.append({"role": "user", "content": os.environ["KEY"]})
"""


@pytest.mark.slow
def test_admitted_evaluation_runs_and_writes_no_secret(home: Home, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", rows=2)
    agent = (project / "agent.py").read_text()
    (project / "agent.py").write_text(agent.replace("        said = ", f"        {TELLTALE}        said = "))

    async def work() -> Run:
        async with open_controller(home, ControllerLimits()) as controller:
            controller.vault.set("KEY", SECRET, "user", who=SOMEONE)
            run = await submit(controller, project, BODY | {"name": "My Run!", "secrets": {"required": ["KEY"]}})
            (project / "agent.py").unlink()
            await until_async(lambda: controller.runs.get("eval", run.id).status.is_final)
            return controller.runs.get("eval", "my-run")

    run = asyncio.run(work())
    assert run.status is RunStatus.FINISHED, (run.message, messages(home, run))
    assert (run.submission.rollout, run.submission.dataset, run.submission.branch) == ("run", "tasks.jsonl", "main")
    assert json.loads((files_of(home, run).results(run) / "summary.json").read_bytes())["outcome"]["rollouts"] == 2
    assert messages(home, run).count("the key is [redacted]") == 2
    recorded = b"".join(file.read_bytes() for file in files_of(home, run).results(run).glob("pool*"))
    assert recorded.count(b"[redacted]") >= 2  # in the message of one rollout, in a step of the other
    for file in home.path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_submission_problems_name_files_of_the_snapshot(home: Home, project: Path) -> None:
    (project / "agent.py").write_text("raise ValueError('broken')")
    (project / "tasks.jsonl").write_text('{"prompt": "2*7", "label": "14"}\nnothing\n')
    error = refused(home, project, BODY)
    assert isinstance(error, ConfigError) and len(error.issues) >= 2
    answer = "\n".join(issue.message for issue in error.issues)
    assert "agent.py" in answer and "broken" in answer and "tasks.jsonl" in answer and "row 2" in answer.replace("line 2", "row 2")
    assert str(home.path) not in f"{error} {answer}"


def test_a_file_that_hangs_or_dies_costs_a_message(home: Home, project: Path) -> None:
    (project / "agent.py").write_text("import os\nos._exit(7)")
    assert "ended with exit code 7" in str(refused(home, project, BODY))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "neither form": ({}, "needs one of experiment_config and run_config"),
    "both forms": (BODY | {"experiment_config": EXPERIMENT}, "needs one of"),
    "no tables": ({"run_config": {"file": "penstock.toml"}}, "run_config needs `tables`"),
    "file outside": ({"run_config": {"tables": TABLES, "file": "../x.toml"}}, "run_config needs"),
    "unknown key": ({"run_config": {"tables": TABLES | {"trian": {}}}}, "trian"),
    "path outside": ({"run_config": {"tables": TABLES | {"agent": {"entry": "/etc/passwd"}}}}, "is not in the submitted folder"),
    "tasks outside": (
        {"run_config": {"tables": TABLES | {"dataset": {"train": "../tasks.jsonl"}}}},
        "is not in the submitted folder",
    ),
    "no tasks": ({"run_config": {"tables": TABLES | {"dataset": {"train": "gone.jsonl"}}}}, "gone.jsonl"),
    "secret": (BODY | {"secrets": {"required": ["KEY_A", "KEY_B"]}}, r"Secret\(s\) not found: KEY_A, KEY_B"),
    "variable": (BODY | {"env_config": {"a b": "c"}}, "no name of a variable"),
    "name": (BODY | {"name": 7}, "name is no text"),
    "no rollout": ({"experiment_config": EXPERIMENT}, "no such dataset"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused(home: Home, project: Path, name: str) -> None:
    body, why = BAD[name]
    error = refused(home, project, body)
    with pytest.raises(PenstockError, match=why):
        raise error


def test_a_queue_that_is_full_refuses(home: Home, project: Path) -> None:
    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=0, queued=0)) as controller:
            with pytest.raises(ControllerError) as error:
                await submit(controller, project, BODY)
            assert (error.value.code, error.value.status) == ("QUEUE_FULL", 429)

    asyncio.run(work())


def test_experiment_uses_uploaded_dataset_and_a_free_name(home: Home, tmp_path: Path) -> None:
    folder = workspace(tmp_path / "workspace")
    rows = folder / "rollouts" / "tiny" / "tasks.jsonl"
    body = {"experiment_config": EXPERIMENT, "evaluation_config": {"n": 2}, "env_config": {"MODE": "fast"}}

    async def work() -> None:
        async with open_controller(home, ControllerLimits(runs=0)) as controller:
            await asyncio.to_thread(controller.datasets.add_file, rows, "tasks")
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(submit(controller, folder, body)) for _ in range(2)]
            runs = [task.result() for task in tasks]
            assert sorted(run.name for run in runs) == ["tiny", "tiny-2"]
            config = json.loads(files_of(home, runs[0]).config.read_bytes())
            assert (config["eval"]["samples"], config["run"]["name"]) == (2, runs[0].name)
            assert await asyncio.to_thread(Path(config["dataset"]["train"]).read_bytes) == rows.read_bytes()
            assert runs[0].submission.env == {"MODE": "fast"} and runs[0].submission.tables["experiment"] == EXPERIMENT
            (folder / "data" / "tasks.jsonl").write_text('{"prompt": "3*7", "label": "21"}\n')
            with pytest.raises(ConfigError, match="uploaded"):
                await submit(controller, folder, body | {"snapshot": "0" * 64})

    asyncio.run(work())


@pytest.mark.parametrize(
    ("engine", "is_local"), [({"name": "embedded"}, True), ({"name": "openai", "url": "http://127.0.0.1:9"}, False)]
)
def test_model_name_is_ours_unless_an_endpoint_has_it(home: Home, tmp_path: Path, engine: dict[str, str], is_local: bool) -> None:
    files = RunFiles(tmp_path / "run")
    write_project(files.code)
    (files.code / "far" / "one").mkdir(parents=True)
    body = {"run_config": {"tables": {**TABLES, "engine": engine, "model": {"name": "far/one"}}, "file": "penstock.toml"}}

    async def work() -> str:
        async with open_controller(home, ControllerLimits(runs=0)) as controller:
            return resolve_submission(controller, "eval", body, files, person=OWNER).config.model.name

    assert asyncio.run(work()) == (str(files.code / "far" / "one") if is_local else "far/one")
