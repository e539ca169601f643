"""Submitted code in the sandbox reads nothing of the controller's, of other runs or of other processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_cases import ENGINE_FOLDER, archive, carry_out, ended, let_in, own_run, project, served, upload
from api_client import Refused, fetch
from core_cases import SUBMISSION, files_of, lay_out, messages

from penstock.system.sandbox import Sandbox
from penstock_controller.api.results import open_pool
from penstock_controller.home import KEY_FILES, Home
from penstock_controller.identity import Identity
from penstock_controller.isolation import choose_isolation, describe_isolation, is_checkpoint
from penstock_controller.runs import ExitRecord, Run, RunFiles, RunStatus, now

SANDBOX = choose_isolation("auto")
isolated = pytest.mark.skipif(not SANDBOX.isolates, reason=SANDBOX.reason)
MARK = "of-the-controller-7341"
"""In every file and variable that submitted code must not read."""

THIEF = f"""
import glob, os, subprocess, sys
from pathlib import Path

def tell(what, read):
    try:
        found = read()
    except Exception as error:
        print("refused", what, type(error).__name__, flush=True)
        return
    if found:
        print("LEAK", what, repr(found)[:300], flush=True)

home = Path.cwd().parents[2]
for pattern in ("*", "*/*", "runs/*/*", "runs/*/code/*", ".*"):
    for path in home.glob(pattern):
        if path.is_file() and not path.is_relative_to(Path.cwd()):
            tell(path, path.read_bytes)
for name in {[*KEY_FILES, "controller.db"]}:
    tell(name, (home / name).read_bytes)
def processes(name):
    for file in glob.glob("/proc/[0-9]*/" + name):
        if int(file.split("/")[2]) not in (os.getpid(), 1):
            yield file
for file in processes("environ"):
    tell(file, lambda: {MARK.encode()!r} in Path(file).read_bytes() and file)
def memory(file):
    maps = Path(file).with_name("maps").read_text().splitlines()
    with open(file, "rb") as memory:
        for line in maps:
            if "[heap]" in line or "[stack]" in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                memory.seek(start)
                if {MARK.encode()!r} in memory.read(end - start):
                    return file
for file in processes("mem"):
    tell(file, lambda: memory(file))
for name in filter(None, os.environ.get("UNREADABLE", "").split(":")):
    tell(name, Path(name).read_bytes)
def write(path):
    path.write_text("changed")
    return path
def uncover():
    script = f"umount -l {{home}}; cat {{home}}/token; mkdir -p x; mount --rbind / x && umount -l x{{home}}; cat x{{home}}/token"
    return subprocess.run(["unshare", "-Urm", "sh", "-c", script], capture_output=True).stdout
tell("uncovered", uncover)
for name in ("token", "planted"):  # in the sandbox these are separate files, which go with it
    write(home / name)
for path in [Path(name) for name in os.environ.get("UNWRITABLE", "").split(":") if name]:
    try:
        write(path)
        print("WROTE", path, flush=True)
    except OSError:
        pass
Path("kept").write_text("its own")
(Path.cwd().parent / "out" / "kept").write_text("its own")
print("done", os.environ.get("KEY"), flush=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> Generator[Home]:
    """A controller's folder with keys, and another run with a file."""
    home = Home(tmp_path / "home").create()
    for name in KEY_FILES:
        (home.path / name).write_text(MARK * 3)
    other = lay_out(home, f"print({MARK!r})", "other")
    (files_of(home, other).path / "log.jsonl").write_text(MARK)
    yield home


def monitored(home: Home, run: Run, **variables: str) -> list[str]:
    """The run's log, after a monitor has executed it whose own environment and memory hold MARK."""
    command = [sys.executable, "-m", "penstock_controller.monitor", str(files_of(home, run).path)]
    env = os.environ | {"PENSTOCK_CONTROLLER_TOKEN": MARK} | variables
    subprocess.run(command, input=json.dumps({"KEY": "named"}).encode(), env=env, timeout=120, check=True)
    return messages(home, run)


@isolated
@pytest.mark.parametrize("trusted", [True, False])
def test_nothing_of_the_controllers_is_readable_to_a_run(home: Home, tmp_path: Path, trusted: bool) -> None:
    run = lay_out(home, THIEF, "thief", sandbox="bubblewrap", trusted=trusted)
    log = monitored(home, run)
    assert "done [redacted]" in log, log
    assert not [line for line in log if "LEAK" in line or "WROTE" in line or MARK in line], log
    files = files_of(home, run)
    assert (files.code / "kept").read_text() == (files.out / "kept").read_text() == "its own"
    assert ExitRecord.read(files) is not None
    assert (home.path / "token").read_text() == MARK * 3 and not (home.path / "planted").exists()


@isolated
def test_run_of_another_person_is_isolated(home: Home, tmp_path: Path) -> None:
    user, package = tmp_path / "user", Path(sys.prefix) / "planted.py"
    user.mkdir()
    (user / "credentials").write_text(MARK)
    (tmp_path / "temporary").write_text(MARK)  # as all that tests make, below /tmp or another folder for such files
    unreadable = [user / "credentials", *([tmp_path / "temporary"] if tmp_path.is_relative_to("/tmp") else [])]
    env = {"UNREADABLE": ":".join(map(str, unreadable)), "UNWRITABLE": f"{package}:/usr/planted:/etc/planted"}
    run = lay_out(home, THIEF, "thief", sandbox="bubblewrap", trusted=False, env=env)
    log = monitored(home, run, HOME=str(user))
    assert "done [redacted]" in log, log
    assert not [line for line in log if "LEAK" in line or "WROTE" in line or MARK in line], log
    assert not package.exists() and (user / "credentials").read_text() == MARK


@isolated
@pytest.mark.parametrize("trusted", [True, False])
def test_run_cannot_change_its_inputs(home: Home, tmp_path: Path, trusted: bool) -> None:
    """Both are others': tasks are links to the controller's own files, weights those of another run."""
    weights = home.runs / "earlier" / "out" / "run" / "checkpoints" / "3" / "model"
    weights.parent.mkdir(parents=True)
    weights.write_text("weights")
    script = """
import sys
from pathlib import Path
for path in (Path("../tasks/rows").resolve(), Path(sys.argv[1])):
    print(path.read_text())
    for change in (lambda: path.write_text("changed"), path.unlink, lambda: (path.parent / "more").touch()):
        try:
            change()
            print("WROTE", path)
        except OSError:
            pass
print("done")
"""
    argv = [sys.executable, "main.py", str(weights)]
    run = lay_out(home, script, sandbox="bubblewrap", trusted=trusted, checkpoint=str(weights.parent), argv=argv)
    files = files_of(home, run)
    files.tasks.mkdir()
    (home.datasets / "rows").write_text("rows")
    os.link(home.datasets / "rows", files.tasks / "rows")
    log = monitored(home, run)
    assert {"rows", "weights"} <= set(log) and "done" in log and not [line for line in log if "WROTE" in line], log
    assert (home.datasets / "rows").read_text() == "rows" and weights.read_text() == "weights"


@isolated
def test_the_owners_run_sees_what_the_owners_programs_see(home: Home, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("the owner's own")
    script = f"from pathlib import Path; print(Path({str(tmp_path / 'data')!r}).read_text())"
    assert "the owner's own" in monitored(home, lay_out(home, script, sandbox="bubblewrap"))


@isolated
@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("", 0)])
def test_exit_is_reported_through_the_sandbox(home: Home, script: str, code: int) -> None:
    run = lay_out(home, script, sandbox="bubblewrap", trusted=False)
    monitored(home, run)
    ending = ExitRecord.read(files_of(home, run))
    assert ending is not None and ending.code == code


def test_without_a_sandbox_it_is_said_plainly(home: Home) -> None:
    run = lay_out(home, "print('ran')", sandbox="off", trusted=False)
    log = monitored(home, run)
    assert "ran" in log
    assert [line for line in log if "whoever may submit is trusted like the owner" in line]
    answer = describe_isolation(Sandbox(name="off", reason="bubblewrap: it is for Linux only"))
    assert "it is for Linux only" in answer and "token, keys and secrets" in answer
    assert "in a sandbox (bubblewrap)" in describe_isolation(Sandbox(name="bubblewrap"))


def test_another_run_sees_only_the_checkpoint(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    real, code = runs / "a" / "out" / "run" / "checkpoints" / "3", runs / "a" / "code"
    for folder in (real, code):
        folder.mkdir(parents=True)
    (real.parent / "4").symlink_to(tmp_path)
    assert is_checkpoint(real, runs)
    for path in (code, real.parent, real.parent / "4", real.parent / "5", tmp_path, Path("org/model"), real / "..", runs):
        assert not is_checkpoint(path, runs), path


def test_links_that_a_run_leaves_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller reads a run's files with its own rights; its code has made links of them, some after they were listed."""
    monkeypatch.setenv("PYTHONPATH", str(ENGINE_FOLDER))
    monkeypatch.syspath_prepend(str(ENGINE_FOLDER))
    carry_out(tmp_path / "home", "linked")
    with served(tmp_path / "home") as world:
        client, secret = world.client(), tmp_path / "home" / "secret.json"
        secret.write_text(json.dumps({"outcome": MARK, "config": MARK}))
        run = world.controller.runs.get("eval", "linked")
        files = RunFiles(world.controller.home.runs / run.id)
        results = files.results(run)
        listed = client.manifest("eval", "linked", "artifacts")
        note = next(each for each in listed if each["path"].endswith("note.txt"))
        url = client.ask("POST", "eval-runs/linked/samples/download-urls", {"items": [{"path": note["path"]}]})["items"][0]["url"]
        assert fetch(url)[:2] == (200, b"kept")
        for found in results.glob("artifacts/*/deep/note.txt"):
            found.unlink()
            found.symlink_to(secret)
        assert fetch(url)[0] == 404
        for top in results.glob("artifacts/*"):
            shutil.rmtree(top)
            top.symlink_to(tmp_path / "home")
        for name in ("report.html", "summary.json"):
            (results / name).unlink(missing_ok=True)
            (results / name).symlink_to(secret)
        assert not [each for each in client.manifest("eval", "linked", "artifacts") if "secret" in each["path"]]
        contents = client.download("eval", "linked", client.manifest("eval", "linked", "metrics,logs,report,artifacts"))
        assert set(contents) == {"metrics.json", "logs.txt"} and MARK not in str(contents)


def test_controller_loads_no_pool_code_of_a_run(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    run = Run(id="run", name="r", kind="eval", status=RunStatus.RUNNING, submission=SUBMISSION, created_at=now())
    files.results(run).mkdir(parents=True)
    for name in ("surely_not_there:Pool", "postgres"):
        files.config.write_text(json.dumps({"pool": {"name": name, "url": "postgresql://evil.example/x"}}))
        assert open_pool(replace(run, submission=replace(SUBMISSION, person="ann")), files) is None
    files.config.write_text("{}")
    (files.results(run) / "config.json").write_text(json.dumps({"config": {"pool": {"name": "surely_not_there:Pool"}}}))
    assert open_pool(run, files) is None


AGENT = """
from pathlib import Path
from penstock import AgentWorkflow, Grader

home, own = (Path(__file__).resolve().parents[number] for number in (3, 1))
for path in [*home.glob("*"), *home.glob("runs/*/*"), home / "token", home / "vault.key"]:
    if path.is_file() and not path.is_relative_to(own):
        raise ValueError(f"LEAK {path.read_bytes()}")

class Asker(AgentWorkflow):
    async def run(self, ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt, max_tokens=16)

class Even(Grader):
    async def grade(self, ctx):
        return float(ctx.metadata["n"] % 2 == 0)
"""


@isolated
@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_devices_submission_is_checked_and_executed_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """The agent's module fails on import if it can read anything: at the check of the submission, and in the run.

    Under `process` agents have a sandbox inside that of the run, or the run says why not.
    """
    monkeypatch.setenv("PYTHONPATH", str(ENGINE_FOLDER))
    with served(tmp_path / "home") as world:
        world.controller.vault.set("WORD", "the owner's", "user", who=Identity("owner", "owner"))
        device = world.client(let_in(world, "laptop")["token"])
        files = project() | {"agent.py": AGENT}
        made = device.submit("eval", own_run(upload(device, archive(files)), rollout={"executor": executor}) | {"name": "curious"})
        detail = ended(device, "eval", made["id"])
        log: Any = device.logs("eval", made["id"])
        assert detail["eval_run"]["status"] == "finished" and detail["results"]["passed"] == 4, log
        assert "LEAK" not in str(log) and world.controller.home.token() not in str(log)
        body = own_run(upload(device, archive(files))) | {"secrets": {"required": ["WORD"]}}
        with pytest.raises(Refused, match="WORD"):
            device.submit("eval", body)


@isolated
def test_model_pull_for_another_person_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with served(tmp_path / "home") as world:
        device = world.client(let_in(world, "laptop")["token"])
        body = own_run(upload(device, archive(project())), model={"name": "smollm2-135m"}, engine={"name": "embedded"})
        with pytest.raises(Refused, match="smollm2-135m"):
            device.submit("eval", body)
