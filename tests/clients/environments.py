"""Where the clients are installed: Python environments and an npm prefix in a cache folder, made by `make test-clients`.

Run as a program it installs what is missing. The versions are those that the tests ran with; clients whose requirements exclude
each other get environments of their own, as their users would give them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("PENSTOCK_CLIENTS_CACHE", "~/.cache/penstock/clients")).expanduser()

PYTHON = {
    "vendor": ("openai==3.49.0", "anthropic==2.8.0", "openai-agents==0.24.0"),
    "strands": ("strands-agents[openai,anthropic]==1.62.0",),
    "litellm": ("litellm==1.106.2", "mcp"),  # which imports mcp in calls with tools, and does not ask for it
    "langchain": ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    "mini-swe-agent": ("mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp"),
}

NPM = {
    "openai": "6.49.0",
    "@anthropic-ai/sdk": "1.8.0",
    "@anthropic-ai/claude-code": "2.1.197",
    "@openai/codex": "0.166.0",
    "@qwen-code/qwen-code": "0.15.10",
}


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
    stamp = _folder(environment) / ".installed"
    return not stamp.exists() or stamp.read_text() != _wanted(environment)


def install() -> None:
    """Make what is missing; what fails says so by pip's or npm's own words."""
    for environment in (*PYTHON, "npm"):
        if not missing(environment):
            continue
        print(f"installing {environment}: {_wanted(environment)}", file=sys.stderr, flush=True)
        _folder(environment).mkdir(parents=True, exist_ok=True)
        _install_npm() if environment == "npm" else _install_python(environment)
        (_folder(environment) / ".installed").write_text(_wanted(environment))


def _folder(environment: str) -> Path:
    return npm_prefix() if environment == "npm" else CACHE / "python" / environment


def _wanted(environment: str) -> str:
    return json.dumps(NPM if environment == "npm" else PYTHON[environment])


def _install_python(environment: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", _folder(environment)], check=True)
    pip = [python_of(environment), "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *PYTHON[environment]], check=True)


def _install_npm() -> None:
    packages = [f"{name}@{version}" for name, version in NPM.items()]
    options = ["--prefix", npm_prefix(), "--no-audit", "--no-fund", "--no-update-notifier"]
    subprocess.run(["npm", "install", *options, *packages], check=True, cwd=npm_prefix())


if __name__ == "__main__":
    install()
