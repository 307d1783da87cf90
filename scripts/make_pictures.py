"""Makes the pictures of the README from the running demo under load: make pictures."""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.dashboard.conftest import chromium_binary  # noqa: E402
from tests.demo.server import CHARGE, CHECKOUT, DemoServer, headers_of, new_text  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
LOAD_SECONDS = 45


def load(url: str, until: float) -> None:
    """Charges and checkouts, some sent twice, some declined, some failing."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < until:
            outcome = random.choice(["ok"] * 12 + ["decline", "error"])
            path, body = random.choice(
                [("charges", CHARGE | {"outcome": outcome})] * 3 + [("checkouts", CHECKOUT)]
            )
            key = new_text("invoice" if path == "charges" else "cart")
            for _ in range(random.choice([1, 1, 1, 2])):
                client.post(f"/{path}", headers=headers_of(key), json=body)
            time.sleep(random.random() * 0.3)


def charge_slowly(url: str) -> None:
    """Is still at work when its picture is taken, and the demo ends before it."""
    with suppress(httpx.HTTPError):
        headers = headers_of("slow-invoice")
        httpx.post(
            f"{url}/charges", timeout=90, headers=headers, json=CHARGE | {"delay_ms": 50_000}
        )


def main() -> int:
    binary = chromium_binary()
    if binary is None:
        print("there is no Chromium: apt-get install chromium")
        return 1
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server = DemoServer(f"sqlite:///{folder}/demo.db")
        until = time.monotonic() + LOAD_SECONDS
        threads = [threading.Thread(target=load, args=(server.url, until)) for _ in range(4)]
        threads.append(threading.Thread(target=charge_slowly, args=(server.url,), daemon=True))
        for thread in threads:
            thread.start()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1200, "height": 720})
                page.goto(f"{server.url}/")
                for name in ("First call", "Retry it", "Fifty at once"):
                    page.get_by_role("button", name=f"Run: {name}").click()
                    page.get_by_role("button", name=f"Run: {name}").and_(
                        page.locator(":enabled")
                    ).wait_for()
                page.screenshot(path=FOLDER / "playground.png")
                time.sleep(max(0.0, until - time.monotonic()))
                page.goto(f"{server.url}/retrysafe/")
                page.screenshot(path=FOLDER / "dashboard.png")
                browser.close()
        finally:
            server.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
