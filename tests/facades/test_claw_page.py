"""What `docs/claw-r1.md` says is so: named tests are there, paths can be imported, keys are those of the code, samples load."""

import importlib
import re
import shlex
from pathlib import Path

from claw_table import key_tables

from claw_r1.async_main import run_config
from claw_r1.convert import convert
from claw_r1.gateway.gateway import convert as convert_flags
from claw_r1.overrides import read_overrides
from penstock.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claw-r1.md").read_text()
DEFECTS = 40
WHY = "Cannot occur:"


def test_every_weak_point_has_a_test_that_is_there_or_a_reason_why_it_cannot_occur():
    table = PAGE.split("## Where this is better")[1]
    rows = {int(number): row for number, row in re.findall(r"^\| (\d+) \|(.*)$", table, re.MULTILINE)}
    known = {name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert sorted(rows) == list(range(1, DEFECTS + 1))
    named = {number: set(re.findall(r"`(test_\w+)`", row)) for number, row in rows.items()}
    assert [number for number, row in rows.items() if not named[number] and WHY not in row] == []
    assert set().union(*named.values()) - known == set()


def test_every_path_that_the_page_lists_can_be_imported_and_has_its_names():
    table = PAGE.split("## Where the names are")[1].split("##")[0]
    rows = re.findall(r"^\| `(claw_r1[\w.]*)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == 10
    for path, text in rows:
        module = importlib.import_module(path)
        assert [name for name in re.findall(r"`(\w+)`", text.split("without")[0]) if not hasattr(module, name)] == []


def test_the_keys_of_the_page_are_those_of_the_code():
    shown = PAGE.split("<!-- keys -->")[1].split("<!-- /keys -->")[0]
    assert shown.strip() == key_tables(), "run tests/facades/claw_table.py and put what it prints between the two marks"


def test_the_pages_commands_and_settings_are_runs_that_load(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    train, serve = (
        shlex.split(code.replace("\\\n", " ")) for code in re.findall(r"^(python.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    )
    config = run_config(convert(read_overrides(train[3:])))
    assert (config.agent.flow, config.train.steps, config.scale.name) == ("multiply", 32, "ray")
    assert convert_flags(serve[3:]).arguments[0] == "gateway"
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.toml").write_text(settings)
    assert load_config(tmp_path / "train.toml").agent.flow == "multiply"
