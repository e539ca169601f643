"""What `docs/claw-r1.md` says is so: paths can be imported, samples load."""

import importlib
import re
import shlex
from pathlib import Path

from claw_r1.async_main import run_config
from claw_r1.convert import convert, read_overrides
from claw_r1.gateway.gateway import convert as convert_flags
from penstock.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claw-r1.md").read_text()


def test_every_listed_path_has_its_names():
    table = PAGE.split("## Where the names are")[1].split("##")[0]
    rows = re.findall(r"^\| `(claw_r1[\w.]*)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == 10
    for path, text in rows:
        module = importlib.import_module(path)
        assert [name for name in re.findall(r"`(\w+)`", text.split("without")[0]) if not hasattr(module, name)] == []


def test_pages_commands_and_settings_are_runs_that_load(tmp_path, monkeypatch):
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
