"""`penstock doctor`: what it looks at, and the remedy of each thing that is missing."""

import json
from importlib import metadata

import pytest

from penstock.cli import doctor
from penstock.cli.app import run
from penstock.cli.doctor import Check, as_text
from penstock.system.packages import install_command


def test_every_extra_is_reported_with_the_line_that_installs_it():
    found = {check.name: check for check in doctor.packages()}
    assert {"core", "local", "ray", "postgres"} <= set(found)
    assert found["core"].state == "ok"
    missing = [check for check in found.values() if check.state == "note"]
    assert all(check.remedy == install_command(check.name) for check in missing)


def test_a_missing_extra_hinders_training_only_where_training_needs_it(monkeypatch):
    requirements = ["orjson>=3", 'no-such-thing>=1; extra == "ray"', 'no_such.torch[x]>=2; extra == "local"']
    monkeypatch.setattr(
        metadata, "requires", lambda name: requirements
    )  # the installed list is fixed; only this shows a missing part
    found = {check.name: check for check in doctor.packages()}
    assert found["ray"].state == "note"
    assert found["local"].state == "fail"
    assert found["local"].found == "not installed: no_such.torch"


def test_cache_that_cannot_be_written_is_failure_with_remedy(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    check = doctor.cache()
    assert check.state == "fail"
    assert "PENSTOCK_CACHE" in check.remedy


def test_missing_model_is_a_note_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    check = doctor.model()
    assert check.state == "note"
    assert "penstock model pull smollm2-135m" in check.remedy


@pytest.mark.parametrize(("free_gb", "state"), [(1, "fail"), (5, "note"), (50, "ok")])
def test_little_disk_is_a_note_and_too_little_a_failure(monkeypatch, free_gb, state):
    usage = doctor.shutil.disk_usage(".")._replace(free=free_gb * doctor.GB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)  # a disk cannot be filled in a test
    assert doctor.disk().state == state


def test_text_puts_each_remedy_below_its_line_and_verdict_last():
    lines = as_text(
        [Check(name="disk", state="ok", found="9 GB"), Check(name="local", state="fail", found="no torch", remedy="pip")]
    )
    assert lines.splitlines() == [
        "ok    disk   9 GB",
        "fail  local  no torch",
        "             → pip",
        "",
        "Training cannot run here: 1 of 2 checks failed.",
    ]


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("fail", 1)])
def test_the_exit_code_says_whether_training_can_run(monkeypatch, capsys, state, code):
    monkeypatch.setattr(
        doctor, "run_checks", lambda: [Check(name="disk", state=state, found="x")]
    )  # this machine has one state only
    assert run(["doctor", "--json"]) == code
    reported = json.loads(capsys.readouterr().out)
    assert reported["ok"] is (code == 0)
    assert reported["checks"][0]["name"] == "disk"
