"""Coding agents as their registries ship them, set up as the page says: they use their real tools, and all of it is recorded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from client_record import assert_trainable, breaks, only_path, paths, view
from client_trial import THINKS, Seen, Trial
from connect_page import blocks
from scripts import Script, busy_first, call, in_turns, last_turn, thinking

from penstock.testing import CHATML

pytestmark = pytest.mark.slow

WRITE, READ = "echo hello > made.txt && cat made.txt", "cat made.txt"
PATCH = "*** Begin Patch\n*** Add File: made.txt\n+hello\n*** End Patch\n"


class Agent(NamedTuple):
    heading: str
    """Of its part of the page."""
    environment: str
    settings: str
    """Its settings file in the home folder, whose text is the part's first block that is no command; empty where it has none."""
    language: str
    shell: Callable[[str], str]
    """A call of its own tool that runs a command."""
    ending: str
    """How it is told that the work is done."""


AGENTS = {
    "codex": Agent("Codex CLI", "npm", ".codex/config.toml", "toml", lambda text: call("exec_command", cmd=text), "Done."),
    "claude": Agent("Claude Code", "npm", "", "", lambda text: call("Bash", command=text, description="run it"), "Done."),
    "qwen": Agent(
        "Qwen Code",
        "npm",
        ".qwen/settings.json",
        "json",
        lambda text: call("run_shell_command", command=text, is_background=False),
        "Done.",
    ),
    "mini": Agent(
        "mini-swe-agent",
        "mini-swe-agent",
        "",
        "",
        lambda text: call("bash", command=text),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
}


def work(agent: Agent, script: Script, tmp_path: Path, *, more: str = "", template: str = CHATML) -> Seen:
    """Run the page's command, with `more` after it."""
    [command] = blocks(agent.heading, "bash")
    home = {agent.settings: blocks(agent.heading, agent.language)[0]} if agent.settings else {}
    shell = ["bash", "-euc", command.rstrip() + more]
    seen = Trial(agent.environment, shell, script, tmp_path / "work", home=home, template=template, name=agent.heading).run()
    assert seen.left == []
    return seen


def written(agent: Agent) -> Script:
    """Write a file, read it, and end."""
    return in_turns(f"I write it.\n{agent.shell(WRITE)}", agent.shell(READ), agent.ending)


@pytest.mark.parametrize("name", AGENTS)
def test_a_coding_agent_does_its_work_and_all_of_it_is_one_exact_path(name: str, tmp_path: Path) -> None:
    seen = work(AGENTS[name], written(AGENTS[name]), tmp_path)
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    said = view(seen.attempt, only_path(seen.attempt))
    assert len(seen.attempt.steps) == 3 and [role for role, _, _ in said[-5:]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert "Write hello to made.txt" in "".join(text for role, text, _ in said if role == "user")
    assert all("hello" in text for role, text, _ in said if role == "tool")
    assert_trainable(seen.attempt)


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_a_coding_agent_sends_reasoning_back_within_its_turn(name: str, tmp_path: Path) -> None:
    seen = work(AGENTS[name], thinking(written(AGENTS[name])), tmp_path, template=THINKS)
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    only_path(seen.attempt)
    assert [step.message["reasoning_content"] for step in seen.attempt.steps] == ["This is easy."] * 3
    assert_trainable(seen.attempt)


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_a_coding_agent_comes_again_when_the_engine_is_full(name: str, tmp_path: Path) -> None:
    seen = work(AGENTS[name], busy_first(written(AGENTS[name])), tmp_path)
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    assert len(only_path(seen.attempt)) == 3
    assert_trainable(seen.attempt)


def test_codex_patches_files_by_its_freeform_tool(tmp_path: Path) -> None:
    seen = work(AGENTS["codex"], in_turns(call("apply_patch", input=PATCH), "Done."), tmp_path, more=" -m gpt-5.5")
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    assert len(only_path(seen.attempt)) == 2 and {"tool:tool_search", "tools.format"} <= seen.ignored
    assert_trainable(seen.attempt)


def test_claude_code_goes_on_in_another_process_on_the_same_path(tmp_path: Path) -> None:
    script = in_turns(AGENTS["claude"].shell(WRITE), "Done.")
    again = '\nclaude --continue -p "Now tell me" --model any'
    seen = work(AGENTS["claude"], script, tmp_path, more=again)
    assert len(only_path(seen.attempt)) == 3
    assert_trainable(seen.attempt)


def test_a_sub_agent_of_claude_code_is_a_path_of_its_own(tmp_path: Path) -> None:
    seen = work(AGENTS["claude"], delegating, tmp_path)
    sub, main = paths(seen.attempt)  # in the order in which they ended
    assert [len(sub), len(main)] == [2, 2] and breaks(seen.attempt) == []
    assert view(seen.attempt, sub)[-1][1] == "It says hello." and "It says hello." in str(view(seen.attempt, main)[-2][1])
    assert_trainable(seen.attempt)


def test_sub_agents_of_codex_run_beside_it_on_paths_of_their_own(tmp_path: Path) -> None:
    seen = work(AGENTS["codex"], spawning, tmp_path)
    assert sorted(map(len, paths(seen.attempt))) == [2, 3] and breaks(seen.attempt) == []
    assert (tmp_path / "work" / "made.txt").read_text() == "hello\n"
    assert_trainable(seen.attempt)


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
        order = call("Agent", description="do it", prompt="Do it for me", subagent_type="general-purpose")
        return "Done." if "It says hello." in last_turn(prompt) else order
    return "It says hello." if "<tool_response>\n" in prompt else AGENTS["claude"].shell(WRITE)
