"""What the clients' trials came to, kept in the cache folder for bench/results/clients.json.

Run as a program it writes that file.
"""

import json
import re

from client_record import breaks, paths
from environments import CACHE, ROOT, versions

from penstock.records import Rollout
from penstock.train.sequences import exactness

FILE = CACHE / "results.jsonl"
AI_SDK = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")
NPM_PACKAGES = {
    "openai_node": ("openai",),
    "anthropic_node": ("@anthropic-ai/sdk",),
    "ai_sdk": AI_SDK,
    "npm": AI_SDK,
    "Codex": ("@openai/codex",),
    "Claude": ("@anthropic-ai/claude-code",),
    "Qwen": ("@qwen-code/qwen-code",),
    "opencode": ("opencode-ai",),
    "pi": ("@earendil-works/pi-coding-agent",),
    "Continue": ("@continuedev/cli",),
}
"""The first word of a trial's name, to the packages that it tries."""
TITLES = {
    "vendor": "`.parse` of openai and anthropic, `output_type` of openai-agents:",
    "npm": "AI SDK, `Output.object`:",
    "ai_sdk": "AI SDK",
    "openai_node": "openai for Node",
    "anthropic_node": "@anthropic-ai/sdk for Node",
    "agents_sdk": "openai-agents",
    "openai_chat": "openai",
    "openai_responses": "openai",
    "anthropic_messages": "anthropic",
    "traced_openai": "openai traced by",
}
"""The first word of a trial's name, to what the table calls it."""


def note(name: str, mode: str, environment: str, attempt: Rollout) -> None:
    """Append what a trial came to."""
    line = {
        "name": name,
        "mode": mode,
        "environment": environment,
        "calls": len(attempt.steps),
        "exact": exactness(attempt).rate,
        "paths": len(paths(attempt)),
        "breaks": breaks(attempt),
    }
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")


def table() -> list[list[str]]:
    """A row for each client and API, from the last trial of each mode."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    last = {(line["name"], line["mode"]): line for line in lines}
    rows: list[list[str]] = []
    for name in dict.fromkeys(line["name"] for line in lines):
        found = {mode: line for (each, mode), line in last.items() if each == name}
        first = next(iter(found.values()))
        packages = ", ".join(f"{package} {version}" for package, version in versions(first["environment"]).items())
        rates = ", ".join(f"{mode} {line['exact']:.1f} ({line['paths']})" for mode, line in sorted(found.items()))
        why = ", ".join(sorted({f"`{reason}`" for line in found.values() for reason in line["breaks"]})) or "none"
        packages = packages if first["environment"] != "npm" else _npm_package(name)
        rows.append([_title(name, first["environment"]), packages, rates, why])
    return sorted(rows, key=lambda row: row[0].lower())


def _title(name: str, environment: str) -> str:
    first, _, rest = name.partition(" ")
    if first in TITLES:
        return f"{TITLES[first]} {rest}"
    if first == environment and rest:
        return f"{environment}, structured output: {rest}"
    return f"{environment} {rest}" if "_" in first else name


def _npm_package(name: str) -> str:
    found = versions("npm")
    return ", ".join(f"{package} {found[package]}" for package in NPM_PACKAGES[re.split("[ ,]", name)[0]])


if __name__ == "__main__":
    file = ROOT / "bench" / "results" / "clients.json"
    results = json.loads(file.read_text()) | {"rows": table()}
    file.write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n")
