"""Modules of other wheels: their old import paths, and what the core says without them."""

import subprocess
import sys

import pytest

ALONE = """
import importlib.metadata
importlib.metadata.entry_points = lambda **_: ()
"""


def run_alone(code):
    """Run code in an interpreter that sees no entry points, as if the core were installed alone."""
    done = subprocess.run([sys.executable, "-c", ALONE + code], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


def test_old_path_imports_the_moved_module():
    code = "import penstock.sdk.flow, penstock.rollout.server.app as old, penstock_compat.rollout_server.app as new\n"
    code += "from penstock.sdk.flows.builtin import MultiStepAgentFlow\nassert old is new and 'compat' in new.__spec__.name"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("path", ["penstock.sdk.flow", "penstock.rollout.server.app", "penstock.graders.rule"])
def test_import_without_the_wheel_names_it(path):
    said = run_alone(f"import {path}")
    assert "ModuleNotFoundError" in said and "penstock-compat" in said


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("penstock.rollout.executors:EXECUTORS", "server"),
        ("penstock.sdk.discovery:GRADERS", "rule"),
        ("penstock.sdk.discovery:AGENT_KINDS", "flow"),
        ("penstock.gateway.dialects:DIALECTS", "generate"),
    ],
)
def test_table_without_the_wheel_names_it(table, name):
    module, _, attribute = table.partition(":")
    said = run_alone(f"from {module} import {attribute}\n{attribute}.check({name!r})")
    assert "ConfigError" in said and "penstock-compat" in said


def test_gateway_and_commands_work_without_the_wheel():
    code = """
from pathlib import Path
from penstock.chat.renderer import Renderer
from penstock.cli.app import run
from penstock.gateway import Gateway
from penstock.testing import ScriptedEngine, memory_pool, write_tokenizer
import tempfile
with tempfile.TemporaryDirectory() as folder:
    renderer = Renderer.load(write_tokenizer(Path(folder)))
    gateway = Gateway(ScriptedEngine([], renderer.tokenizer), renderer, memory_pool(), secret=b"0123456789abcdef")
paths = {route.path for route in gateway.app.listed}
assert "/v1/chat/completions" in paths and "/generate" not in paths, paths
assert run(["--help"]) == 0
"""
    said = run_alone(code + "import sys\nprint([name for name in sys.modules if 'penstock_compat' in name])")
    assert said.rstrip().endswith("[]")
