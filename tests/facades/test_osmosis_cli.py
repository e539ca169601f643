"""The `osmosis` command where no controller is needed: its tree, its flags, its envelopes, checks of files and folders."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer.main
from osmosis_shell import FOLDERS, Shell, answering, at_a_terminal, make_workspace, run_process
from seed_rollouts import TASK, run_rollouts

from osmosis_ai import __version__
from osmosis_ai.cli.app import app, command_of, split_flags
from osmosis_ai.cli.connection import identify, read_settings
from osmosis_ai.cli.output import columns, duration, moment, size
from penstock.chat.renderer import Renderer
from penstock.sdk.discovery import load_agent
from penstock.testing import write_tokenizer

PORTABLE = ["multiply-local-strands", "multiply-local-openai"]
ROW = {"system_prompt": "", "user_prompt": "3*7", "ground_truth": "21", "metadata": {"level": 1}}


@pytest.fixture
def osmosis(capsys, monkeypatch, tmp_path):
    for name in ("OSMOSIS_PLATFORM_URL", "OSMOSIS_TOKEN", "PENSTOCK_CONTROLLER", "PENSTOCK_CONTROLLER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Shell(capsys)


@pytest.fixture
def workspace(osmosis):
    return make_workspace(Path.cwd())


@pytest.fixture
def nowhere(workspace, monkeypatch):
    """A workspace whose controller does not answer."""
    monkeypatch.setenv("OSMOSIS_PLATFORM_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OSMOSIS_TOKEN", "t")


@pytest.fixture
def platform(workspace, monkeypatch):
    """Starts a platform with fixed answers, for the commands of the test."""
    with ExitStack() as stack:

        def start(answers):
            environment = stack.enter_context(answering(answers))
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            return environment["OSMOSIS_PLATFORM_URL"]

        yield start


def rows_file(*rows, name="rows.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.mark.parametrize("line", [["upgrade", "--json"], ["--json", "upgrade"]])
def test_flags_work_anywhere(osmosis, line):
    answer = osmosis(*line).reported
    assert list(answer) == ["schema_version", "status", "operation", "resource", "message"]
    assert (answer["schema_version"], answer["status"], answer["operation"]) == (1, "noop", "upgrade")
    assert "pip install" in answer["message"]


def test_flags_after_two_dashes_are_arguments():
    assert split_flags(["a", "--json", "--", "--plain"]) == ({"--json"}, ["a", "--", "--plain"])


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (["eval", "submit"], "eval submit"),
        (["eval", "submit", "x.toml", "--nonsense"], "eval submit"),
        (["evil"], "evil"),
        (["secret", "set"], "secret set"),
        (["doctor", "a", "b"], "doctor"),
        (["--nonsense"], "<root>"),
        (["upgrade", "--plain"], "upgrade"),
    ],
)
def test_bad_command_line_exits_with_two(osmosis, line, command):
    ran = osmosis.json(*line)
    assert ran.code == 2 and (ran.error["code"], ran.error["command"]) == ("VALIDATION", command)


def test_error_envelope_has_the_version(osmosis):
    assert json.loads(osmosis.json("eval", "list").err)["cli_version"] == __version__


def test_errors_for_people_are_one_line(osmosis):
    for flags in ([], ["--plain"]):
        ran = osmosis("eval", "list", *flags)
        assert (ran.code, ran.out) == (1, "") and ran.err.startswith("Error: ") and "osmosis doctor --fix" in ran.err


def test_version_and_help_work_as_a_program(tmp_path):
    assert run_process(tmp_path, "-V")[:2] == (0, f"osmosis-ai {__version__}\n")
    assert "Usage: osmosis [OPTIONS] COMMAND" in run_process(tmp_path, "-h").out


def test_import_loads_nothing_heavy(tmp_path):
    heavy = "torch", "transformers", "ray", "openai", "agents", "strands", "starlette", "aiohttp", "pydantic"
    code = f"import sys, osmosis_ai.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def leaves(command, path=()):
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


COMMANDS = dict(leaves(typer.main.get_command(app)))
NEVER_FAIL = {"template list", "upgrade", "auth logout"}
WITHOUT_WORKSPACE = {"dataset validate", "eval rubric", "rollout init", "template apply", "doctor", "auth login", "auth whoami"}
OPTIONS = {"secret set": ["--env", "HOME"], "secret delete": ["-y"], "eval stop": ["-y"], "train stop": ["-y"]}


def line_of(name, argument):
    """The command with its required arguments."""
    needed = [each for each in COMMANDS[name].params if each.param_type_name == "argument" and each.required]
    return [*name.split(), *[argument] * len(needed)]


NEED_A_WORKSPACE = [line_of(name, "X") + OPTIONS.get(name, []) for name in COMMANDS.keys() - WITHOUT_WORKSPACE - NEVER_FAIL]
NEED_A_WORKSPACE.sort()


@pytest.mark.parametrize("line", NEED_A_WORKSPACE, ids=" ".join)
def test_commands_need_a_workspace(osmosis, tmp_path, line):
    ran = osmosis.json(*line)
    assert (ran.code, ran.error["code"], ran.error["command"]) == (1, "WORKSPACE_REQUIRED", " ".join(line[:2]))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("line", NEED_A_WORKSPACE, ids=" ".join)
def test_controller_without_login_is_not_asked(osmosis, workspace, monkeypatch, line):
    monkeypatch.setenv("OSMOSIS_PLATFORM_URL", "http://127.0.0.1:9")
    error = osmosis.json(*line).error
    assert error["code"] == "VALIDATION" and "osmosis auth login" in error["message"]


@pytest.mark.parametrize(
    ("url", "code"), [("http://127.0.0.1:9", "PLATFORM_ERROR"), ("ftp://nowhere", "VALIDATION"), ("http://[", "VALIDATION")]
)
def test_controller_that_does_not_answer_is_named(osmosis, nowhere, monkeypatch, url, code):
    monkeypatch.setenv("OSMOSIS_PLATFORM_URL", url)
    for line in (["eval", "list"], ["auth", "whoami"], ["auth", "login"], ["auth", "login", "--token", "t"]):
        error = osmosis.json(*line).error
        assert error["code"] == code and url in error["message"]


@pytest.mark.parametrize("file", ["x.toml", "configs/training/x.toml", "configs/eval/missing.toml", "configs/eval/../x.toml"])
def test_file_outside_its_folder_is_not_submitted(osmosis, nowhere, file):
    Path("x.toml").write_text("")
    Path("configs/training/x.toml").write_text("")
    error = osmosis.json("eval", "submit", file, "-y").error
    assert error["code"] == "VALIDATION" and file in error["message"] and "configs/eval" in error["message"]


def test_all_errors_of_a_file_are_reported(osmosis, nowhere):
    Path("configs/eval/x.toml").write_text('[experiment]\nrollout = "a"\nentrypont = "main.py"\n[evaluation]\nn = -1\n')
    error = osmosis.json("eval", "submit", "configs/eval/x.toml", "-y").error
    keys = {issue["key"] for issue in error["details"]["issues"]}
    assert error["code"] == "VALIDATION" and {"experiment.entrypont", "experiment.model_path", "evaluation.n"} <= keys
    assert all(key in error["message"] for key in keys)


def test_doctor_reports_and_fixes_missing_folders(osmosis):
    answer = osmosis.json("doctor").error
    assert (answer["code"], answer["command"]) == ("WORKSPACE_REQUIRED", "doctor")
    assert answer["details"]["missing"] == answer["details"]["required_paths"] and not answer["details"]["valid"]
    fixed = osmosis.json("doctor", "--fix").reported["resource"]
    assert (fixed["valid"], fixed["missing"]) == (True, []) and set(FOLDERS) <= set(fixed["fixed"])
    assert all(Path(name).is_dir() for name in FOLDERS)
    again = osmosis.json("doctor", "rollouts")
    found = again.reported["resource"]
    assert (again.code, found["fixed"], found["workspace_directory"]) == (0, [], str(Path.cwd()))
    assert list(fixed) == ["workspace_directory", "git", "workspace", "required_paths", "missing", "valid", "fixed"]


def test_doctor_rejects_a_missing_folder(osmosis):
    assert osmosis.json("doctor", "nowhere").error["code"] == "VALIDATION"


@pytest.mark.parametrize(
    ("remote", "identity"),
    [
        ("https://github.com/Owner/Repo.git", "owner/repo"),
        ("git@github.com:Owner/Repo.git", "owner/repo"),
        ("ssh://git@example.org:22/group/sub/Repo", "sub/repo"),
        ("https://user:password@example.org/a/b/", "a/b"),
        (None, "local/work-space"),
    ],
)
def test_workspace_is_identified_by_origin_or_folder(tmp_path, remote, identity):
    folder = tmp_path / "Work Space"
    subprocess.run(["git", "init", "-q", folder], check=True)
    if remote:
        subprocess.run(["git", "remote", "add", "origin", remote], cwd=folder, check=True)
    found = identify(folder)
    assert found.identity == identity and "password" not in (found.remote_url or "")


def test_folder_without_git_is_a_workspace(tmp_path):
    assert identify(make_workspace(tmp_path / "plain")).as_json() == {"identity": "local/plain", "remote_url": None}


GOOD = [ROW] * 4


@pytest.mark.parametrize(
    ("rows", "flaw"),
    [
        ([ROW] * 3, "3 rows; a dataset has at least 4"),
        ([*GOOD, {**ROW, "user_prompt": " "}], "line 5: user_prompt is empty"),
        ([*GOOD, {"user_prompt": "1*1"}], "line 5: no column 'system_prompt'"),
        ([*GOOD, {"System_Prompt": "", "user_prompt": "1*1"}], "case-sensitive"),
        ([*GOOD, {**ROW, "ground_truth": 21}], "line 5: ground_truth is int"),
        ([*GOOD, {**ROW, "metadata": []}], "line 5: metadata is list"),
        ([*GOOD, {**ROW, "metadata": "[1]"}], "line 5: metadata is list"),
        ([*GOOD, {**ROW, "metadata": "{"}], "line 5: metadata: not valid JSON"),
        ([*GOOD, {**ROW, "metadata": {"level": "one"}}], "line 5: metadata.level is string, but number in"),
        ([*GOOD, {**ROW, "metadata": {"of": {}}}], "line 5: metadata.of is an empty object"),
        ([*GOOD, {**ROW, "metadata": {"level": 2**64}}], "beyond 64 bits"),
        ([{**ROW, "metadata": {}}] * 4, "empty object in every row"),
    ],
)
def test_every_row_of_a_dataset_is_checked(osmosis, rows, flaw):
    ran = osmosis.json("dataset", "validate", rows_file(*rows))
    (error,) = ran.error["details"]["errors"]
    assert (ran.code, ran.error["code"], ran.out) == (1, "VALIDATION", "")
    assert flaw in error and flaw in ran.error["message"] and not ran.error["details"]["valid"]


def test_good_dataset_is_valid(osmosis):
    blank = {**ROW, "metadata": None}
    ran = osmosis.json("dataset", "validate", rows_file(*GOOD, blank, {**ROW, "metadata": '{"level": 1.5}'}))
    assert list(ran.reported["data"]) == ["valid", "file", "file_name", "extension", "file_size", "errors", "warnings"]
    assert (ran.code, ran.reported["data"]["valid"], ran.reported["data"]["extension"]) == (0, True, "jsonl")


def test_listed_dataset_errors_are_limited(osmosis):
    errors = osmosis.json("dataset", "validate", rows_file(*[{**ROW, "user_prompt": ""}] * 30)).error["details"]["errors"]
    assert len(errors) == 21 and errors[-1] == "and 10 more"


@pytest.mark.parametrize(("name", "content"), [("rows.txt", "x"), ("missing.csv", None), ("rows.csv", "user_prompt\n\n")])
def test_file_that_is_no_dataset_is_invalid(osmosis, name, content):
    if content is not None:
        Path(name).write_text(content)
    ran = osmosis("dataset", "validate", name, "--plain")
    assert ran.code == 1 and "Valid: no" in ran.out and "Error: " in ran.out


@pytest.mark.parametrize("wrong", [["--limit", "0"], ["--limit", "51"]])
@pytest.mark.parametrize("group", ["dataset", "eval", "train", "model", "rollout", "secret"])
def test_limit_has_bounds(osmosis, nowhere, group, wrong):
    error = osmosis.json(group, "list", *wrong).error
    assert error["code"] == "VALIDATION" and "--limit" in error["message"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["secret", "set", "lower", "--env", "HOME"], "VALIDATION"),
        (["secret", "set", "X", "--env", "SURELY_NOT_SET"], "VALIDATION"),
        (["secret", "set", "X", "--scope", "mine", "--env", "HOME"], "VALIDATION"),
        (["secret", "set", "X"], "INTERACTIVE_REQUIRED"),
        (["secret", "list", "--scope", "mine"], "VALIDATION"),
        (["secret", "delete", "X", "--scope", "all", "-y"], "VALIDATION"),
        (["eval", "download", "x", "--type", "everything"], "VALIDATION"),
        (["eval", "download", "x", "--rows", "1..3"], "VALIDATION"),
        (["model", "list", "--type", "other"], "VALIDATION"),
        (["dataset", "preview", "x", "--rows", "0"], "VALIDATION"),
        (["eval", "logs", "x", "--limit", "201"], "VALIDATION"),
        (["auth", "login", "--token", "t"], "VALIDATION"),
        (["template", "apply", "nothing-like-it"], "NOT_FOUND"),
        (["rollout", "init", "../up"], "VALIDATION"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_wrong_values_are_refused_first(osmosis, nowhere, monkeypatch, tmp_path, line, code):
    if line[0] == "auth":
        monkeypatch.delenv("OSMOSIS_PLATFORM_URL")
    ran = osmosis.json(*line)
    assert (ran.code, ran.error["code"]) == (1, code)
    assert not (tmp_path / "home").exists()


def test_env_file_does_not_override_the_environment(tmp_path):
    make_workspace(tmp_path)
    (tmp_path / ".env").write_text("OSMOSIS_PLATFORM_URL=http://127.0.0.1:9/base/\nOSMOSIS_TOKEN='from the file'\n")
    below = tmp_path / "rollouts"
    assert "127.0.0.1:9" in run_process(below, "eval", "list", "--json").error["message"]
    assert "127.0.0.1:8" in run_process(below, "eval", "list", "--json", OSMOSIS_PLATFORM_URL="http://127.0.0.1:8").error["message"]


def test_env_file_lines():
    text = "# no\nA=1\nexport B = two words # no\nC=\"x\\n'y'\" # no\nD='#in'\nE=\nF=a#b\nbroken\n=1\n"
    expected = {"A": "1", "B": "two words", "C": "x\n'y'", "D": "#in", "E": "", "F": "a#b"}
    assert dict(read_settings(text)) == expected


def test_figures_for_people(monkeypatch):
    assert [size(value) for value in (None, 12, 2048, 3 * 1024**3)] == ["—", "12 B", "2.0 KB", "3.0 GB"]
    assert [duration(value) for value in (None, 0, 61_000, 3_600_000)] == [None, "0s", "1m 1s", "1h"]
    assert moment("2026-01-02T03:04:05") == "2026-01-02T03:04:05" and moment(None) == "—"
    assert moment("2026-01-02T03:04:05Z").endswith(("AM", "PM"))
    assert columns([["a", "b"], ["long", ""]]) == ["a     b", "long"]
    assert command_of([]) == "<root>"


def test_template_list_and_apply(osmosis):
    answer = osmosis.json("template", "list").reported
    names = [item["name"] for item in answer["items"]]
    assert {"multiply-local-strands", "multiply-local-openai"} <= set(names) and answer["total_count"] == len(names)
    assert osmosis("template", "list", "--plain").out.startswith(f"{names[0]}\t")
    assert osmosis.json("template", "apply", names[0]).error["code"] == "WORKSPACE_REQUIRED"
    make_workspace(Path.cwd())
    applied = osmosis.json("template", "apply", names[0]).reported
    assert (applied["operation"], applied["resource"]["name"]) == ("template.apply", names[0])
    assert all(Path(file).is_file() for file in applied["resource"]["files"])
    assert f"rollouts/{names[0]}/main.py" in applied["resource"]["files"]
    assert osmosis.json("template", "apply", names[0]).error["code"] == "CONFLICT"
    assert osmosis.json("template", "apply", names[0], "-f").code == 0


@pytest.mark.parametrize("command", [["rollout", "init", "mine"], *(["template", "apply", name] for name in PORTABLE)])
def test_written_rollout_also_runs_on_the_platform(osmosis, workspace, command):
    files = osmosis.json(*command).reported["resource"]["files"]
    (main,) = [Path(file) for file in files if file.endswith(".py")]
    text = main.read_text()
    assert main.name == "main.py" and "from osmosis_ai.rollout import" in text and "import penstock" not in text
    assert "from penstock" not in text and "create_rollout_server(backend=backend)" in text and "_OSMOSIS_ROLLOUT_PORT" in text
    assert '"osmosis-ai[server]>=0.2.31"' in main.with_name("pyproject.toml").read_text()
    agent = load_agent(main, {}, {})
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
    renderer = Renderer.load(write_tokenizer(Path.cwd() / "model"))
    for said, reward in (("42", 1.0), ("41", 0.0)):
        attempt = run_rollouts(renderer, agent, [call, said], task=TASK).attempt
        assert (attempt.end, attempt.reward, len(attempt.steps)) == ("completed", reward, 2)


def test_rollout_init_writes_files_and_does_not_overwrite(osmosis, workspace):
    answer = osmosis.json("rollout", "init", "mine").reported
    configs = {"eval": "configs/eval/mine.toml", "training": "configs/training/mine.toml"}
    assert answer["operation"] == "rollout.init"
    assert (answer["resource"]["rollout_dir"], answer["resource"]["configs"]) == ("rollouts/mine", configs)
    Path("rollouts/mine/main.py").write_text("mine")
    error = osmosis.json("rollout", "init", "mine").error
    assert (error["code"], Path("rollouts/mine/main.py").read_text()) == ("CONFLICT", "mine")
    assert osmosis.json("rollout", "init", "mine", "--force").code == 0 and Path("rollouts/mine/main.py").read_text() != "mine"


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, {"error": "bad", "code": "X", "field": "n"}, "VALIDATION"),
        (401, {"error": "who", "code": "TOKEN_EXPIRED"}, "AUTH_REQUIRED"),
        (403, {"error": "no", "code": "SUBSCRIPTION_REQUIRED"}, "PLATFORM_ERROR"),
        (404, {"error": "none", "code": "X"}, "NOT_FOUND"),
        (409, {"error": "twice", "code": "X"}, "CONFLICT"),
        (422, {"error": "bad", "code": "X"}, "PLATFORM_ERROR"),
        (426, {"message": "old"}, "UPGRADE_REQUIRED"),
        (429, {"error": "later", "code": "X"}, "RATE_LIMITED"),
        (500, {"error": "oh", "code": "X"}, "PLATFORM_ERROR"),
        (200, b"<html>", "PLATFORM_ERROR"),
        (200, [], "PLATFORM_ERROR"),
    ],
)
def test_error_of_the_platform_has_a_code(osmosis, platform, status, body, code):
    platform({"GET /api/cli/eval-runs": (status, body)})
    ran = osmosis.json("eval", "list")
    assert (ran.code, ran.error["code"], ran.error["details"]["status_code"]) == (1, code, status)
    if isinstance(body, dict):
        assert body.items() <= ran.error["details"].items() and ran.error["message"] == (body.get("error") or body["message"])


def test_issues_of_the_platform_are_listed(osmosis, platform):
    issues = [{"key": "evaluation.n", "message": "too many", "key_correction": "limit"}, "and another"]
    platform({"GET /api/cli/models/base": (400, {"error": "wrong", "code": "X", "issues": issues})})
    error = osmosis.json("model", "list").error
    assert error["message"] == "wrong\n  - evaluation.n: too many (did you mean 'limit'?)\n  - and another"
    assert error["details"]["issues"] == issues and error["details"]["platform_code"] == "X"


def test_download_skips_files_that_it_must_not_write(osmosis, platform):
    kept = "trajectories/row_0_run_1.json"
    refused = ["../escape", "/etc/passwd", "logs.txt", "artifacts/row_0_run_0/manifest.json", "trajectories/row_x.json"]
    paths = [kept, kept, *refused, "summary.jsonl"]
    run = {"eval_run": {"id": "i", "name": "odd name", "status": "running"}}
    answers = {
        "GET /api/cli/eval-runs/odd": (200, run),
        "GET /api/cli/eval-runs/i/samples/manifest": (200, {"files": [{"path": path, "size": 2} for path in paths], "totals": {}}),
        "GET /file": (200, b"{}"),
    }
    links = [{"path": kept, "url": f"{platform(answers)}/file"}]
    answers["POST /api/cli/eval-runs/i/samples/download-urls"] = (200, {"items": links})
    ran = osmosis.json("eval", "download", "odd")
    answer = ran.reported["resource"]
    assert (ran.code, ran.reported["status"], answer["status"], answer["files_downloaded"]) == (1, "partial", "partial", 1)
    assert sorted(one["path"] for one in answer["files_failed"]) == sorted(paths[1:])
    assert [path.name for path in Path(".osmosis/evals/odd-name-i").rglob("*") if path.is_file()] == ["row_0_run_1.json"]


def test_large_download_needs_confirmation(osmosis, platform):
    answers = {
        "GET /api/cli/eval-runs/x": (200, {"eval_run": {"id": "i", "name": "x", "status": "finished"}}),
        "GET /api/cli/eval-runs/i/samples/manifest": (200, {"files": [{"path": "metrics.json", "size": 2**30}]}),
    }
    platform(answers)
    error = osmosis.json("eval", "download", "x").error
    assert error["code"] == "INTERACTIVE_REQUIRED" and error["details"]["prompt"] == "Download 1.0 GB?"


@pytest.mark.parametrize(("typed", "code", "said"), [("n\n", 1, "Nothing was done."), ("y\n", 0, "")])
def test_confirmation_is_asked(tmp_path, typed, code, said):
    line = (make_workspace(tmp_path / "w"), "eval", "stop", "x")
    with answering({"POST /api/cli/eval-runs/x/stop": (200, {})}) as place, at_a_terminal(*line, **place) as (process, person):
        os.write(person, typed.encode())
        out, err = process.communicate(timeout=60)
    assert process.returncode == code and said in err and ("Stopped" in out) == (code == 0)


def test_interrupted_command_exits_with_130(tmp_path):
    place = {"OSMOSIS_PLATFORM_URL": "http://127.0.0.1:9", "OSMOSIS_TOKEN": "t"}
    with at_a_terminal(make_workspace(tmp_path / "w"), "eval", "stop", "x", **place) as (process, _):
        assert process.stderr.readline().startswith("Name:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def completion(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def judged(osmosis, monkeypatch):
    """Runs `eval rubric` with a judge that always says the same."""

    def judge(answer, *words, status=200):
        with answering({"POST /v1/chat/completions": (status, answer)}) as environment:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{environment['OSMOSIS_PLATFORM_URL']}/v1")
            return osmosis.json("eval", "rubric", "-r", "Be right.", "--model", "openai/judge", "--api-key", "hush-hush", *words)

    return judge


def test_rubric_scores_a_file(judged, tmp_path):
    messages = [{"role": "user", "content": "3*7"}, {"role": "assistant", "content": "21"}]
    file = rows_file({"messages": messages, "id": "first"}, {"solution_str": "20", "ground_truth": "21"})
    ran = judged(completion('{"score": 0.5, "explanation": "half"}'), "-d", file, "-n", 2)
    answer = ran.reported
    assert (ran.code, answer["operation"]) == (0, "eval.rubric")
    assert (answer["resource"]["record_count"], answer["resource"]["error_count"]) == (2, 0)
    assert answer["resource"]["statistics"]["mean"] == 0.5
    assert [(one["label"], one["scores"]) for one in answer["resource"]["records"]] == [
        ("first", [0.5, 0.5]),
        ("row 2", [0.5, 0.5]),
    ]
    saved = judged(completion('{"score": 1, "explanation": ""}'), "-d", file, "-o", tmp_path).reported["resource"]
    assert Path(saved["output_path"]).is_file() and "records" not in saved


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-d", "missing.jsonl"], "VALIDATION"),
        (["-d", "rows.jsonl", "--score-min", "2"], "VALIDATION"),
        (["-d", "rows.jsonl", "--timeout", "0"], "VALIDATION"),
        (["-d", "rows.jsonl", "-n", "0"], "VALIDATION"),
        (["-d", "rows.jsonl", "-r", "@missing.txt"], "VALIDATION"),
        (["-d", "rows.jsonl"], "PLATFORM_ERROR"),
    ],
)
def test_failed_rubric_is_reported(judged, words, code):
    rows_file({"solution_str": "20"})
    ran = judged({"error": {"message": "no"}}, *words, status=400)
    assert (ran.code, ran.error["code"]) == (1, code) and "hush" not in ran.err


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NEVER_FAIL))
def test_failure_with_json_is_one_envelope(osmosis, name, monkeypatch):
    monkeypatch.setenv("OSMOSIS_PLATFORM_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OSMOSIS_TOKEN", "t")
    ran = osmosis.json(*line_of(name, "no/where"))
    assert ran.error["command"] == name and ran.error["message"]
    assert osmosis.json(*name.split(), "--no-such-option").error["code"] == "VALIDATION"
