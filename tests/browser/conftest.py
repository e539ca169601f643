"""A real browser, where one is installed: pages are read as a person would see them."""

import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Of one file only: as long as it is open, its driver keeps an event loop in this thread, where others want to run theirs."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def read(browser):
    """Opens a file; fails at the end if the page had an error, or asked for anything else."""
    troubles = []
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: troubles.append(request.url) if not request.url.startswith("file:") else None)

    def open_file(path):
        page.goto(path.resolve().as_uri())
        return page

    yield open_file
    page.close()
    assert troubles == []
