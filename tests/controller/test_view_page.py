"""The dashboard that a controller serves: the same page for all its runs, behind its tokens."""

import asyncio
from pathlib import Path

import aiohttp
from served_controller import add_training
from view_cases import make_run

from penstock_controller.api.app import serve_controller
from penstock_controller.context import ControllerLimits, open_controller
from penstock_controller.home import Home


async def asked(home: Path, *paths: str) -> dict[str, tuple[int, object]]:
    """Answers with the owner's token; a path that begins with ! is asked without."""
    found = {}
    async with open_controller(Home(home), ControllerLimits(runs=0)) as opened:
        run, out = add_training(opened.runs, opened.home, "trained")
        out.parent.mkdir(parents=True, exist_ok=True)
        made = await asyncio.to_thread(make_run, out.parent, "trained")
        assert made == out
        if "linked" in paths:
            (out / "summary.json").unlink()
            (out / "summary.json").symlink_to(opened.home.database)
        async with serve_controller(opened) as url, aiohttp.ClientSession() as session:
            for path in paths:
                headers = {} if path.startswith("!") else {"Authorization": f"Bearer {opened.home.token()}"}
                async with session.get(f"{url}/view/{path.strip('!').replace('RUN', run.id)}", headers=headers) as answer:
                    text = await answer.json() if "json" in answer.content_type else await answer.text()
                    found[path] = answer.status, text
    return found


def test_the_page_is_open_and_its_data_needs_a_token(tmp_path):
    found = asyncio.run(
        asked(tmp_path, "!", "!main.js", "!api/runs", "api/runs", "api/rollout?run=RUN&rollout=train-0.1.1", "api/run?run=x")
    )
    assert [status for status, _ in found.values()] == [200, 200, 401, 200, 200, 404]
    (run,) = found["api/runs"][1]["runs"]
    assert (run["name"], run["kind"], run["step"]) == ("trained", "train", 3)
    assert found["api/rollout?run=RUN&rollout=train-0.1.1"][1]["reward"] == 1.0


def test_link_in_place_of_a_file_is_not_followed(tmp_path):
    found = asyncio.run(asked(tmp_path, "linked", "api/run?run=RUN", "api/runs"))
    assert found["api/run?run=RUN"][0] == 404 and found["api/runs"][1]["runs"] == []
    assert "links in place of files" in found["api/runs"][1]["unreadable"][0]
