"""What importing penstock costs: nothing heavy until it is used."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "ray", "openai", "fastapi", "uvicorn")
COMMANDS = ("train", "eval", "verify", "gateway", "run", "model", "doctor", "rollout", "pool", "dataset", "secret", "controller")
HELP = ([], ["--help"], ["--version"], ["rollout", "serve", "--help"], *([name, "--help"] for name in COMMANDS))
BAD_INPUT = (
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
)


def loaded_after(code: str, modules: tuple[str, ...] = HEAVY) -> list[list[str]]:
    """Which of `modules` a fresh interpreter holds at each `tell()` in `code`, and at its end."""
    before = f"import sys\ndef tell(): print('LOADED', *[name for name in {modules!r} if name in sys.modules])\n"
    command = [sys.executable, "-c", f"{before}{code}\ntell()"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("LOADED")]


def test_import_loads_nothing_heavy():
    assert loaded_after("import penstock") == [[]]


def test_check_itself_sees_loaded_module_and_when_it_was_loaded():
    assert loaded_after("tell()\nimport types; sys.modules['ray'] = types.ModuleType('ray')") == [[], ["ray"]]


@pytest.mark.parametrize(
    ("commands", "status", "modules"),
    [pytest.param(HELP, 0, (*HEAVY, "aiohttp", "numpy"), id="help"), pytest.param(BAD_INPUT, 2, HEAVY, id="bad input")],
)
def test_help_and_refusals_of_bad_input_load_nothing_heavy(commands, status, modules):
    each = f"assert run(each) == {status}, each\n    tell()"
    reported = loaded_after(f"from penstock.cli.app import run\nfor each in {commands!r}:\n    {each}", modules)
    assert dict(zip(map(tuple, commands), reported[:-1], strict=True)) == {tuple(each): [] for each in commands}
