"""Client packages as their registries ship them: two questions with tool calls, streamed and not, recorded whole and exactly."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from client_record import assert_trainable, breaks, only_path, paths, view
from client_trial import PROGRAMS, THINKS, Seen, Trial, program
from environments import PROJECT
from scripts import adder, thinking

from penstock.testing import CHATML


class Client(NamedTuple):
    environment: str
    program: str
    dialect: str


CLIENTS = [
    Client("vendor", "openai_chat.py", "chat"),
    Client("vendor", "openai_responses.py", "responses"),
    Client("vendor", "anthropic_messages.py", "messages"),
    Client("vendor", "agents_sdk.py", "chat"),
    Client("vendor", "agents_sdk.py", "responses"),
    Client("strands", "strands_agent.py", "chat"),
    Client("litellm", "litellm_chat.py", "chat"),
    Client("litellm", "litellm_chat.py", "responses"),
    Client("litellm", "litellm_chat.py", "messages"),
    Client("langchain", "langchain_agent.py", "chat"),
    Client("langchain", "langchain_agent.py", "responses"),
    Client("langchain", "langchain_agent.py", "messages"),
    Client("npm", "openai_node.mjs", "chat"),
    Client("npm", "openai_node.mjs", "responses"),
    Client("npm", "anthropic_node.mjs", "messages"),
]
OWN = [Client(PROJECT, "openai_chat.py", "chat"), Client(PROJECT, "openai_responses.py", "responses")]
"""With the packages that the project's own environment has."""
ONLY_STREAM = [Client("strands", "strands_agent.py", "responses"), Client("strands", "strands_agent.py", "messages")]
INVENTS = Client("litellm", "litellm_chat.py", "messages")
"""Puts its own words into a streamed reply that has calls and no text."""
REASONS = [client for client in CLIENTS if client.program in ("openai_responses.py", "anthropic_messages.py", "openai_node.mjs")]


def named(client: Client) -> str:
    return f"{client.program.partition('.')[0]}-{client.dialect}"


def converse(client: Client, mode: str, tmp_path: Path, script=adder, template: str = CHATML) -> Seen:
    command = program(PROGRAMS / client.program, tmp_path / "work", mode, client.dialect, environment=client.environment)
    name = "" if client.environment == PROJECT else f"{client.program.partition('.')[0]} {client.dialect}"
    name += ", reasoning" if name and template == THINKS else ""
    seen = Trial(client.environment, command, script, tmp_path / "work", template=template, name=name, mode=mode).run()
    assert seen.apis == {client.dialect}
    return seen


def reported(seen: Seen) -> dict:
    return json.loads(seen.output.splitlines()[-1])


@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("client", OWN, ids=named)
def test_the_openai_package_converses_with_tools_over_a_socket(client: Client, mode: str, tmp_path: Path) -> None:
    seen = converse(client, mode, tmp_path)
    assert view(seen.attempt, only_path(seen.attempt)) == reported(seen)["view"] and len(seen.attempt.steps) == 4
    assert_trainable(seen.attempt)


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS, ids=named)
def test_conversation_with_tools_is_one_exact_path(client: Client, tmp_path: Path) -> None:
    seen = converse(client, "whole", tmp_path)
    assert len(seen.attempt.steps) == 4 and seen.left == []
    assert view(seen.attempt, only_path(seen.attempt)) == reported(seen)["view"]
    assert_trainable(seen.attempt)


@pytest.mark.slow
@pytest.mark.parametrize("client", [client for client in CLIENTS + ONLY_STREAM if client != INVENTS], ids=named)
def test_streamed_conversation_is_same_path_and_comes_in_pieces(client: Client, tmp_path: Path) -> None:
    seen = converse(client, "stream", tmp_path)
    assert len(seen.attempt.steps) == 4 and seen.left == []
    assert view(seen.attempt, only_path(seen.attempt)) == reported(seen)["view"] and reported(seen)["pieces"] > 2
    assert_trainable(seen.attempt)


@pytest.mark.slow
def test_edited_reply_opens_a_path_with_its_reason(tmp_path: Path) -> None:
    seen = converse(INVENTS, "stream", tmp_path)
    assert len(seen.attempt.steps) == 4 and breaks(seen.attempt) == ["reply_edited"]
    assert_trainable(seen.attempt)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("client", REASONS, ids=named)
def test_returned_reasoning_is_matched_and_lost_reasoning_counted(client: Client, mode: str, tmp_path: Path) -> None:
    seen = converse(client, mode, tmp_path, thinking(adder), THINKS)
    assert all(step.message["reasoning_content"] for step in seen.attempt.steps)
    assert [len(path) for path in paths(seen.attempt)] == [2, 2]
    assert breaks(seen.attempt) == ["template_rewrites_history"]  # at the second question: thoughts before it are dropped
    assert_trainable(seen.attempt)
