import pytest

from penstock.chat.bridge import PROBE_TOOLS
from templates import template_cases

CODEX = [
    {"role": "system", "content": "You are an agent."},
    {"role": "system", "content": "Be careful."},
    {"role": "user", "content": "The folder is empty."},
    {"role": "user", "content": "Write a file."},
]
CLAUDE = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Write a file."},
    {"role": "system", "content": "These are the skills."},
]


@pytest.mark.parametrize("talk", [CODEX, CLAUDE])
@pytest.mark.parametrize("tools", [(), PROBE_TOOLS])
@pytest.mark.parametrize("name", template_cases.FAMILIES)
def test_every_template_accepts_openings_of_coding_agents(name, tools, talk):
    renderer = template_cases.renderer(name)
    text = renderer.tokenizer.decode(renderer.root(talk, tools))
    places = [text.find(message["content"]) for message in talk]
    assert min(places) >= 0
