"""A sandbox is chosen for an agent's command only if the command can be started in it."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.rollout.executors.base import choose_program_sandbox, sandbox_notice
from penstock.sdk.discovery import Agent, open_agent
from penstock.system.sandbox import Sandbox


def agent(folder: Path, *command: str) -> Agent:
    (folder / "grader.py").write_text("from penstock import Grader\nclass G(Grader):\n    async def grade(self, ctx): ...\n")
    return open_agent(AgentSection(command=command, entry=folder / "grader.py", folder=folder), {}, {})


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder that other users cannot enter, with a program in it."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    (folder / "program").write_text("#!/bin/sh\n")
    (folder / "program").chmod(0o755)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="user ids of their own need root")
def test_program_in_private_folder_is_not_started_as_another_user(private: Path):
    with TemporaryDirectory() as name:  # pytest's own folders are private
        folder, link = Path(name), Path(name) / "link"
        folder.chmod(0o755)
        link.symlink_to(private / "program")
        assert choose_program_sandbox(agent(folder, "sh"), "user").name == "user"
        for program in (private / "program", link):
            with pytest.raises(ConfigError, match=f"{program}"):
                choose_program_sandbox(agent(folder, str(program)), "user")


def test_what_agents_can_reach_is_reported_unless_it_is_nothing(private: Path):
    assert sandbox_notice(Sandbox(name="bubblewrap"), [private]) == ""
    assert "agents run without a sandbox (bwrap is missing)" in sandbox_notice(Sandbox(name="off", reason="bwrap is missing"), [])
    assert "chmod" not in sandbox_notice(Sandbox(name="user"), [private])
