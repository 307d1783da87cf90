"""The demo's front page, button by button, as a visitor presses them."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

# The lease of a dead attempt, and a start of the demo on a busy machine.
CRASH_MS = 60_000


def press(page: Page, name: str, told: str, timeout_ms: float = 20_000) -> None:
    page.get_by_role("button", name=f"Run: {name}").click()
    expect(page.get_by_role("status")).to_contain_text(told, timeout=timeout_ms)


def executed(page: Page, what: str) -> int:
    return page.locator("#ledger tr", has_text=what).count()


@pytest.mark.parametrize(
    "page", [{}, {"color_scheme": "dark"}], indirect=True, ids=["day", "night"]
)
def test_every_promise_is_kept_in_front_of_the_visitor(demo, page):
    page.goto(f"{demo.url}/")
    press(page, "First call", "Answered 201")
    press(page, "Retry it", "Replayed")
    press(page, "Reuse the key for something else", "Refused with 422")
    assert executed(page, "first-") == 1
    press(page, "Fifty at once", "Fifty requests, 1 charge")
    assert executed(page, "fifty-") == 1
    press(page, "Wait for a slow one", "waited and got")
    assert executed(page, "slow-") == 1
    found = Axe().run(page).response["violations"]
    assert [item["id"] for item in found if item["impact"] != "minor"] == []
    expect(page.get_by_role("link", name="dashboard")).to_have_attribute("href", "/retrysafe/")


def test_a_crash_is_survived_without_a_terminal(demo, page):
    """The server dies twice in earnest, comes back by itself, and nothing happens twice."""
    page.goto(f"{demo.url}/")
    press(page, "Crash in the middle", "charged once", CRASH_MS)
    assert executed(page, "crash-") == 1
    press(page, "Die between two steps", "one receipt", CRASH_MS)
    for what in ("reservation", "receipt", "checkout"):
        row = page.locator("#ledger tr", has=page.get_by_role("cell", name=what, exact=True))
        expect(row).to_have_count(1)
    expect(page.locator("#log")).to_contain_text(re.compile("the server has died", re.IGNORECASE))
