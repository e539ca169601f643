"""The pages on rollout servers list every code, field and option."""

import inspect
import re
from pathlib import Path

import pytest

from penstock_compat.rollout_server.app import create_rollout_server
from penstock_compat.rollout_server.protocol import GraderCompleteRequest, RolloutCompleteRequest, RolloutInitRequest, SampleBody

ROOT = Path(__file__).parents[3]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("environments.md", "design/rollout-server.md"))


def test_every_code_of_an_error_is_listed():
    folder = ROOT / "packages/compat/src/penstock_compat/rollout_server"
    sources = "".join(file.read_text() for file in folder.glob("*.py") if not file.stem.startswith("executor"))
    table = PAGE.split("## Errors by code\n")[1]
    reported = {
        code for line in table.splitlines() if line.startswith("| `") for code in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    used = set(re.findall(r'code="(\w+)"', sources)) | {"not_recorded", "no_such_route", "wrong_method"}
    assert reported == used


@pytest.mark.parametrize("kind", [RolloutInitRequest, RolloutCompleteRequest, GraderCompleteRequest, SampleBody])
def test_every_field_of_a_body_is_named(kind):
    assert [name for name in kind.model_fields if not re.search(rf"\b{name}\b", PAGE)] == []


def test_every_option_of_the_server_is_listed():
    assert [name for name in inspect.signature(create_rollout_server).parameters if f"| `{name}` |" not in PAGE] == []
