"""The `osmosis` command against a controller: accounts, datasets, secrets, models, rollouts, and what it refuses."""

import json
import subprocess
from pathlib import Path

import pytest
from osmosis_shell import Shell, at_a_terminal, make_workspace, run_process, serving

from penstock_controller.client import ControllerClient

G = {"git", "workspace_directory"}
ROWS = [{"system_prompt": "", "user_prompt": f"{a}*7", "ground_truth": str(a * 7)} for a in range(2, 8)]
DATASET = [
    *("id", "file_name", "file_size", "status", "file_format", "original_file_format", "row_count", "original_file_size"),
    *("creator_name", "created_at", "updated_at"),
]
PAGE = {"schema_version", "items", "total_count", "has_more", "next_offset"}
EXPERIMENT = """[experiment]
rollout = "{rollout}"
entrypoint = "main.py"
model_path = "tiny"
dataset = "{dataset}"
[secrets]
required = [{secrets}]
"""
OPERATION = ["schema_version", "status", "operation", "resource", "message"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def controller(home):
    with serving(home) as environment:
        yield environment


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = make_workspace(tmp_path_factory.mktemp("workspace") / "agents")
    subprocess.run(["git", "init", "-q", "-b", "main", folder], check=True)
    subprocess.run(["git", "remote", "add", "origin", "https://github.com/Some/Agents.git"], cwd=folder, check=True)
    return folder


@pytest.fixture
def osmosis(capsys, monkeypatch, controller, workspace, tmp_path):
    for name, value in controller.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(workspace)
    return Shell(capsys)


@pytest.fixture
def uploaded(osmosis, workspace):
    """A dataset, whichever test comes first."""
    file = rows_file(workspace / "data" / "tables.jsonl")
    assert osmosis.json("dataset", "upload", file, "--overwrite", "-y").code == 0
    return file


def rows_file(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told_where(answer) -> tuple[str, str]:
    return answer["git"]["identity"], Path(answer["workspace_directory"]).name


def test_who_one_is(osmosis, controller):
    data = osmosis.json("auth", "whoami").reported["data"]
    assert list(data) == ["email", "name", "expires_at", "platform_url", "source", "workspace", "account"]
    assert (data["source"], data["platform_url"]) == ("environment", controller["OSMOSIS_PLATFORM_URL"])
    assert {"email", "name", "expires_at", "platform_url", "source"} <= set(data["account"]) and data["workspace"] is not None
    assert f"Email: {data['email']}\n" in osmosis("auth", "whoami", "--plain").out


def test_login_is_kept_used_and_forgotten(osmosis, controller, monkeypatch, tmp_path):
    monkeypatch.delenv("OSMOSIS_TOKEN")
    assert osmosis.json("auth", "whoami").error["code"] == "AUTH_REQUIRED"
    assert osmosis.json("auth", "login").error["code"] == "INTERACTIVE_REQUIRED"
    assert osmosis.json("auth", "login", "--token", "wrong").error["code"] == "AUTH_REQUIRED"
    answer = osmosis.json("auth", "login", "--token", controller["OSMOSIS_TOKEN"]).reported
    assert list(answer) == OPERATION and (answer["operation"], answer["status"]) == ("auth.login", "success")
    wanted = {"email", "name", "expires_at", "platform_url", "workspace", "source", "verified", "saved", "token_store"}
    assert set(answer["resource"]) == wanted and answer["resource"]["saved"] and answer["resource"]["source"] == "token"
    (file,) = (tmp_path / "config").rglob("*.json")
    assert file.stat().st_mode & 0o077 == 0
    assert osmosis.json("auth", "login").reported["status"] == "noop"
    assert osmosis.json("auth", "whoami").reported["data"]["source"] == "credentials"
    assert osmosis.json("dataset", "list").code == 0


def test_logging_out_needs_a_yes_and_a_login(osmosis, controller, monkeypatch):
    monkeypatch.delenv("OSMOSIS_TOKEN")
    nothing = osmosis.json("auth", "logout").reported
    assert (nothing["status"], nothing["resource"]["logged_in"]) == ("noop", False)
    osmosis.json("auth", "login", "--token", controller["OSMOSIS_TOKEN"])
    assert osmosis.json("auth", "logout").error["code"] == "INTERACTIVE_REQUIRED"
    gone = osmosis.json("auth", "logout", "-y").reported
    assert (gone["status"], gone["operation"], gone["resource"]["logged_in"]) == ("success", "auth.logout", False)
    assert osmosis.json("dataset", "list").error["code"] == "VALIDATION"


def test_wrong_token_is_reported_on_every_command(osmosis, monkeypatch):
    monkeypatch.setenv("OSMOSIS_TOKEN", "wrong")
    for line in (["eval", "list"], ["dataset", "info", "x"], ["secret", "list"], ["model", "list"], ["auth", "whoami"]):
        error = osmosis.json(*line).error
        assert (error["code"], error["details"]["status_code"]) == ("AUTH_REQUIRED", 401)


def test_dataset_goes_up_and_comes_back(osmosis, uploaded, tmp_path):
    answer = osmosis.json("dataset", "upload", uploaded, "--overwrite", "-y").reported
    assert list(answer) == [*OPERATION, "next_steps_structured"] and answer["operation"] == "dataset.upload"
    assert [*DATASET] == [name for name in answer["resource"] if name in DATASET] and set(answer["resource"]) >= G
    assert answer["next_steps_structured"] == [{"action": "dataset_info", "name": "tables"}]
    assert told_where(answer["resource"]) == ("some/agents", "agents")
    fetched = osmosis.json("dataset", "download", "tables", "-o", tmp_path).reported["resource"]
    assert Path(fetched["output_path"]).read_bytes() == uploaded.read_bytes()
    again = osmosis.json("dataset", "download", "tables", "-o", tmp_path)
    assert again.error["code"] == "VALIDATION"
    assert osmosis.json("dataset", "download", "tables", "-o", tmp_path, "--overwrite").code == 0


def test_replacing_a_dataset_needs_confirmation(osmosis, uploaded):
    error = osmosis.json("dataset", "upload", uploaded).error
    assert error["code"] == "CONFLICT" and error["details"]["existing_dataset_id"] and error["details"]["status_code"] == 409
    asked = osmosis.json("dataset", "upload", uploaded, "--overwrite").error
    assert asked["code"] == "INTERACTIVE_REQUIRED" and set(asked["details"]) == {"prompt", "summary", "notes", "warnings"}


def test_flawed_file_is_not_sent(osmosis, workspace):
    file = rows_file(workspace / "data" / "flawed.jsonl", [*ROWS, {"user_prompt": "1*1"}])
    error = osmosis.json("dataset", "upload", file).error
    assert error["code"] == "VALIDATION" and "line 7" in error["message"]
    assert osmosis.json("dataset", "info", "flawed").error["code"] == "NOT_FOUND"


def test_datasets_are_listed_shown_and_previewed(osmosis, uploaded):
    answer = osmosis.json("dataset", "list").reported
    assert set(answer) == PAGE | G and answer["total_count"] >= 1
    (item,) = [one for one in answer["items"] if one["file_name"] == "tables"]
    assert [name for name in item if name != "platform_url"] == DATASET and (item["status"], item["row_count"]) == ("uploaded", 6)
    info = osmosis.json("dataset", "info", item["id"]).reported["data"]
    assert info["file_name"] == "tables" and set(info) >= {*DATASET, *G}
    shown = osmosis.json("dataset", "preview", "tables", "--rows", 2).reported["data"]
    assert set(shown) == {"dataset", "rows", "requested_rows", "returned_rows", "available", *G}
    assert (shown["requested_rows"], shown["returned_rows"], shown["rows"][0]["user_prompt"]) == (2, 2, "2*7")
    (line,) = [line for line in osmosis("dataset", "list", "--plain").out.splitlines() if line.startswith("tables\t")]
    assert line.split("\t")[1] == "[uploaded]" and len(line.split("\t")) == 5
    assert osmosis("dataset", "list").out.startswith("Name ")


def test_pages_of_a_list_continue_to_the_end(osmosis, workspace):
    for name in ("one", "two", "three"):
        osmosis.json("dataset", "upload", rows_file(workspace / "data" / f"{name}.jsonl"), "--overwrite", "-y")
    first = osmosis.json("dataset", "list", "--limit", 2).reported
    assert (len(first["items"]), first["has_more"], first["next_offset"]) == (2, True, 2) and first["total_count"] >= 3
    everything = osmosis.json("dataset", "list", "--all").reported
    assert (len(everything["items"]), everything["has_more"], everything["next_offset"]) == (first["total_count"], False, None)


def test_logs_of_a_dataset_are_a_page_that_leads_back(osmosis, uploaded):
    answer = osmosis.json("dataset", "logs", "tables").reported
    assert set(answer) == PAGE | G | {"next_cursor"} and answer["total_count"] == len(answer["items"]) > 0
    assert all(list(line) == ["timestamp", "level", "step", "message", "details"] for line in answer["items"])
    last = osmosis("dataset", "logs", "tables", "--limit", 1).out
    assert last.startswith("Time ") and "--all" not in last


UNKNOWN = [
    ["dataset", "info", "x"],
    ["dataset", "preview", "x"],
    ["dataset", "logs", "x"],
    ["dataset", "download", "x"],
    ["eval", "info", "x"],
    ["eval", "logs", "x"],
    ["eval", "download", "x"],
    ["eval", "stop", "x", "-y"],
    ["train", "info", "x"],
    ["train", "logs", "x"],
    ["train", "stop", "x", "-y"],
    ["model", "info", "x/y"],
    ["model", "deploy", "x"],
    ["model", "undeploy", "x"],
    ["secret", "delete", "X", "-y"],
]


@pytest.mark.parametrize("line", UNKNOWN, ids=" ".join)
def test_what_is_not_there_is_reported(osmosis, line):
    ran = osmosis.json(*line)
    assert (ran.code, ran.error["code"], ran.error["command"]) == (1, "NOT_FOUND", " ".join(line[:2]))


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_stopping_asks_first(osmosis, kind):
    error = osmosis.json(kind, "stop", "x").error
    assert (error["code"], error["details"]["summary"]) == ("INTERACTIVE_REQUIRED", [{"label": "Name", "value": "x"}])


def test_secrets_are_kept_listed_without_values_and_forgotten(osmosis, monkeypatch):
    monkeypatch.setenv("THE_VALUE", "hush-hush-hush")
    for scope in ("personal", "workspace"):
        answer = osmosis.json("secret", "set", "A_KEY", "--scope", scope, "--env", "THE_VALUE").reported
        fields = {"id", "name", "scope", "created_at", "updated_at", "creator_name", "updater_name"}
        assert (answer["operation"], answer["resource"]["scope"]) == ("secret.set", scope) and set(answer["resource"]) == fields | G
    listed = osmosis.json("secret", "list")
    assert {item["scope"] for item in listed.reported["items"] if item["name"] == "A_KEY"} == {"personal", "workspace"}
    assert "hush" not in listed.out and set(listed.reported) - {"platform_url"} == PAGE | G
    (only,) = osmosis.json("secret", "list", "--scope", "workspace").reported["items"]
    assert (only["name"], only["scope"]) == ("A_KEY", "workspace")
    assert osmosis.json("secret", "delete", "A_KEY").error["code"] == "INTERACTIVE_REQUIRED"
    for scope in ("personal", "workspace"):
        gone = osmosis.json("secret", "delete", "A_KEY", "--scope", scope, "-y").reported
        assert gone["operation"] == "secret.delete" and {"name": "A_KEY", "scope": scope}.items() <= gone["resource"].items()
    assert osmosis.json("secret", "delete", "A_KEY", "-y").error["code"] == "NOT_FOUND"


def test_models_are_two_lists_or_one(osmosis):
    answer = osmosis.json("model", "list").reported
    assert {"schema_version", "base_models", "lora_models", *G} <= set(answer) and "items" not in answer
    assert set(answer["base_models"]) == PAGE - {"schema_version"} and answer["base_models"]["items"]
    base = osmosis.json("model", "list", "--type", "base").reported
    assert set(base) - {"active_deployments", "max_active_deployments"} == PAGE | G
    assert {"id", "model_name", "base_model", "creator_name", "created_at", "updated_at"} <= set(base["items"][0])


def test_rollouts_are_listed_once_a_repository_is_known(osmosis, controller, workspace):
    unknown = osmosis.json("rollout", "list", "--branch", "main").error
    assert unknown["code"] == "NOT_FOUND" and "some/agents" in unknown["message"]
    commit(workspace, "rollouts/known/main.py")
    ControllerClient(controller["OSMOSIS_PLATFORM_URL"], controller["OSMOSIS_TOKEN"]).register_repository("some/agents", workspace)
    answer = osmosis.json("rollout", "list", "--branch", "main").reported
    assert set(answer) == PAGE | G | {"branch"} and [item["name"] for item in answer["items"]] == ["known"]
    assert list(answer["items"][0]) == ["id", "name", "is_active", "repo_full_name", "last_synced_commit_sha", "created_at"]


def test_rollouts_of_a_plain_folder_are_listed(osmosis, tmp_path, monkeypatch):
    plain = make_workspace(tmp_path / "plain")
    monkeypatch.chdir(plain)
    for name in ("b", "a", ".hidden"):
        (plain / "rollouts" / name).mkdir()
    answer = osmosis.json("rollout", "list", "--limit", "1").reported
    assert ([item["name"] for item in answer["items"]], answer["total_count"], answer["has_more"]) == (["a"], 2, True)
    assert list(answer["items"][0]) == ["id", "name", "is_active", "repo_full_name", "last_synced_commit_sha", "created_at"]
    assert [item["name"] for item in osmosis.json("rollout", "list", "--all").reported["items"]] == ["a", "b"]


def commit(folder, file):
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "add", file], cwd=folder, check=True)
    subprocess.run(["git", *who, "commit", "-qm", "one"], cwd=folder, check=True)


def test_experiment_with_missing_parts_is_refused(osmosis, workspace):
    file = workspace / "configs" / "eval" / "lost.toml"
    file.write_text(EXPERIMENT.format(rollout="lost", dataset="nowhere", secrets=""))
    asked = osmosis.json("eval", "submit", file).error
    assert asked["code"] == "INTERACTIVE_REQUIRED" and asked["details"]["summary"][0] == {"label": "Rollout", "value": "lost"}
    ran = osmosis.json("eval", "submit", file, "-y")
    assert (ran.code, ran.error["code"] in ("VALIDATION", "NOT_FOUND")) == (1, True)
    assert osmosis.json("eval", "list").reported["items"] == []


def test_secret_that_is_not_kept_is_named(osmosis, workspace, uploaded):
    file = workspace / "configs" / "eval" / "secretive.toml"
    file.write_text(EXPERIMENT.format(rollout="r", dataset="tables", secrets='"NOT_KEPT"'))
    folder = workspace / "rollouts" / "r"
    folder.mkdir(exist_ok=True)
    (folder / "main.py").write_text("")
    error = osmosis.json("eval", "submit", file, "-y").error
    assert "NOT_KEPT" in error["message"] and error["code"] == "NOT_FOUND"


def test_doctor_names_the_workspace_as_the_controller_does(osmosis):
    answer = osmosis.json("doctor").reported["resource"]
    assert answer["workspace"] == osmosis.json("auth", "whoami").reported["data"]["workspace"]
    assert answer["git"] == {"identity": "some/agents", "remote_url": "https://github.com/Some/Agents.git"}


def test_without_an_address_the_controller_of_this_machine_is_used(osmosis, controller, home, monkeypatch):
    for name in controller:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    data = osmosis.json("auth", "whoami").reported["data"]
    assert (data["source"], data["platform_url"]) == ("credentials", controller["OSMOSIS_PLATFORM_URL"])
    assert osmosis.json("auth", "login").reported["status"] == "noop" and osmosis.json("dataset", "list").code == 0


@pytest.mark.slow
def test_person_logs_in_by_a_code_that_somebody_approves(controller, workspace, tmp_path):
    url = controller["OSMOSIS_PLATFORM_URL"]
    place = {"OSMOSIS_PLATFORM_URL": url, "XDG_CONFIG_HOME": str(tmp_path)}
    with at_a_terminal(workspace, "auth", "login", **place) as (process, _):
        code = process.stderr.readline().removeprefix("Code: ").strip()
        ControllerClient(url, controller["OSMOSIS_TOKEN"]).approve(code)
        assert process.wait(60) == 0 and "Logged in" in process.stdout.read()
    assert run_process(workspace, "auth", "whoami", "--json", **place).reported["data"]["source"] == "credentials"
    assert run_process(workspace, "auth", "logout", "-y", "--json", **place).reported["resource"]["revoked"] is True
