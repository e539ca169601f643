"""The dashboard in a real browser: every screen over runs full of hostile texts, wide and narrow, live, and by keyboard."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from postgres_server import server_url
from view_cases import BROKEN, HOSTILE, LONG, going_run, make_evaluation, make_run

SCREENS = {
    "runs": "#/runs?over={run}",
    "run": "#/run/{run}",
    "step": "#/run/{run}/step/1",
    "groups": "#/run/{run}/groups",
    "ended": "#/run/{run}/ended/agent_error",
    "search": "#/run/{run}/search?text=script",
    "group": "#/run/{run}/group/train-0",
    "long group": "#/run/{run}/group/train-2",
    "rollout": "#/run/{run}/rollout/train-0.3.1",
    "judged rollout": "#/run/{run}/rollout/train-0.1.1",
    "long rollout": "#/run/{run}/rollout/train-2.0.1",
    "tokens": "#/run/{run}/tokens/train-0.1.1/1?by=gap",
    "half a character": "#/run/{run}/tokens/train-4.0.1/2",
    "timeline": "#/run/{run}/timeline",
    "pool": "#/run/{run}/pool",
    "evaluations": "#/evals?runs=before%2Cafter",
}
NOT_ENDED = {"open group": "#/run/{run}/group/train-7", "open rollout": "#/run/{run}/rollout/train-7.1.1"}
"""In a run that continues, or that crashed."""
KINDS = ["finished", "live", "crashed", "postgres"]
SHOWN = ("run", "group", "rollout", "judged rollout")
"""Screens on which hostile text is seen; on the others it may be folded or cut."""
MODEL = HOSTILE + LONG
AXE = os.environ.get("PENSTOCK_AXE", "")
"""The file axe.min.js of the npm package axe-core."""


def screens_of(kind: str) -> dict[str, str]:
    """The addresses of all screens over a run."""
    own = SCREENS | (NOT_ENDED if kind in ("live", "crashed") else {})
    return {name: place.format(run=kind) for name, place in own.items()}


class Runs(NamedTuple):
    root: Path
    live: subprocess.Popen


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of every kind, all with hostile texts; `postgres` is made by the test that needs it."""
    root = tmp_path_factory.mktemp("runs")

    def make():
        make_run(root, "finished", model=MODEL)
        make_evaluation(root, "before", {0: [1.0, 1.0], 1: [1.0, 0.0]}, model=MODEL)
        make_evaluation(root, "after", {0: [0.0, 0.0], 1: [1.0, 1.0]}, model=MODEL)

    with ThreadPoolExecutor() as elsewhere:  # the browser's driver keeps an event loop in this thread
        elsewhere.submit(make).result()
    (root / "unreadable").mkdir()
    (root / "unreadable" / "events.jsonl").touch()
    (root / "unreadable" / "config.json").write_text(json.dumps({"config": {"model": {"name": BROKEN + HOSTILE}}}))
    with going_run(root, "crashed", model=MODEL) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (root / "crashed" / name).open("ab") as file:
            file.write(b'{"step": 4, "kind": "rollout.st')  # it was killed in the middle of a line
    with going_run(root, "live", model=MODEL) as process:
        yield Runs(root, process)


@pytest.fixture(scope="module")
def root(runs) -> Path:
    return runs.root


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


def faults(page, name: str) -> list[str]:
    """What is wrong with a screen, wide and on a phone, with everything unfolded."""
    page.evaluate("() => document.querySelectorAll('main details').forEach((each) => { each.open = true; })")
    if "rollout" in name:
        page.get_by_text('"messages": [').first.wait_for()  # the exact request of a call
    found = list[str]()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        beyond = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
        found += [f"{beyond} pixels wider than {width}"] if beyond > 0 else []
    page.set_viewport_size({"width": 1280, "height": 900})
    if not page.evaluate("() => window.pwned === undefined && !document.querySelector('main script, main img, main iframe')"):
        found.append("a text became an element")
    text = page.locator("main").inner_text()
    found += (
        ["a mark that turns the direction of what follows"]
        if set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
        else []
    )
    found += ["an error"] if page.locator(".error").count() else []
    found += ["nothing"] if len(text) < 20 else []
    found += ["no hostile text"] if name in SHOWN and HOSTILE.split(">")[0] not in text else []
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_script_runs_and_nothing_overflows(browsing, root, kind):
    if kind == "postgres":
        url = server_url()
        with ThreadPoolExecutor() as elsewhere:
            elsewhere.submit(make_run, root, "postgres", pool="postgres", url=url, model=MODEL).result()
    found = {name: faults(browsing.open(place), name) for name, place in screens_of(kind).items()}
    assert {name: each for name, each in found.items() if each} == {}
    status = {"live": "running", "crashed": "interrupted"}.get(kind, "finished")
    assert browsing.open(f"#/run/{kind}").locator(f".badge.{status}").is_visible()


def test_missing_screen_and_unreadable_run_are_reported(browsing):
    page = browsing.open("#/run/finished/nothing")
    assert "cannot be shown" in page.locator("main").inner_text()
    page = browsing.open("#/runs")
    page.get_by_text("1 cannot be read").click()
    assert page.get_by_text("unreadable: ").is_visible()


def test_judges_note_is_read_though_half_character_is_in_it(browsing):
    page = browsing.open("#/run/finished/rollout/train-2.0.1")
    note = page.locator("#why pre").first.inner_text()
    assert HOSTILE.split()[0] in note and "more characters)" in note


def test_reason_for_a_reward_takes_three_clicks(browsing):
    page = browsing.open("#/run/finished")
    page.get_by_role("link", name="step 1, reward 0.5").click()
    page.get_by_role("link", name="0", exact=True).first.click()
    assert f"grader {HOSTILE.split()[0]}" in page.locator("#why").inner_text() and "gave 0" in page.locator("#why").inner_text()
    page.get_by_text("Which of its tokens were trained?").click()
    page.get_by_text("These tokens were trained in step 1").wait_for()


def test_words_of_a_conversation_are_found_from_anywhere_and_marked(browsing):
    page = browsing.open("#/run/finished/pool")
    page.keyboard.press("/")
    page.keyboard.type("ANSWER 3")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Search").wait_for()
    assert page.locator("mark").first.inner_text() == "answer 3"
    page.get_by_role("link", name="train-5.3.1").click()
    page.get_by_role("heading", name="Rollout train-5.3.1").wait_for()


def test_a_token_shows_what_engine_and_trainer_said(browsing):
    page = browsing.open("#/run/finished/tokens/train-0.1.1/1")
    page.locator("#t0").click()
    reported = page.locator("#token").inner_text()
    assert "-0.375" in reported and "1.1331" in reported and "yes, in step 1" in reported  # -0.5 + 0.125, and its exponential
    page.locator("#t0").press("ArrowRight")
    assert page.evaluate("() => document.activeElement.id") == "t1"


def test_a_click_on_a_curve_opens_its_step(browsing):
    page = browsing.open("#/run/finished")
    over = page.locator(".chart", has_text="Entropy").locator(".u-over")
    over.wait_for()
    over.click(position={"x": 3, "y": 40})
    page.get_by_role("heading", name="Step 1").wait_for()


def test_a_new_step_appears_without_a_reload(browsing, runs):
    page = browsing.open("#/run/live")
    page.evaluate("() => { window.same = true; }")
    assert page.get_by_role("link", name="step 4, reward 0.5").count() == 0
    runs.live.stdin.write(b"continue\n")
    runs.live.stdin.flush()
    page.get_by_role("link", name="step 4, reward 0.5").wait_for()
    assert page.evaluate("() => window.same") is True


def test_everything_is_reached_by_keyboard(browsing):
    page = browsing.open("#/runs")
    page.keyboard.press("/")
    page.keyboard.press("j")
    for _ in range(20):
        if page.evaluate("() => document.activeElement.getAttribute('href')") == "#/run/finished":
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
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_on_any_screen(browser, address, scheme, width):
    more = {"bypass_csp": True, "color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    opened, found = Browsing(browser, address, **more), dict[str, list[str]]()
    for name, place in (screens_of("finished") | {"nothing": "#/run/finished/nothing", "live": "#/run/live"}).items():
        page = opened.open(place)
        page.evaluate("() => document.querySelectorAll('main details').forEach((each) => { each.open = true; })")
        page.wait_for_timeout(200)  # charts are drawn in the next frame
        page.add_script_tag(path=AXE)
        serious = page.evaluate(
            """() => axe.run().then((found) => found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
                .map((each) => `${each.id}: ${each.nodes[0].html.slice(0, 200)}`))"""
        )
        found |= {name: serious} if serious else {}
    opened.close()
    assert found == {}


def test_an_exported_run_is_one_file_that_asks_for_nothing(browser, root, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "view", str(root / "finished"), "--export", str(tmp_path / "page.html"), "--json"]
    )
    assert done.returncode == 0 and (tmp_path / "page.html").stat().st_size < 8_000_000
    opened = Browsing(browser, (tmp_path / "page.html").resolve().as_uri())
    for place, heading in (
        ("", "finished"),
        ("#/run/finished/step/1", "Step 1"),
        ("#/run/finished/tokens/train-0.1.1/1", "Tokens of call 1"),
    ):
        page = opened.open(place)
        assert heading in page.locator("h1").first.inner_text()
        assert page.evaluate("() => window.pwned === undefined && !document.querySelector('main script, main img')")
    page = opened.open("#/run/finished/rollout/train-0.3.1")
    assert "agent_error: boom" in page.locator("#why").inner_text()
    page = opened.open("#/run/finished/rollout/nobody")
    assert "holds a part of the run" in page.locator("main").inner_text()
    opened.close()


def test_page_asks_for_its_token_and_hides_it(browser, root):
    command = [sys.executable, "-m", "penstock", "view", str(root), "--host", "0.0.0.0", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        reported = json.loads(process.stdout.readline())
        page = browser.new_page()
        page.goto(reported["url"])
        for token in ("a wrong one", reported["token"]):
            page.get_by_role("heading", name="A token is needed").wait_for()
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Open").click()
        page.get_by_role("link", name="crashed").click()
        page.get_by_role("heading", name="What was lost and why").wait_for()
        page.reload()
        page.get_by_role("heading", name="What was lost and why").wait_for()
        assert reported["token"] not in page.url
        page.close()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def test_the_demo_shows_a_recorded_run(browser):
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "view", "--demo", "--port", "0", "--no-browser"], stdout=subprocess.PIPE, text=True
    )
    try:
        opened = Browsing(browser, json.loads(process.stdout.readline())["url"])
        page = opened.open("#/run/multiply")
        assert page.locator(".badge.finished").is_visible() and page.get_by_text("control: start policy").is_visible()
        assert {"agent_error", "greedy", "reply_edited"} <= set(page.locator("#lost").inner_text().split())
        opened.close()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
