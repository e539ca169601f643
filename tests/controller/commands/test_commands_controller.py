"""`penstock controller`: serving, one at a time, started on demand, killed and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from controller_process import DEADLINE_S, controller_up, end_runs, environment, eventually, penstock, ran, tiny_project

from penstock.cli.app import run
from penstock.errors import ControllerError
from penstock_controller.client import ControllerClient
from penstock_controller.home import Home
from penstock_controller.local import find_running, is_unserved


@pytest.fixture
def home(tmp_path):
    """A folder whose controller, if one was started, is gone in the end."""
    place = Home(tmp_path / "home")
    yield place
    if place.path.exists() and find_running(place):
        ran(place.path, "controller", "down")
    end_runs(place.path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_a_signal_and_takes_its_address_back(home, number, code):
    with controller_up(home.path) as up:
        assert ControllerClient(up.ready["url"], home.token()).verify()["user"]["name"] == "owner"
        assert up.ready["pid"] == up.process.pid
        ended, said = up.stop(number)
    assert ended == code and "stopping" in said
    assert not home.address.exists() and is_unserved(home)


def test_a_folder_has_one_controller_and_a_port_one_server(home, tmp_path):
    with controller_up(home.path) as up:
        second = ran(home.path, "controller", "up", "--port", "0", "--json")
        assert (second.returncode, json.loads(second.stderr.splitlines()[-1])["error"]["code"]) == (2, "CONTROLLER_RUNNING")
        port = up.ready["url"].rpartition(":")[2]
        other = ran(tmp_path / "other", "controller", "up", "--port", port, "--json")
        assert other.returncode == 2 and "cannot listen" in json.loads(other.stderr.splitlines()[-1])["error"]["message"]
        assert find_running(home)


def test_two_clients_start_one_controller(home):
    both = [
        subprocess.Popen(penstock("dataset", "list", "--json"), stdout=subprocess.PIPE, text=True, env=environment(home.path))
        for _ in "ab"
    ]
    answer = [json.loads(client.communicate(timeout=DEADLINE_S)[0]) for client in both]
    assert [page["total_count"] for page in answer] == [0, 0]
    assert home.log.read_text().count('"ready"') == 1
    status = json.loads(ran(home.path, "controller", "status", "--json").stdout)
    assert status["running"] and status["runs"] == {"eval": 0, "train": 0}
    down = ran(home.path, "controller", "down", "--json")
    assert down.returncode == 0 and json.loads(down.stdout)["pid"] == status["pid"]
    gone = ran(home.path, "controller", "status", "--json")
    assert (gone.returncode, json.loads(gone.stdout)["running"]) == (1, False)


def test_where_none_serves_down_and_status_start_none(home):
    down = ran(home.path, "controller", "down", "--json")
    assert (down.returncode, json.loads(down.stderr.splitlines()[-1])["error"]["code"]) == (2, "CONTROLLER_ABSENT")
    assert ran(home.path, "controller", "status").returncode == 1
    assert ran(home.path, "eval", "list").returncode == 0
    assert not home.path.exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    answer = ran(tmp_path / "file" / "home", "dataset", "list", "--json")
    assert (answer.returncode, json.loads(answer.stderr.splitlines()[-1])["error"]["code"]) == (2, "config_error")
    assert "PENSTOCK_HOME" in answer.stderr


def test_token_device_and_repository_commands(home, tmp_path, monkeypatch, capsys):
    from penstock.cli.app import run

    monkeypatch.setenv("PENSTOCK_HOME", str(home.path))
    monkeypatch.delenv("PENSTOCK_CONTROLLER", raising=False)
    with controller_up(home.path) as up:
        assert run(["controller", "token", "--json"]) == 0
        variables = json.loads(capsys.readouterr().out)["variables"]
        assert variables["OSMOSIS_PLATFORM_URL"] == variables["PENSTOCK_CONTROLLER"] == up.ready["url"]
        device = ControllerClient(up.ready["url"], None)
        begun = device.authorize_device("laptop")
        assert run(["controller", "approve", begun["user_code"], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["device_name"] == "laptop"
        assert (
            ControllerClient(up.ready["url"], device.device_token(begun["device_code"])["token"]).verify()["user"]["name"]
            == "laptop"
        )
        begun = device.authorize_device("phone")
        assert run(["controller", "approve", begun["user_code"], "--person", "ann"]) == 0
        assert "Let phone, a device of ann's, in." in capsys.readouterr().out
        phone = ControllerClient(up.ready["url"], device.device_token(begun["device_code"])["token"])
        assert run(["controller", "devices", "--plain"]) == 0
        listed = [row.split("\t")[:3] for row in capsys.readouterr().out.splitlines()]
        token_id = phone.verify()["token_id"]
        assert [token_id, "phone", "ann"] in listed and len(listed) == 2
        assert run(["controller", "revoke", token_id, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "revoked"
        with pytest.raises(ControllerError, match="revoked"):
            phone.verify()
        for folder in ("rollouts", "configs/eval", "configs/training", "data"):
            (tmp_path / "workspace" / folder).mkdir(parents=True)
        assert run(["controller", "register", str(tmp_path / "workspace"), "--name", "Acme/agents", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == "acme/agents"


@pytest.mark.slow
def test_logs_are_followed_through_a_controller_that_is_killed(home, tmp_path):
    project = tiny_project(tmp_path / "project")
    queued = ran(home.path, "eval", "submit", project / "penstock.toml", "--set", "eval.rows=0-1", "--json")
    name = json.loads(queued.stdout)["name"]
    following = subprocess.Popen(
        penstock("eval", "logs", name, "-f"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(home.path)
    )
    assert following.stdout is not None and following.stderr is not None
    first = following.stdout.readline()
    address = find_running(home)
    assert address is not None and "the run begins" in first
    os.kill(address.pid, signal.SIGKILL)
    # Not `communicate`: it reads past the buffer of `readline`, where a second line may lie that came with the first.
    with following.stdout, following.stderr:
        rest, said = following.stdout.read(), following.stderr.read()
    assert following.wait(DEADLINE_S) == 0 and f"evaluation {name} is finished" in said, said
    again = eventually(lambda: find_running(home))
    assert again.pid != address.pid
    whole = json.loads(ran(home.path, "eval", "logs", name, "--limit", "200", "--json").stdout)["logs"]
    assert [line["message"].rstrip() for line in whole] == [line[9:].rstrip() for line in [first, *rest.splitlines()]]


def test_every_command_that_the_page_names_is_there(capsys):
    from penstock.cli.app import run

    page = (Path(__file__).parents[3] / "docs" / "scale.md").read_text().partition("## A controller")[2].partition("\n## ")[0]
    named = set(re.findall(r"penstock ((?:eval|train|dataset|model|secret|rollout|controller) [a-z]+)", page))
    assert len(named) > 12
    shown = ""
    for words in named:
        assert run([*words.split(), "--help"]) == 0, words
        shown += capsys.readouterr().out
        assert f"penstock {words}" in shown
    options = set(re.findall(r"`(--[a-z-]+)", page))
    assert {option for option in options if option not in shown} == set()


def test_missing_keyring_leaves_the_key_in_its_file(home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert run(["controller", "up", "--port", "0", "--keyring", "--home", str(home.path), "--json"]) == 2
    assert "pip install" in json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["message"]
    assert not home.address.exists() and is_unserved(home)
