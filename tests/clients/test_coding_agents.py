"""Coding agents as their registries ship them, set up as the page says: they use their real tools, and all of it is recorded."""

import asyncio
import json
import os
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

import pytest
from client_record import assert_trainable, breaks, only_path, paths, view
from client_trial import THINKS, Seen, Trial
from connect_page import blocks
from environments import bin_of, missing
from scripts import Script, busy_first, call, in_turns, last_turn, thinking

from penstock.testing import CHATML
from penstock.train.sequences import exactness

pytestmark = pytest.mark.slow

WRITE, READ = "echo hello > made.txt && cat made.txt", "cat made.txt"
PLACEHOLDER = "[image omitted: this model reads text only]"
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
PATCH = "*** Begin Patch\n*** Add File: made.txt\n+hello\n*** End Patch\n"


class Agent(NamedTuple):
    heading: str
    """Of its part of the page."""
    environment: str
    shell: Callable[[str], str]
    """A its own call tool that runs a command."""
    settings: Mapping[str, str] = {}
    """Its files in the home folder, by the language of the block under its heading that is their text."""
    ending: str = "Done."
    """How the work was reported as done."""
    mode: str = "stream"
    """How it takes replies, unless configured otherwise."""


AGENTS = {
    "codex": Agent("Codex CLI", "npm", lambda text: call("exec_command", cmd=text), {"toml": ".codex/config.toml"}),
    "claude": Agent("Claude Code", "npm", lambda text: call("Bash", command=text, description="run it")),
    "qwen": Agent(
        "Qwen Code",
        "npm",
        lambda text: call("run_shell_command", command=text, is_background=False),
        {"json": ".qwen/settings.json"},
    ),
    "mini": Agent(
        "mini-swe-agent",
        "mini-swe-agent",
        lambda text: call("bash", command=text),
        ending=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        mode="whole",
    ),
    "opencode": Agent(
        "opencode",
        "npm",
        lambda text: call("bash", command=text, description="run it"),
        {"json": ".config/opencode/opencode.json"},
    ),
    "pi": Agent("pi", "npm", lambda text: call("bash", command=text), {"json": ".pi/agent/models.json"}),
    "continue": Agent("Continue", "npm", lambda text: call("Bash", command=text), {"yaml": ".continue/config.yaml"}),
    "openhands": Agent(
        "OpenHands SDK",
        "openhands",
        lambda text: call("terminal", command=text),
        ending=call("finish", message="Done."),
        mode="whole",
    ),
}
AIDER = Agent("aider", "aider", str, {"json": ".aider.model.metadata.json", "yaml": ".aider.model.settings.yml"})
"""Has no tools: it reads files out of the reply's text."""


OWN_APIS = {"Codex CLI": "responses", "Claude Code": "messages"}
"""By heading; the others speak Chat Completions."""
OTHER_APIS = {
    ("opencode", "Responses"): {"@ai-sdk/openai-compatible": "@ai-sdk/openai"},
    ("opencode", "Messages"): {"@ai-sdk/openai-compatible": "@ai-sdk/anthropic"},
    ("pi", "Responses"): {"openai-completions": "openai-responses"},
    ("pi", "Messages"): {"openai-completions": "anthropic-messages", "{root}/v1": "{root}"},
    ("continue", "Messages"): {"provider: openai": "provider: anthropic", "{root}/v1": "{root}/v1/"},
    ("qwen", "Responses"): {"--auth-type openai": "--auth-type openai-responses"},
    ("qwen", "Messages"): {"--auth-type openai": "--auth-type anthropic", "OPENAI_MODEL": "ANTHROPIC_MODEL"},
    ("mini", "Responses"): {"mini -m": "mini --model-class litellm_response -m"},
    ("mini", "Messages"): {"openai/any": "anthropic/any"},
    ("openhands", "Responses"): {"LLM(": 'LLM(api_mode="responses", '},
    ("openhands", "Messages"): {"openai/any": "anthropic/any", "OPENAI_BASE_URL": "ANTHROPIC_BASE_URL"},
}
"""What is changed in a part of the page for another API than its own."""


def work(
    agent: Agent,
    script: Script,
    tmp_path: Path,
    *,
    what: str = "",
    more: str = "",
    changes: Mapping[str, str] = MappingProxyType({}),
    template: str = CHATML,
    mode: str = "",
) -> Seen:
    """Run the page's command with `changes`, and `more` after it; `what` names it in the table of clients."""
    command, home = set_up(agent, changes)
    shell = ["bash", "-euc", command + more]
    name = f"{agent.heading}, {what}" if what else agent.heading
    folder = tmp_path / "work"
    seen = Trial(agent.environment, shell, script, folder, home=home, template=template, name=name, mode=mode or agent.mode).run()
    expected = OWN_APIS.get(agent.heading, "chat") if what not in ("Responses", "Messages") else what.lower()
    assert seen.left == [] and seen.apis == {expected}
    return seen


def set_up(agent: Agent, changes: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The page's command and the files of its home, with `changes`."""
    [command] = blocks(agent.heading, "bash")
    if "--sandbox" in command and not sandboxes():
        command = command.replace("workspace-write", "danger-full-access")
    home = {file: blocks(agent.heading, language)[0] for language, file in agent.settings.items()}
    for old, new in changes.items():
        command, home = command.replace(old, new), {file: text.replace(old, new) for file, text in home.items()}
    return command.rstrip(), home


@cache
def sandboxes() -> bool:
    """Whether this machine lets Codex make its sandbox."""
    if missing("npm"):
        return True
    with TemporaryDirectory() as home, TemporaryDirectory() as temporary:
        own = {"PATH": f"{bin_of('npm')}{os.pathsep}{os.environ['PATH']}", "HOME": home, "TMPDIR": temporary}
        return subprocess.run(["codex", "sandbox", "--", "true"], env=own, capture_output=True, check=False).returncode == 0


def written(agent: Agent) -> Script:
    """Write a file, read it, and end."""
    return in_turns(f"I write it.\n{agent.shell(WRITE)}", agent.shell(READ), agent.ending)


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent_works_on_one_exact_path(name: str, tmp_path: Path) -> None:
    assert_written(work(AGENTS[name], written(AGENTS[name]), tmp_path), tmp_path)


STREAMED = {"LLM(": "LLM(stream=True, ", "agent=agent,": "agent=agent, token_callbacks=[lambda chunk: None],"}


@pytest.mark.parametrize("api", ["", "Messages"])  # over Responses litellm asks for the whole and makes the stream up
def test_openhands_does_the_same_streamed(api: str, tmp_path: Path) -> None:
    agent, changes = AGENTS["openhands"], OTHER_APIS.get(("openhands", api), {})
    assert_written(work(agent, written(agent), tmp_path, what=api, mode="stream", changes=STREAMED | changes), tmp_path)


@pytest.mark.parametrize(("name", "api"), OTHER_APIS, ids=lambda value: value.lower())
def test_it_does_the_same_over_its_other_apis(name: str, api: str, tmp_path: Path) -> None:
    seen = work(AGENTS[name], written(AGENTS[name]), tmp_path, what=api, changes=OTHER_APIS[name, api])
    assert_written(seen, tmp_path)


@pytest.mark.parametrize(
    "way", [("codex", ""), ("claude", ""), ("opencode", ""), ("pi", "Responses"), ("qwen", "Responses")], ids=str
)
def test_under_session_key_each_of_its_runs_is_rollout(way: tuple[str, str], tmp_path: Path) -> None:
    agent = AGENTS[way[0]]
    command, home = set_up(agent, OTHER_APIS.get(way, {}))
    twice = ["bash", "-euc", f"{command}\nrm made.txt\n{command.splitlines()[-1]}"]
    attempts = asyncio.run(Trial(agent.environment, twice, written(agent), tmp_path / "work", home=home).run_sessions())
    assert [len(only_path(attempt)) for attempt in attempts] == [3, 3] and {attempt.reward for attempt in attempts} == {1.0}
    for attempt in attempts:
        assert_trainable(attempt)


def assert_written(seen: Seen, tmp_path: Path) -> None:
    """What `written` says was done, and recorded as one path."""
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    said = view(seen.attempt, only_path(seen.attempt))
    roles = [role for role, _, _ in said[-5:]]
    assert len(seen.attempt.steps) == 3 and roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert "Write hello to made.txt" in "".join(text for role, text, _ in said if role == "user")
    results = [str(text) for role, text, _ in said if role == "tool"]
    assert all("hello" in text for text in results), results
    assert_trainable(seen.attempt)


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_a_coding_agent_sends_reasoning_back_within_its_turn(name: str, tmp_path: Path) -> None:
    seen = work(AGENTS[name], thinking(written(AGENTS[name])), tmp_path, what="reasoning", template=THINKS)
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    only_path(seen.attempt)
    assert [step.message["reasoning_content"] for step in seen.attempt.steps] == ["This is easy."] * 3
    assert_trainable(seen.attempt)


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_a_coding_agent_comes_again_when_the_engine_is_full(name: str, tmp_path: Path) -> None:
    seen = work(AGENTS[name], busy_first(written(AGENTS[name])), tmp_path, what="engine full")
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    assert len(only_path(seen.attempt)) == 3
    assert_trainable(seen.attempt)


def test_codex_patches_files_by_its_freeform_tool(tmp_path: Path) -> None:
    seen = work(
        AGENTS["codex"], in_turns(call("apply_patch", input=PATCH), "Done."), tmp_path, what="freeform tool", more=" -m gpt-5.5"
    )
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    assert len(only_path(seen.attempt)) == 2 and {"tool:tool_search", "tools.format"} <= seen.ignored
    assert_trainable(seen.attempt)


def test_claude_code_continues_in_another_process_on_the_same_path(tmp_path: Path) -> None:
    script = in_turns(AGENTS["claude"].shell(WRITE), "Done.")
    again = '\nclaude --continue -p "Now tell me" --model any'
    seen = work(AGENTS["claude"], script, tmp_path, what="continued", more=again)
    assert len(only_path(seen.attempt)) == 3
    assert_trainable(seen.attempt)


def test_sub_agent_of_claude_code_is_path(tmp_path: Path) -> None:
    seen = work(AGENTS["claude"], delegating, tmp_path, what="sub-agent")
    sub, main = paths(seen.attempt)  # in the order in which they ended
    assert [len(sub), len(main)] == [2, 2] and breaks(seen.attempt) == []
    assert view(seen.attempt, sub)[-1][1] == "It says hello." and "It says hello." in str(view(seen.attempt, main)[-2][1])
    assert_trainable(seen.attempt)


def test_sub_agents_of_codex_run_next_to_it_on_paths(tmp_path: Path) -> None:
    seen = work(AGENTS["codex"], spawning, tmp_path, what="sub-agents")
    assert sorted(map(len, paths(seen.attempt))) == [2, 3] and breaks(seen.attempt) == []
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    assert_trainable(seen.attempt)


def test_codex_reads_its_last_message_by_a_schema(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "person.json").write_text(json.dumps(PERSON))
    script = in_turns(AGENTS["codex"].shell(WRITE), '{"name": "Ada"}')
    seen = work(AGENTS["codex"], script, tmp_path, what="--output-schema", more=" --output-schema person.json -o last.json")
    assert json.loads((tmp_path / "work" / "last.json").read_text()) == {"name": "Ada"}
    assert len(only_path(seen.attempt)) == 2 and seen.attempt.steps[-1].sampling.grammar is not None
    assert exactness(seen.attempt).rate == 1.0


def test_a_picture_that_codex_looks_at_is_a_counted_placeholder(tmp_path: Path) -> None:
    paint(tmp_path / "work")
    script = in_turns(call("view_image", path="picture.png"), "Done.")
    seen = work(AGENTS["codex"], script, tmp_path, what="view_image")
    assert view(seen.attempt, only_path(seen.attempt))[-2] == ["tool", PLACEHOLDER, []] and seen.counts["placeholder:image"] == 1
    assert_trainable(seen.attempt)


def test_a_picture_that_codex_is_given_is_a_counted_placeholder(tmp_path: Path) -> None:
    paint(tmp_path / "work")
    seen = work(AGENTS["codex"], in_turns(AGENTS["codex"].shell(WRITE), "Done."), tmp_path, what="-i", more=" -i picture.png")
    asked = [str(text) for role, text, _ in view(seen.attempt, only_path(seen.attempt)) if role == "user"]
    assert PLACEHOLDER in asked[-1] and "Write hello to made.txt" in asked[-1] and seen.counts["placeholder:image"]
    assert_trainable(seen.attempt)


def test_a_picture_that_claude_code_reads_is_a_counted_placeholder(tmp_path: Path) -> None:
    paint(tmp_path / "work")
    script = in_turns(call("Read", file_path=str(tmp_path / "work" / "picture.png")), "Done.")
    seen = work(AGENTS["claude"], script, tmp_path, what="Read picture.png")
    assert view(seen.attempt, only_path(seen.attempt))[-2] == ["tool", PLACEHOLDER, []] and seen.counts["placeholder:image"] == 1
    assert_trainable(seen.attempt)


def test_deferred_tool_of_claude_code_stays_on_one_path(tmp_path: Path) -> None:
    offers: list[bool] = []

    def script(prompt: str) -> str:
        offers.append('"name":"CronList"' in prompt or '"name": "CronList"' in prompt)
        return in_turns(call("ToolSearch", query="select:CronList"), call("CronList"), "Done.")(prompt)

    seen = work(AGENTS["claude"], script, tmp_path, what="deferred tool")
    assert offers == [False, True, True]  # its definition came with the search's result
    results = [text for role, text, _ in view(seen.attempt, only_path(seen.attempt)) if role == "tool"]
    assert len(seen.attempt.steps) == 3 and results[1] == "No scheduled jobs."
    assert_trainable(seen.attempt)


@pytest.mark.parametrize("option", ["", " --no-stream"])
@pytest.mark.parametrize("api", ["Chat Completions", "Responses", "Messages"])
def test_aider_edits_file_and_writes_prompt_again_for_each_call(api: str, option: str, tmp_path: Path) -> None:
    def script(prompt: str) -> str:
        return f"made.txt\n```\nhello{' world' * ('none' in last_turn(prompt))}\n```\n"

    fails = " --auto-test --test-cmd 'grep world made.txt || { echo none; exit 1; }'"
    name = {"Responses": "openai/responses/any", "Messages": "anthropic/any"}.get(api, "openai/any")
    mode = "whole" if option or api == "Responses" else "stream"
    seen = work(AIDER, script, tmp_path, what=api, more=option + fails, changes={"openai/any": name}, mode=mode)
    assert (tmp_path / "work" / "made.txt").read_text() == "hello world\n"
    assert [len(path) for path in paths(seen.attempt)] == [1, 1] and breaks(seen.attempt) == ["history_edited"]
    assert_trainable(seen.attempt)


def paint(folder: Path) -> None:
    """Write a red `picture.png`."""
    folder.mkdir()
    size, row = 8, b"\0" + b"\xff\0\0" * 8
    parts = {b"IHDR": struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(row * size), b"IEND": b""}
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts.items()
    ]
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def spawning(prompt: str) -> str:
    """Spawn a sub-agent by a tool in a namespace, and wait for it; as the sub-agent, do the work."""
    if "Write hello to made.txt" not in prompt:
        return in_turns(AGENTS["codex"].shell(WRITE), "It says hello.")(prompt)
    ids = re.findall(r'"agent_id":"([^"]+)"', prompt)
    waits = call("multi_agent_v1__wait_agent", targets=ids)
    return in_turns(call("multi_agent_v1__spawn_agent", message="Do it for me"), waits, "Done.")(prompt)


def delegating(prompt: str) -> str:
    """Leave the work to a sub-agent; as the sub-agent, do it."""
    if "Write hello to made.txt" in prompt:
        order = call("Agent", description="do it", prompt="Do it for me", subagent_type="general-purpose", run_in_background=False)
        return "Done." if "It says hello." in last_turn(prompt) else order
    return "It says hello." if "<tool_response>\n" in prompt else AGENTS["claude"].shell(WRITE)
