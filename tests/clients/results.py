"""What the clients' trials came to, kept in the cache folder for the table in `docs/connect-your-agent.md`.

Run as a program it writes the table.
"""

import json
import re

from client_record import breaks, paths
from environments import CACHE, ROOT, versions

from penstock.records import Attempt
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
BEGIN, END = "<!-- clients -->\n", "<!-- /clients -->\n"


def note(name: str, mode: str, environment: str, attempt: Attempt) -> None:
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


def table() -> str:
    """A row for each client and API, from the last trial of each mode."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    last = {(line["name"], line["mode"]): line for line in lines}
    rows: list[str] = []
    for name in dict.fromkeys(line["name"] for line in lines):
        found = {mode: line for (each, mode), line in last.items() if each == name}
        first = next(iter(found.values()))
        packages = ", ".join(f"{package} {version}" for package, version in versions(first["environment"]).items())
        rates = ", ".join(f"{mode} {line['exact']:.1f} ({line['paths']})" for mode, line in sorted(found.items()))
        why = ", ".join(sorted({f"`{reason}`" for line in found.values() for reason in line["breaks"]})) or "none"
        packages = packages if first["environment"] != "npm" else _npm_package(name)
        rows.append(f"| {_title(name, first['environment'])} | {packages} | {rates} | {why} |")
    head = "| client and API | versions | exact rate (paths) | breaks |\n|---|---|---|---|\n"
    return head + "\n".join(sorted(rows, key=str.lower)) + "\n"


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
    page = ROOT / "docs/connect-your-agent.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
