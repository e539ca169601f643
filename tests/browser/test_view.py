"""The dashboard in a real browser: every screen over runs full of hostile texts, wide and narrow, live, and by keyboard."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from postgres_server import server_url
from view_cases import HOSTILE, make_evaluation, make_run, metrics

from penstock.run.folder import RunFolder

SCREENS = {
    "runs": "#/runs?over=run",
    "run": "#/run/run",
    "step": "#/run/run/step/1",
    "groups": "#/run/run/groups",
    "ended": "#/run/run/ended/agent_error",
    "search": "#/run/run/search?text=script",
    "group": "#/run/run/group/train-0",
    "rollout": "#/run/run/rollout/train-0.3.1",
    "long rollout": "#/run/run/rollout/train-2.0.1",
    "tokens": "#/run/run/tokens/train-0.1.1/1?by=gap",
    "timeline": "#/run/run/timeline",
    "pool": "#/run/run/pool",
    "evaluations": "#/evals?runs=before%2Cafter",
    "nothing": "#/run/run/nothing",
}
AXE = os.environ.get("PENSTOCK_AXE", "")
"""The file axe.min.js of the npm package axe-core."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")

    def make():
        make_run(root)
        make_run(root, "live", finished=False, model="tiny")
        make_evaluation(root, "before", {0: [1.0, 1.0], 1: [1.0, 0.0]})
        make_evaluation(root, "after", {0: [0.0, 0.0], 1: [1.0, 1.0]})

    with ThreadPoolExecutor() as elsewhere:  # the browser's driver keeps an event loop in this thread
        elsewhere.submit(make).result()
    return root


@pytest.fixture(scope="module")
def address(browser, root):
    command = [sys.executable, "-m", "penstock", "view", str(root), "--port", "0", "--no-browser", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


class Browsing:
    """A page that notes everything that must not happen."""

    def __init__(self, browser, address: str, **more) -> None:
        self.troubles = list[str]()
        self._context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | more)
        self.page, self._address = self._context.new_page(), address
        self.page.set_default_timeout(20_000)
        self.page.on(
            "console", lambda message: self.troubles.append(message.text) if message.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.troubles.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: None if request.url.startswith(address) else self.troubles.append(request.url))

    def open(self, place: str):
        self.page.goto("about:blank")
        self.page.goto(self._address + place)
        self.page.wait_for_selector("body[data-ready]", state="attached")
        return self.page

    def close(self) -> None:
        self._context.close()
        assert [each for each in self.troubles if each not in ("about:blank", "data:,")] == []


@pytest.fixture
def browsing(browser, address):
    opened = Browsing(browser, address)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SCREENS)
def test_no_script_runs_and_nothing_overflows(browsing, name):
    page = browsing.open(SCREENS[name])
    page.evaluate("() => document.querySelectorAll('main details').forEach((each) => { each.open = true; })")
    if "rollout" in name:
        page.get_by_text('"messages": [').first.wait_for()  # the exact request of a call
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.evaluate("() => window.pwned === undefined && !document.querySelector('main script, main img')")
    shown = page.locator("main").inner_text()
    assert ("cannot be shown" in shown) == (name == "nothing")
    if name in ("run", "group", "rollout", "tokens"):
        assert page.get_by_text(HOSTILE.split(">")[0]).first.is_visible() or name == "tokens"


@pytest.mark.parametrize("name", ["live", "in-postgres"])
def test_unfinished_and_postgres_runs_show_every_screen(browsing, root, name):
    if name == "in-postgres":
        url = server_url()
        with ThreadPoolExecutor() as elsewhere:
            elsewhere.submit(make_run, root, "in-postgres", pool="postgres", url=url).result()
    for place in SCREENS.values():
        if "/run/run" in place and not place.endswith("nothing"):
            page = browsing.open(place.replace("/run/run", f"/run/{name}"))
            assert page.locator(".error").count() == 0
    assert page.evaluate("() => window.pwned === undefined")


def test_why_a_rollout_got_0_and_which_tokens_were_trained_take_three_clicks(browsing):
    page = browsing.open("#/run/run")
    page.get_by_role("link", name="step 1, reward 0.5").click()
    page.get_by_role("link", name="0", exact=True).first.click()
    assert f"grader {HOSTILE.split()[0]}" in page.locator("#why").inner_text() and "gave 0" in page.locator("#why").inner_text()
    page.get_by_text("Which of its tokens were trained?").click()
    page.get_by_text("These tokens were trained in step 1").wait_for()


def test_words_of_a_conversation_are_found_from_anywhere_and_marked(browsing):
    page = browsing.open("#/run/run/pool")
    page.keyboard.press("/")
    page.keyboard.type("ANSWER 3")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Search").wait_for()
    assert page.locator("mark").first.inner_text() == "answer 3"
    page.get_by_role("link", name="train-5.3.1").click()
    page.get_by_role("heading", name="Rollout train-5.3.1").wait_for()


def test_a_token_shows_what_engine_and_trainer_said(browsing):
    page = browsing.open("#/run/run/tokens/train-0.1.1/1")
    page.locator("#t0").click()
    told = page.locator("#token").inner_text()
    assert "-0.375" in told and "1.1331" in told and "yes, in step 1" in told  # -0.5 + 0.125, and its exponential
    page.locator("#t0").press("ArrowRight")
    assert page.evaluate("() => document.activeElement.id") == "t1"


def test_a_new_step_appears_without_a_reload(browsing, root):
    page = browsing.open("#/run/live")
    page.evaluate("() => { window.same = true; }")
    assert page.get_by_role("link", name="step 4, reward 0.5").count() == 0
    RunFolder(root / "live", resumed=True).add_metrics(metrics(4, []))
    page.get_by_role("link", name="step 4, reward 0.5").wait_for()
    assert page.evaluate("() => window.same") is True


def test_everything_is_reached_by_keyboard(browsing):
    page = browsing.open("#/runs")
    page.keyboard.press("/")
    page.keyboard.press("j")
    for _ in range(20):
        if page.evaluate("() => document.activeElement.getAttribute('href')") == "#/run/run":
            break
        page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="What was lost and why").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("train-0.1.1")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Why this reward").wait_for()
    page.keyboard.press("]")
    page.get_by_role("heading", name="Rollout train-0.2.1").wait_for()
    page.keyboard.press("u")
    page.get_by_role("heading", name="Group train-0").wait_for()
    before = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.skipif(not Path(AXE).is_file(), reason="PENSTOCK_AXE names no axe.min.js (npm package axe-core)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_on_any_screen(browser, address, scheme):
    opened, found = Browsing(browser, address, bypass_csp=True, color_scheme=scheme), dict[str, list[str]]()
    for name, place in SCREENS.items():
        page = opened.open(place)
        page.wait_for_timeout(200)  # charts are drawn in the next frame
        page.add_script_tag(path=AXE)
        faults = page.evaluate("() => axe.run().then((found) => found.violations)")
        serious = [
            f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in faults if each["impact"] in ("serious", "critical")
        ]
        found |= {name: serious} if serious else {}
    opened.close()
    assert found == {}


def test_an_exported_run_is_one_file_that_asks_for_nothing(browser, root, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "view", str(root / "run"), "--export", str(tmp_path / "page.html"), "--json"]
    )
    assert done.returncode == 0 and (tmp_path / "page.html").stat().st_size < 8_000_000
    opened = Browsing(browser, (tmp_path / "page.html").resolve().as_uri())
    for place, heading in (("", "run"), ("#/run/run/step/1", "Step 1"), ("#/run/run/tokens/train-0.1.1/1", "Tokens of call 1")):
        page = opened.open(place)
        assert heading in page.locator("h1").first.inner_text()
        assert page.evaluate("() => window.pwned === undefined && !document.querySelector('main script, main img')")
    page = opened.open("#/run/run/rollout/train-0.3.1")
    assert "agent_error: boom" in page.locator("#why").inner_text()
    page = opened.open("#/run/run/rollout/nobody")
    assert "holds a part of the run" in page.locator("main").inner_text()
    opened.close()


def test_the_demo_shows_a_recorded_run(browser):
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "view", "--demo", "--port", "0", "--no-browser"], stdout=subprocess.PIPE, text=True
    )
    try:
        opened = Browsing(browser, json.loads(process.stdout.readline())["url"])
        page = opened.open("#/run/multiply")
        assert page.locator(".badge.finished").is_visible() and page.get_by_text("control: start policy").is_visible()
        opened.close()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
