"""The exported page: its script, its policy, and what ships in the wheel."""

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.view.app import FILES
from penstock.view.demo import ARCHIVE
from penstock.view.export import MODULES, bundle

STATIC = Path(__file__).parents[3] / "src" / "penstock" / "view" / "static"


def test_all_that_ships_is_under_300_kb_with_the_licence_of_the_chart_library():
    files = [*STATIC.iterdir(), ARCHIVE]
    assert sum(file.stat().st_size for file in files) < 300_000
    assert "MIT" in (STATIC / "uplot.LICENSE").read_text()


def test_the_bundle_has_every_module_and_no_import_is_left():
    script = bundle()
    assert {f"{name}.js" for name in MODULES} | {"uplot.js"} == {name for name in FILES if name.endswith(".js")}
    assert "import {" not in script and "\nexport " not in script


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_bundle_parses():
    done = subprocess.run(
        ["node", "--check", "--input-type=module", "-"], input=bundle(), text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_no_module_writes_html():
    for name in MODULES:
        source = FILES[f"{name}.js"].decode()
        assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(") if word in source]
