"""`penstock dataset`, `secret`, `model` and `rollout` against a controller in a separate process."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from controller_process import environment, penstock


@pytest.fixture
def tasks(tmp_path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"user_prompt": f"{n}*2", "ground_truth": str(2 * n)}) + "\n" for n in range(7)))
    return file


def test_a_dataset_is_checked_uploaded_listed_shown_and_fetched(command, tasks):
    assert command("dataset", "validate", tasks, "--json").json["rows"] == 7
    kept = command("dataset", "upload", tasks, "--name", "numbers", "--json")
    assert kept.code == 0 and kept.json["row_count"] == 7, kept
    row = command("dataset", "list", "--plain").out.splitlines()[0].split("\t")
    assert row[:3] == ["numbers", "uploaded", "7"]
    assert command("dataset", "info", "numbers", "--json").json["id"] == kept.json["id"]
    assert command("dataset", "preview", "numbers", "--rows", "2", "--json").json["rows"][1]["user_prompt"] == "1*2"
    assert command("dataset", "preview", kept.json["id"]).out.count("\n") == 5
    fetched = command("dataset", "download", "numbers", "-o", "new/", "--json").json
    assert Path(fetched["path"]).parent == Path("new") and Path(fetched["path"]).read_bytes() == tasks.read_bytes()
    assert not list(Path("new").glob(".*"))


def test_dataset_is_replaced_only_with_overwrite(command, tasks):
    assert command("dataset", "upload", tasks, "--name", "twice", "--json").code == 0
    refused = command("dataset", "upload", tasks, "--name", "twice", "--json")
    assert (refused.code, refused.error) == (2, "DATASET_EXISTS")
    tasks.write_text('{"user_prompt": "another"}\n')
    assert command("dataset", "upload", tasks, "--name", "twice", "--overwrite", "--json").json["row_count"] == 1


def test_bad_rows_are_reported_before_the_upload(command, tasks):
    tasks.write_text('{"user_prompt": 3}\nnot json\n{"user_prompt": "fine"}\n')
    for word in ("validate", "upload"):
        answer = command("dataset", word, tasks, "--json")
        assert (answer.code, answer.error) == (2, "dataset_error")
        assert [issue["key"] for issue in answer.json["error"]["issues"]] == ["line 1", "line 2"]
    said = command("dataset", "validate", tasks).err.splitlines()
    assert len(said) == 3 and "line 1" in said[1] and "line 2" in said[2]
    assert command("dataset", "info", "tasks", "--json").error == "DATASET_NOT_FOUND"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["dataset", "validate", "absent.jsonl"], "config_error"),
        (["dataset", "validate", "."], "config_error"),
        (["dataset", "upload", "absent.jsonl"], "config_error"),
        (["dataset", "upload", "absent.txt"], "config_error"),
        (["dataset", "info", "absent"], "DATASET_NOT_FOUND"),
        (["dataset", "preview", "absent"], "DATASET_NOT_FOUND"),
        (["dataset", "download", "absent"], "DATASET_NOT_FOUND"),
        (["secret", "set", "KEY", "--env", "NOT_SET_ANYWHERE"], "config_error"),
        (["secret", "set", "not-a-name", "--env", "PATH"], "SECRET_INVALID"),
        (["secret", "set", "KEY", "value"], "usage"),
        (["secret", "delete", "ABSENT"], "SECRET_NOT_FOUND"),
        (["secret", "delete", "ABSENT", "--scope", "moon"], "usage"),
        (["model", "info", "absent"], "MODEL_NOT_FOUND"),
        (["model", "deploy", "absent"], "MODEL_NOT_FOUND"),
        (["model", "undeploy", "absent"], "MODEL_NOT_FOUND"),
        (["model", "list", "--plain"], "config_error"),
        (["controller", "approve", "ZZZZ-ZZZZ"], "CODE_UNKNOWN"),
        (["controller", "register", ".", "--name", "no-owner"], "REPOSITORY_INVALID"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_is_wrong_is_one_object_with_a_code(command, arguments, code):
    answer = command(*arguments, "--json")
    assert (answer.code, answer.error) == (2, code)


def test_download_does_not_overwrite_or_write_elsewhere(command, tasks):
    command("dataset", "upload", tasks, "--name", "kept", "--json")
    Path("kept.jsonl").write_text("mine")
    assert command("dataset", "download", "kept", "-o", "kept.jsonl", "--json").error == "config_error"
    assert Path("kept.jsonl").read_text() == "mine"
    assert "-o" in command("dataset", "download", "kept", "-o", "kept.jsonl/below").err


def test_a_full_disk_is_one_line_and_leaves_nothing(command, tasks, serving):
    tasks.write_text('{"user_prompt": "long"}\n' * 500)
    command("dataset", "upload", tasks, "--name", "large", "--json")
    bounded = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *penstock("dataset", "download", "large", "-o", "out/", "--json")]
    answer = subprocess.run(bounded, capture_output=True, text=True, timeout=60, env=environment(serving.home), check=False)
    assert (answer.returncode, json.loads(answer.stderr.splitlines()[-1])["error"]["code"]) == (2, "config_error"), answer
    assert list(Path("out").iterdir()) == []


def test_secret_is_read_from_stdin_or_variable_and_never_printed(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("sk-of-stdin\n"))  # what a pipe gives
    answer = [command("secret", "set", "ONE_KEY", "--json")]
    monkeypatch.setenv("HIDDEN", "sk-of-a-variable")
    answer.append(command("secret", "set", "TWO_KEY", "--env", "HIDDEN", "--scope", "workspace", "--json"))
    answer.append(command("secret", "list", "--json"))
    assert all(each.code == 0 and "sk-of" not in each.out + each.err for each in answer)
    assert {row.split("\t")[0] for row in command("secret", "list", "--plain").out.splitlines()} == {"ONE_KEY", "TWO_KEY"}
    assert command("secret", "delete", "ONE_KEY", "--json").json == {"name": "ONE_KEY", "scope": "personal", "deleted": True}
    assert command("secret", "delete", "TWO_KEY", "--scope", "workspace").code == 0
    assert command("secret", "list", "--json").json["total_count"] == 0


def test_an_empty_stdin_is_no_secret(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    answer = command("secret", "set", "EMPTY_KEY", "--json")
    assert (answer.code, answer.error) == (2, "config_error")


def test_a_rollout_is_written_listed_and_never_written_over_unasked(command):
    assert command("doctor", "--fix", "--json").code in (0, 1)
    written = command("rollout", "init", "multiply", "--json").json
    assert "rollouts/multiply/main.py" in written["files"]
    assert command("rollout", "list", "--plain").out == "multiply\n"
    assert command("rollout", "init", "multiply", "--json").error == "config_error"
    assert command("rollout", "init", "multiply", "--force").code == 0


def test_the_old_name_of_the_model_commands_still_works(command):
    assert command("models", "list", "--json").json["models"] == command("model", "list", "--json").json["models"]
    assert "models" not in command("--help").out.replace("Pull models", "")
