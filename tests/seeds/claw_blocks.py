"""The code blocks of seed 003, which stand between prose without any mark: Python, YAML and a command line.

What the document leaves out as `...` inside a call, which Python does not take there, is filled in; nothing else is changed.
"""

import re
import shlex
from typing import NamedTuple

from seed_blocks import FOLDER

STARTS = r"(class \w+\(\w+\):|@register|from claw_r1|text, response_ids, prompt_ids = |# agent_flow_config\.yaml|python3 -m )"
NAMES = """
from claw_r1.agent_flow import MultiStepAgentFlow, SingleStepSingleTurnAgentFlow
from claw_r1.agent_flow.agent_flow import AgentFlowBase
from claw_r1.data_pool import Step

"""
"""What the samples use and do not import."""
CALL = 'trajectory_uid=kwargs["trajectory_uid"], prompt_uid=kwargs["prompt_uid"]'


class Samples(NamedTuple):
    """The blocks of the document."""

    generate: str
    single: str
    multi: str
    registered: str
    yaml: str
    command: str


def read_samples() -> Samples | None:
    """None where the document is absent."""
    files = sorted(FOLDER.glob("003_*"))
    if not files:
        return None
    blocks = _blocks(files[0].read_text())
    generate, single, multi, registered, yaml, command = blocks
    return Samples(generate, single, multi, registered, yaml, command)


def _blocks(text: str) -> list[str]:
    """From a line that begins code: as long as lines are indented, blank, or close what is open."""
    lines, found, at = text.splitlines(), [], 0
    while at < len(lines):
        if not re.match(STARTS, lines[at]):
            at += 1
            continue
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or re.match(rf"[ )\-]|{STARTS}", lines[end])):
            end += 1
        found.append("\n".join(lines[at:end]).rstrip() + "\n")
        at = end
    return found


def filled(multi: str) -> str:
    """The sample of several steps, with what it leaves out of its two calls."""
    multi = multi.replace("self.gateway_generate(...)", f"self.gateway_generate({CALL}, messages=messages)")
    return re.sub(r"^( +)\.\.\.$", rf"\1{CALL},", multi, flags=re.MULTILINE)


def with_body(registered: str, single: str) -> str:
    """The registered class, whose body is left out, with the body of the other sample."""
    return registered.replace("    ...\n", single.partition("\n")[2])


def arguments(command: str) -> list[str]:
    """Of the command line: what comes after its module."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python3", "-m", "claw_r1.async_main"] and words[-1] == "..."
    return words[3:-1]
