"""Structured output of client packages as their registries ship them: what they read is what was recorded, exactly."""

import json
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from client_record import assert_trainable
from client_trial import PROGRAMS, Trial, api_of, program
from scripts import person


class Way(NamedTuple):
    environment: str
    program: str
    way: str

    def __str__(self) -> str:
        return f"{self.environment}-{self.way}"


WAYS = [
    *(Way("vendor", "structured_vendor.py", way) for way in ("chat", "responses", "messages", "agents-chat", "agents-responses")),
    *(
        Way("langchain", "structured_langchain.py", f"{api}-{method}")
        for api, methods in {
            "chat": ("json_schema", "function_calling", "json_mode"),
            "responses": ("json_schema", "function_calling", "json_mode"),
            "messages": ("json_schema", "function_calling"),
        }.items()
        for method in methods
    ),
    *(
        Way("pydantic-ai", "structured_pydantic_ai.py", f"{api}-{method}")
        for api in ("chat", "responses", "messages")
        for method in ("tool", "native", "prompted")
    ),
    *(Way("instructor", "structured_instructor.py", f"chat-{mode}") for mode in ("TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON")),
    *(Way("instructor", "structured_instructor.py", f"messages-{mode}") for mode in ("TOOLS", "JSON")),
    Way("instructor", "structured_instructor.py", "responses-RESPONSES_TOOLS"),
    *(
        Way("dspy", "structured_dspy.py", f"{api}-{adapter}")
        for api in ("chat", "responses", "messages")
        for adapter in ("json", "chat", "native")
        if api != "responses" or adapter == "native"
    ),
    *(Way("adk", "structured_adk.py", way) for way in ("chat", "chat-tools", "messages")),
    *(Way("inspect", "structured_inspect.py", api) for api in ("chat", "responses", "messages")),
    *(Way("agent-framework", "structured_agent_framework.py", api) for api in ("chat", "responses", "messages")),
    Way("autogen", "structured_autogen.py", "chat"),
    *(Way("crewai", "structured_crewai.py", f"{api}-model") for api in ("chat", "responses", "messages")),
    *(Way("crewai", "structured_crewai.py", f"{api}-output_pydantic") for api in ("chat", "responses", "messages")),
    *(Way("npm", "structured_ai_sdk.mjs", f"{api}") for api in ("chat", "responses", "compatible", "messages")),
]


ONLY_WHOLE = [
    (Way("harbor", "structured_harbor.py", "chat"), "whole"),
    *((Way("dspy", "structured_dspy.py", f"responses-{adapter}"), "whole") for adapter in ("json", "chat")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "mode"), [*product(WAYS, ("whole", "stream")), *ONLY_WHOLE], ids=str)
def test_a_client_reads_the_object_that_was_recorded(way: Way, mode: str, tmp_path: Path) -> None:
    command = program(PROGRAMS / way.program, tmp_path / "work", way.way, mode, environment=way.environment)
    seen = Trial(way.environment, command, person, tmp_path / "work", name=f"{way.environment} {way.way}", mode=mode).run()
    [reported] = [line for line in seen.output.splitlines() if line.startswith("{")]  # crewAI draws a box after it
    assert json.loads(reported) == {"name": "Ada", "age": 36}
    assert len(seen.attempt.steps) == 1 and seen.left == [] and seen.apis == {api_of(way.way)}
    assert_trainable(seen.attempt)
