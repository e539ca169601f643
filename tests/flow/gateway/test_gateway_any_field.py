"""Requests with random fields, documented or unknown, in every dialect: served, or refused by a field of the page's list."""

import asyncio
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from gateway_cases import renderer
from random_requests import DIALECTS, random_request

from penstock.testing import ScriptedEngine, workbench

REQUESTS = 2000 if os.environ.get("PENSTOCK_FAULTS") == "full" else 120
PAGE = (Path(__file__).parents[3] / "docs/gateway.md").read_text()


def refused_fields(title):
    """The fields that the page says are refused."""
    row = PAGE.partition(f"\n- {title}: ")[2].partition("\n- ")[0].partition("\n\n")[0]
    reasons = PAGE.partition("| Field | Reason |")[2].partition("\n\n")[0]
    return set(re.findall(r"`(\w+)`", row)) | {"best_of", "echo", "logit_bias"} & set(re.findall(r"`(\w+)`", reasons))


@pytest.mark.parametrize("path", DIALECTS)
def test_documented_field_is_served_or_refused_as_page_says(path):
    """A refusal must name a field of the page's list that the request has; what is unknown is counted."""
    dice, title = random.Random(path), DIALECTS[path][0]
    listed, seen = refused_fields(title), Counter()

    async def main():
        engine = ScriptedEngine(lambda _: '{"a": 1}', renderer().tokenizer, chunk=8)
        async with workbench(engine, renderer()) as bench:
            session = await bench.rollout()
            http = bench.http(session.token)
            for _ in range(REQUESTS // len(DIALECTS)):
                body = random_request(dice, path)
                answer = await http.post(path, json=body)
                seen[answer.status_code] += 1
                if answer.status_code != 200:
                    named = re.split(r"[.\[]", str(param_of(answer.json())))[0]
                    assert answer.status_code == 400 and named in listed & body.keys(), (body, answer.text)
            unknown = [name for name in bench.gateway.counts if name.startswith("ignored:field_")]
            assert unknown

    asyncio.run(main())
    assert seen[200] > 0.5 * sum(seen.values()), seen


def param_of(body):
    error = body["error"]
    return error.get("param") or error.get("details", {}).get("param")
