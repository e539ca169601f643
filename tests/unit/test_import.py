"""What importing penstock costs: nothing heavy until it is used."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "ray", "openai", "fastapi")


def loaded_after(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter holds after running `code`."""
    told = f"{code}\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=60)
    return set(result.stdout.rpartition("LOADED")[2].split())


def test_import_loads_nothing_heavy():
    assert loaded_after("import penstock") == set()


def test_the_check_itself_sees_a_loaded_module():
    assert loaded_after("import sys, types; sys.modules['ray'] = types.ModuleType('ray')") == {"ray"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--help"], ["--version"], ["rollout", "serve", "--help"]),
        *([name, "--help"] for name in ("train", "eval", "verify", "gateway", "run", "model", "doctor", "rollout", "pool")),
        *([name, "--help"] for name in ("dataset", "secret", "controller")),
    ],
)
def test_help_loads_nothing_heavy_and_no_server(arguments):
    code = f"from penstock.cli.app import run; assert run({arguments!r}) == 0\nimport sys; assert 'aiohttp' not in sys.modules"
    assert loaded_after(code) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "absent.toml", "--json"],
        ["eval", "submit", "absent.toml", "--json"],
        ["dataset", "validate", "absent.jsonl"],
        ["verify", "absent", "--json"],
        ["gateway", "--model", "absent"],
        ["run", "absent"],
        ["rollout", "serve", "absent.py", "--port", "0"],
        *(["pool", name, "absent"] for name in ("stats", "show", "verify", "compact")),
        ["pool", "export", "absent", "--out", "x"],
        ["pool", "import", "absent", "--into", "x"],
    ],
)
def test_bad_input_is_refused_before_anything_heavy_is_loaded(arguments):
    assert loaded_after(f"from penstock.cli.app import run; assert run({arguments!r}) == 2") == set()
