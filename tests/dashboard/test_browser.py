"""The dashboard in a real browser: live, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import re
import threading

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.demo.server import CHARGE, CHECKOUT, headers_of, new_text

LOOKS = [
    {"color_scheme": "light"},
    {"color_scheme": "dark"},
    {"viewport": {"width": 390, "height": 800}, "color_scheme": "light"},
]


def sign_in(page: Page, root: str) -> None:
    page.goto(f"{root}/login")
    page.get_by_label("Token").fill("a long enough token")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def serious(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{item['id']}: {item['help']}" for item in found if item["impact"] != "minor"]


@pytest.fixture
def root(demo) -> str:
    return f"{demo.url}/retrysafe"


@pytest.mark.parametrize("page", LOOKS, indirect=True, ids=["light", "dark", "phone"])
def test_every_page_is_clear_for_everybody(demo, root, page):
    """No serious finding of axe, and nothing wider than the screen."""
    key = new_text("checkout")
    assert demo.post("checkouts", key, CHECKOUT).status_code == 201
    sign_in(page, root)
    pages = ["/", "/keys", f"/keys?key={key}", "/outbox", "/outbox?condition=delivered", "/login"]
    for path in pages:
        page.goto(f"{root}{path}")
        assert serious(page) == [], path
        width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, path
    page.goto(f"{root}/keys?key={key}")
    page.get_by_role("link", name=key).click()
    expect(page.get_by_role("heading", name=key)).to_be_visible()
    for step in ("reserve", "charge", "receipt"):
        expect(page.get_by_role("heading", name=re.compile(step))).to_be_visible()
    assert serious(page) == []


def test_what_runs_appears_and_goes_by_itself(demo, root, page):
    page.goto(f"{root}/")
    key = new_text("slow")
    sent = threading.Thread(
        target=httpx.post,
        args=(f"{demo.url}/charges",),
        kwargs={
            "json": CHARGE | {"delay_ms": 6_000},
            "headers": headers_of(key),
            "timeout": 60,
        },
    )
    sent.start()
    running = page.get_by_role("link", name=key)
    expect(running).to_be_visible()
    sent.join()
    expect(running).to_be_hidden()


def test_a_key_is_found_and_expired_by_keyboard_alone(demo, root, page):
    key = new_text("mistake")
    assert demo.post("charges", key, CHARGE).status_code == 201
    sign_in(page, root)
    page.goto(f"{root}/keys")
    page.get_by_label("Key starts with").focus()
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    link = page.get_by_role("link", name=key)
    link.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Expire…").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=re.compile("Expire"))).to_be_visible()
    page.keyboard.type("charged the wrong card")
    page.keyboard.press("Enter")
    expect(page.get_by_text("outlived")).to_be_visible()


def test_who_has_not_signed_in_sees_what_could_be_done(demo, root, page):
    key = new_text("look")
    assert demo.post("charges", key, CHARGE).status_code == 201
    page.goto(f"{root}/keys?key={key}")
    page.get_by_role("link", name=key).click()
    expect(page.get_by_role("button", name="Expire…")).to_be_disabled()
    expect(page.get_by_role("link", name="Sign in", exact=True)).to_be_visible()
