"""Takes the pictures of the dashboard in docs/view/: every screen of the demo run, light and dark. Needs Chromium and Playwright.

`python tools/view_screenshots.py`
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SCREENS = {
    "runs": "#/runs?over=multiply",
    "run": "#/run/multiply",
    "lost": "#/run/multiply",
    "step": "#/run/multiply/step/3",
    "groups": "#/run/multiply/groups",
    "search": "#/run/multiply/search?text=12",
    "group": "#/run/multiply/group/train-8",
    "rollout": "#/run/multiply/rollout/train-8.0.1",
    "tokens": "#/run/multiply/tokens/train-8.0.1/1?by=entropy",
    "sides": "#/run/multiply/tokens/train-8.0.1/0?by=gap",
    "timeline": "#/run/multiply/timeline?span=8",
    "pool": "#/run/multiply/pool",
    "evaluations": "#/evals?runs=evals%2Fstart%2Cevals%2Ftrained",
}
OUT = Path(__file__).parents[1] / "docs" / "view"


def main() -> None:
    OUT.mkdir(exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    server = [sys.executable, "-m", "penstock", "view", "--demo", "--port", "0", "--no-browser"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process, sync_playwright() as driver:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["url"]
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
            for name, place in SCREENS.items():
                page.goto("about:blank")
                page.goto(address + place)
                page.wait_for_selector("body[data-ready]", state="attached")
                if name in ("tokens", "sides"):
                    page.locator("#t0").click()
                page.wait_for_timeout(400)  # charts are drawn in the next frame
                if name == "lost":
                    page.evaluate("() => scrollTo(0, document.body.scrollHeight)")
                page.screenshot(path=OUT / f"{name}-{scheme}.png")
        browser.close()
        process.terminate()


if __name__ == "__main__":
    main()
