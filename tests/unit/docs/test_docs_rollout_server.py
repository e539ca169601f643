"""What `docs/rollout-server.md` says of codes, fields and options is what there is."""

import inspect
import re
from pathlib import Path

import pytest

from penstock.rollout.server.app import create_rollout_server
from penstock.rollout.server.protocol import GraderCompleteRequest, RolloutCompleteRequest, RolloutInitRequest, SampleBody

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/rollout-server.md").read_text()


def test_every_code_of_an_error_is_listed():
    sources = "".join(file.read_text() for file in (ROOT / "src/penstock/rollout/server").glob("*.py"))
    table = PAGE.split("## Errors by code\n")[1]
    told = {code for line in table.splitlines() if line.startswith("| `") for code in re.findall(r"`(\w+)`", line.split("|")[1])}
    used = set(re.findall(r'code="(\w+)"', sources)) | {"not_recorded", "no_such_route", "wrong_method"}
    assert told == used


@pytest.mark.parametrize("kind", [RolloutInitRequest, RolloutCompleteRequest, GraderCompleteRequest, SampleBody])
def test_every_field_of_a_body_is_named(kind):
    assert [name for name in kind.model_fields if not re.search(rf"\b{name}\b", PAGE)] == []


def test_every_option_of_the_server_is_listed():
    assert [name for name in inspect.signature(create_rollout_server).parameters if f"| `{name}` |" not in PAGE] == []
