"""A browser, and a dashboard that listens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.demo.server import DemoServer
from tests.servers.debian import from_debian
from tests.servers.fixtures import missing

SCREENSHOTS = Path("var/screenshots")


def _chromium() -> Path | None:
    found = shutil.which("chromium")
    return None if found is None else Path(found)


def chromium_binary() -> Path | None:
    """Debian's Chromium, installed where this process may do that."""
    return from_debian("chromium", _chromium)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium without a window.

    Playwright keeps an event loop running in this thread: it ends before other tests need theirs.
    """
    binary = chromium_binary()
    if binary is None:
        missing("Chromium (apt-get install chromium)")
    with sync_playwright() as playwright:
        # The sandbox of Chromium needs rights that containers do not have.
        launched = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser, request) -> Iterator[Page]:
    """A page that fails its test for errors in the console and requests to other hosts.

    Its last picture is kept in var/screenshots.
    """
    options = getattr(request, "param", {})
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page = context.new_page()
    page.set_default_timeout(15_000)
    faults: list[str] = []
    # A browser counts an answer of 409 as an error, and a connection that a crash has cut.
    expected = ("Failed to load resource",)
    page.on(
        "console",
        lambda said: (
            said.type == "error" and not said.text.startswith(expected) and faults.append(said.text)
        ),
    )
    page.on(
        "response",
        lambda got: got.status >= 400 and got.request.method == "GET" and faults.append(got.url),
    )
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request",
        lambda sent: sent.url.startswith("http://127.0.0.1:") or faults.append(sent.url),
    )
    yield page
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{request.node.name}.png", full_page=True)
    context.close()
    assert not faults


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Iterator[DemoServer]:
    """The demo with its dashboard."""
    folder = tmp_path_factory.mktemp("dashboard")
    server = DemoServer(
        f"sqlite:///{folder}/demo.db", 0, "--dashboard-token", "a long enough token"
    )
    try:
        yield server
    finally:
        server.end()
