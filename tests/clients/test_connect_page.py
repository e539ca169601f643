"""The page about connecting agents: its samples run as they are written, its tables are complete."""

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from client_record import assert_trainable, only_path
from client_trial import Trial, program
from connect_page import GATEWAY, TEXT, blocks, variables

from penstock.gateway import graph
from penstock.gateway.dialects import DIALECTS
from penstock.sdk.environment import rollout_environment

APIS = {"Chat Completions": "chat", "Responses": "responses", "Messages": "messages", "Completions": "completions"}
GREETING = "Hello to you, naïvely…"


class Sample(NamedTuple):
    heading: str
    language: str
    environment: str
    place: int = 0


SAMPLES = [
    Sample("openai", "python", "vendor"),
    Sample("openai", "python", "vendor", 1),
    Sample("anthropic", "python", "vendor"),
    Sample("openai-agents", "python", "vendor"),
    Sample("strands-agents", "python", "strands"),
    Sample("litellm", "python", "litellm"),
    Sample("LangChain", "python", "langchain"),
    Sample("LangChain", "python", "langchain", 1),
    Sample("openai", "js", "npm"),
    Sample("anthropic", "js", "npm"),
]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.heading}-{sample.language}-{sample.place}")
def test_a_sample_prints_what_was_recorded(sample: Sample, tmp_path: Path) -> None:
    source = tmp_path / "sample" / ("sample.py" if sample.language == "python" else "sample.mjs")
    source.parent.mkdir()
    source.write_text(blocks(sample.heading, sample.language)[sample.place])
    command = program(source, tmp_path / "work", environment=sample.environment)
    seen = Trial(sample.environment, command, lambda _: GREETING, tmp_path / "work").run()
    assert seen.output.strip() == GREETING and len(only_path(seen.attempt)) == 1 and seen.left == []
    assert_trainable(seen.attempt)


def test_every_sample_of_the_page_is_run() -> None:
    assert len([sample for sample in SAMPLES if sample.language == "python"]) == TEXT.count("```python\n")
    assert len([sample for sample in SAMPLES if sample.language == "js"]) == TEXT.count("```js\n")
    assert variables().keys() == {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"}


def test_the_table_of_refused_fields_is_complete() -> None:
    modules = {name: DIALECTS.load(name).__module__ for name in APIS.values()}
    for title, name in APIS.items():
        row = GATEWAY.partition(f"\n- {title}: ")[2].partition("\n- ")[0].partition("\n\n")[0]
        assert re.findall(r"`(\w+)`", row) == list(import_module(modules[name]).NEUTRAL)


def test_every_refused_field_has_its_reason_on_the_page() -> None:
    table = GATEWAY.partition("| Field | Reason |")[2].partition("\n\n")[0]
    reasons = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")}
    refused = {name for dialect in APIS.values() for name in import_module(DIALECTS.load(dialect).__module__).NEUTRAL}
    assert refused <= reasons


def test_the_table_of_breaks_is_complete() -> None:
    reasons = {graph.HISTORY_EDITED, graph.REPLY_EDITED, graph.TOOLS_CHANGED, graph.TEMPLATE_REWRITES}
    assert (
        set(re.findall(r"^\| `(\w+)` \| ", GATEWAY.partition("| Reason | What happened |")[2].partition("\n\n")[0], re.MULTILINE))
        == reasons
    )


def test_penstock_run_sets_what_the_page_exports() -> None:
    session = SimpleNamespace(base_url="{root}/v1", token="{token}", rollout_id="adhoc-0.0.1")
    assert variables().items() <= rollout_environment(session.base_url, session.token, session.rollout_id).items()
