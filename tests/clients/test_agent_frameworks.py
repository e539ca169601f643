"""Agent frameworks and kits as their registries ship them: a tool is called, and every token is exact."""

from pathlib import Path
from typing import NamedTuple

import pytest
from client_record import breaks, paths
from client_trial import PROGRAMS, Trial, program
from scripts import Script, adder, call, last_turn

from penstock.train.sequences import exactness


class Framework(NamedTuple):
    environment: str
    program: str
    api: str
    says: str = "The sum is 5"
    script: Script = adder
    breaks: tuple[str, ...] = ()
    """Reasons that its way of sending the history has."""


def finishing(prompt: str) -> str:
    """As `adder`, for an agent that ends by a tool of its own."""
    said = adder(prompt)
    return call("final_answer", answer=said) if "<tool_call>" not in said or "Observation" in last_turn(prompt) else said


FRAMEWORKS = [
    *(Framework("pydantic-ai", "pydantic_ai_agent.py", api) for api in ("chat", "responses", "messages")),
    *(Framework("npm", "ai_sdk.mjs", api) for api in ("chat", "responses", "compatible", "messages")),
    Framework("autogen", "autogen_agent.py", "chat", breaks=("tools_changed",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("each", FRAMEWORKS, ids=lambda each: f"{each.program.partition('.')[0]}-{each.api}")
def test_an_agent_calls_its_tool_and_the_record_is_exact(each: Framework, mode: str, tmp_path: Path) -> None:
    command = program(PROGRAMS / each.program, tmp_path / "work", mode, each.api, environment=each.environment)
    name = f"{each.program.partition('.')[0]} {each.api}"
    seen = Trial(each.environment, command, each.script, tmp_path / "work", name=name, mode=mode).run()
    assert each.says in seen.output and seen.left == []
    assert exactness(seen.attempt).rate == 1.0 and set(breaks(seen.attempt)) == set(each.breaks)
    assert len(paths(seen.attempt)) == 1 or each.breaks
