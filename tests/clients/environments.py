"""Where the clients are installed: Python environments and an npm prefix in a cache folder, made by `make test-clients`.

Run as a program it installs the newest release of each, once a day, and prints which; `PENSTOCK_CLIENTS_KEEP=1` leaves what is
there. Clients whose requirements exclude each other get environments of their own, as their users would give them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("PENSTOCK_CLIENTS_CACHE", "~/.cache/penstock/clients")).expanduser()

PYTHON = {
    "vendor": ("openai", "anthropic", "openai-agents"),
    "strands": ("strands-agents[openai,anthropic]",),
    "litellm-proxy": ("litellm[proxy]", "anthropic"),
    "litellm": ("litellm", "mcp"),  # which imports mcp in calls with tools, and does not ask for it
    "langchain": ("langchain", "langchain-openai", "langchain-anthropic"),
    "mini-swe-agent": ("mini-swe-agent", "mcp"),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]",),
    "instructor": ("instructor[anthropic]",),
    "dspy": ("dspy", "mcp"),  # for Responses, as litellm
    "smolagents": ("smolagents[openai]",),
    "crewai": ("crewai[anthropic]",),
    "adk": ("google-adk", "litellm", "mcp", "anthropic"),
    "autogen": ("autogen-agentchat", "autogen-ext[openai,anthropic]", "anthropic<1"),  # it sends `temperature`, which 1 has not
    "agent-framework": ("agent-framework-core", "agent-framework-openai", "agent-framework-anthropic"),
    "inspect": ("inspect-ai", "openai", "anthropic"),
    "verifiers": ("verifiers",),
    "mlflow": ("mlflow", "openai"),
    "langfuse": ("langfuse", "openai"),
    "aider": ("aider-chat",),
    "openhands": ("openhands-sdk", "openhands-tools"),
    "harbor": ("harbor", "mcp"),  # for Responses, as litellm
}
NEEDS_3_12 = {"openhands", "harbor"}
"""Environments whose packages do not install with Python 3.11."""

NPM = (
    "node",  # newer than most distributions': several of these ask for 22
    "openai",
    "@anthropic-ai/sdk",
    "@anthropic-ai/claude-code",
    "@openai/codex",
    "@qwen-code/qwen-code",
    "opencode-ai",
    "@earendil-works/pi-coding-agent",
    "@continuedev/cli",
    "ai",
    "@ai-sdk/openai",
    "@ai-sdk/openai-compatible",
    "@ai-sdk/anthropic",
    "zod",
)

PINS: dict[str, str] = {
    "@earendil-works/pi-coding-agent": "==0.87.1",  # 1.x ask for releases of pi-codemode that the registry does not have
}
"""Package, to the only version that works, with the reason next to it: for a newest release that is broken on its own."""

PROJECT = "project"
"""The environment that the tests themselves run in."""


def python_of(environment: str) -> Path:
    if environment == PROJECT:
        return Path(sys.executable)
    return CACHE / "python" / environment / "bin" / "python"


def npm_prefix() -> Path:
    return CACHE / "npm"


def bin_of(environment: str) -> Path:
    """The folder of its programs."""
    return npm_prefix() / "node_modules" / ".bin" if environment == "npm" else python_of(environment).parent


def missing(environment: str) -> bool:
    """Whether an environment (`npm`, or one of `PYTHON`) is not there as it should be."""
    stamp = _stamp(environment)
    return not stamp.exists() or json.loads(stamp.read_text())["wanted"] != list(_wanted(environment))


def versions(environment: str) -> dict[str, str]:
    """The installed version of each of its packages."""
    return json.loads(_stamp(environment).read_text())["versions"]


def interpreter(environment: str) -> str | None:
    """The Python that an environment is made with; None if this machine has none that is new enough."""
    if environment not in NEEDS_3_12 or sys.version_info >= (3, 12):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    known = (
        os.environ.get("PENSTOCK_PYTHON_3_12"),
        "python3.12",
        "python3.13",
        *map(str, sorted(pyenv.glob("3.1[23]*/bin/python"))),
    )
    named = [name for name in known if name and shutil.which(name)]
    return next(
        (name for name in named if subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode == 0), None
    )


def install(environments: list[str]) -> None:
    """Install or upgrade; pip and npm print what fails. Tests of what this machine has no Python for fail."""
    for environment in environments or [*PYTHON, "npm"]:
        if interpreter(environment) is None:
            print(f"{environment} needs Python 3.12, which is not here: name one by PENSTOCK_PYTHON_3_12", file=sys.stderr)
            continue
        if missing(environment) or (_age_days(environment) >= 1 and "PENSTOCK_CLIENTS_KEEP" not in os.environ):
            print(f"installing {environment}: {', '.join(_wanted(environment))}", file=sys.stderr, flush=True)
            _folder(environment).mkdir(parents=True, exist_ok=True)
            made = _install_npm() if environment == "npm" else _install_python(environment)
            _stamp(environment).write_text(json.dumps({"wanted": _wanted(environment), "versions": made}))
        print(environment, *(f"{name} {version}" for name, version in versions(environment).items()), sep="  ", flush=True)


def _folder(environment: str) -> Path:
    return npm_prefix() if environment == "npm" else CACHE / "python" / environment


def _stamp(environment: str) -> Path:
    return _folder(environment) / ".installed"


def _age_days(environment: str) -> float:
    return (time.time() - _stamp(environment).stat().st_mtime) / 86400


def _wanted(environment: str) -> list[str]:
    return [f"{each}{PINS.get(each, '')}" for each in (NPM if environment == "npm" else PYTHON[environment])]


def _install_python(environment: str) -> dict[str, str]:
    subprocess.run([interpreter(environment) or sys.executable, "-m", "venv", _folder(environment)], check=True)
    pip = [str(python_of(environment)), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--upgrade", "-c", ROOT / "constraints.txt", *_wanted(environment)], check=True)
    listed = json.loads(subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True).stdout)
    names = {_plain(each) for each in PYTHON[environment]}
    return {each["name"]: each["version"] for each in listed if _plain(each["name"]) in names}


def _plain(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-")


def _install_npm() -> dict[str, str]:
    packages = [f"{name}@{PINS.get(name, '').removeprefix('==') or 'latest'}" for name in NPM]
    options = ["--prefix", npm_prefix(), "--no-audit", "--no-fund", "--no-update-notifier"]
    subprocess.run(["npm", "install", *options, *packages], check=True, cwd=npm_prefix())
    modules = npm_prefix() / "node_modules"
    return {name: json.loads((modules / name / "package.json").read_text())["version"] for name in NPM}


if __name__ == "__main__":
    install(sys.argv[1:])
