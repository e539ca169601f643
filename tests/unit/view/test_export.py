"""The exported page: its script, its policy, and what ships in the wheel."""

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from view_cases import make_run

from penstock.errors import ConfigError
from penstock.view.app import FILES
from penstock.view.demo import ARCHIVE
from penstock.view.export import MODULES, bundle, write_report

STATIC = Path(__file__).parents[3] / "src" / "penstock" / "view" / "static"


def test_shipped_files_are_under_300_kb_with_licence():
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


def test_report_loads_only_its_own_scripts(tmp_path):
    folder = make_run(tmp_path)  # whose texts are hostile
    page = write_report(folder).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r'<script type="(?:module|text/javascript)">(.*?)</script>', page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 2
    assert all(f"'sha256-{digest}'" in policy for digest in digests)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert page.count("</script>") == 3


def test_report_replaces_the_one_before(tmp_path):
    folder = make_run(tmp_path)
    first = write_report(folder)
    assert write_report(folder) == first == folder / "report.html"
    assert not (folder / "report.html.new").exists()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "llama"}'])
def test_report_of_another_folder_is_rejected(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)
    assert not (tmp_path / "pool.db").exists()
