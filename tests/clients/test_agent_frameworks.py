"""Agent frameworks and kits as their registries ship them: a tool is called, and every token is exact."""

from pathlib import Path
from typing import NamedTuple

import pytest
from client_record import assert_trainable, breaks, paths
from client_trial import PROGRAMS, Trial, api_of, program
from scripts import Script, adder, finisher, speaker


class Framework(NamedTuple):
    environment: str
    program: str
    api: str
    says: str = "The sum is 5"
    script: Script = adder
    breaks: tuple[str, ...] = ()
    """Reasons that its way of sending the history has."""
    modes: tuple[str, ...] = ("whole", "stream")


FRAMEWORKS = [
    *(Framework("pydantic-ai", "pydantic_ai_agent.py", api) for api in ("chat", "responses", "messages")),
    *(Framework("npm", "ai_sdk.mjs", api) for api in ("chat", "responses", "compatible", "messages")),
    Framework("autogen", "autogen_agent.py", "chat", breaks=("tools_changed",)),
    Framework("autogen", "autogen_agent.py", "messages"),  # its client for Anthropic sends the tools with every call
    Framework(  # its agent for Responses sends the history next to `previous_response_id`, which holds it already
        "autogen",
        "autogen_responses.py",
        "responses",
        says="The sums are 30 and 15.",
        script=speaker,
        breaks=("history_edited",),
        modes=("whole",),
    ),
    Framework("adk", "adk_agent.py", "chat", says='The sum is {"result": 5}'),
    Framework("adk", "adk_agent.py", "messages"),
    *(Framework("inspect", "inspect_agent.py", api) for api in ("chat", "responses", "messages")),
    *(Framework("agent-framework", "agent_framework_agent.py", api) for api in ("chat", "responses", "messages")),
    *(
        Framework("harbor", "harbor_chat.py", api, says="The sums are 5.", script=speaker, modes=("whole",))
        for api in ("responses", "messages")
    ),
    *(
        Framework("smolagents", "smolagents_agent.py", kind, script=finisher, breaks=("reply_edited",))
        for kind in ("tools", "code", "json")
    ),
    *(Framework("crewai", "crewai_agent.py", api, breaks=("reply_edited",)) for api in ("chat", "messages")),
    # Streamed, crewAI 1.15.30 drops the calls of a response to an agent, and says that the reply is empty.
    Framework("crewai", "crewai_agent.py", "responses", breaks=("reply_edited",), modes=("whole",)),
    *(Framework("verifiers", "verifiers_agent.py", api) for api in ("chat", "responses", "messages")),
    *(Framework("litellm-proxy", "litellm_proxy.py", api) for api in ("chat", "responses", "messages")),
    *(
        Framework(tracer, "traced_openai.py", f"{tracer}-{api}")
        for tracer in ("mlflow", "langfuse")
        for api in ("chat", "responses")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "mode"),
    [
        pytest.param(each, mode, id=f"{each.program.partition('.')[0]}-{each.api}-{mode}")
        for each in FRAMEWORKS
        for mode in each.modes
    ],
)
def test_an_agent_calls_its_tool_and_the_record_is_exact(each: Framework, mode: str, tmp_path: Path) -> None:
    command = program(PROGRAMS / each.program, tmp_path / "work", mode, each.api, environment=each.environment)
    name = f"{each.program.partition('.')[0]} {each.api}"
    seen = Trial(each.environment, command, each.script, tmp_path / "work", name=name, mode=mode).run()
    assert each.says in seen.output and seen.left == [] and seen.apis == {api_of(each.api)}
    assert_trainable(seen.attempt)
    assert set(breaks(seen.attempt)) == set(each.breaks)
    assert len(paths(seen.attempt)) == 1 or each.breaks
