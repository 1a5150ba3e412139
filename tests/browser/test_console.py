"""The console in a browser: by keyboard, on a phone, without a script, and under its own policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from flask import Flask, Response

from flask_idempotency.contrib.console import addresses, console_blueprint
from tests.support.apps import Shop, close, guard, make_shop, new_key, send
from tests.support.browser import Complaints

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]

#: A body that would be a script, were it not shown as text.
SCRIPT = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"

#: What sticks out of the window, by its tag and class.
TOO_WIDE = """() => [...document.querySelectorAll("body *")]
    .filter(it => it.getBoundingClientRect().right > innerWidth + 0.5)
    .map(it => `${it.tagName} ${it.className}`)"""

#: How wide the captions are that one sees.
CAPTIONS = """() => [...document.querySelectorAll("caption")]
    .map(it => it.getBoundingClientRect().width).filter(width => width > 1)"""

#: What has the focus, and whether one can see that.
FOCUSED = """() => {
    const it = document.activeElement, style = getComputedStyle(it), box = it.getBoundingClientRect();
    return [it.id || it.textContent.trim(), style.outlineStyle !== "none" && box.width > 0 && box.left >= 0];
}"""


@pytest.fixture
def shop(sqlite_url: str) -> Iterator[Shop]:
    """A shop with keys of all kinds, whose counts say that they were retried."""
    shop = make_shop(sqlite_url)
    shop.app.register_blueprint(
        console_blueprint(authorize=lambda: True, writable=True, bodies=True, url_prefix="/ops")
    )
    guard(shop, lambda: Response(SCRIPT, headers={"X-Trace": "t" * 300}, mimetype="text/html"), "/page")
    guard(shop, lambda: ("failed", 500), "/orders/17/cancel", on_error="hold")
    for tenant in ("acme", "globex"):
        for _ in range(3):
            shop.charge(new_key(), tenant=tenant)
    send(shop, "w" * 200, "/page", headers={"X-Tenant": "a very/long scope%" * 12})
    send(shop, "held-1234", "/orders/17/cancel")
    counts = {"replays": 14, "conflicts": 3, "mismatches": 1, "early_replays": 9, "late_replays": 2}
    shop.execute(sa.update(shop.table).where(shop.table.c.id == 2).values(counts))
    yield shop
    close(shop.app)


@pytest.fixture
def ops(shop: Shop, serve: Callable[[Flask], str]) -> str:
    """Where its console is."""
    return serve(shop.app) + "/ops"


def listed(page: Page) -> list[str]:
    """The keys of the list that is shown."""
    return page.locator("tbody th a").all_inner_texts()


def press(page: Page, key: str, until: str, most: int = 20) -> None:
    """Press a key until the element of that name has the focus, and each on the way shows that it has it."""
    for _ in range(most):
        page.keyboard.press(key)
        name, seen = page.evaluate(FOCUSED)
        assert seen, name
        if name == until:
            return
    raise AssertionError(f"{until} can't be reached by keyboard.")


def test_filters_by_keyboard(page: Page, ops: str) -> None:
    """Filters can be set, sent and cleared without a mouse, and one sees where one is."""
    page.goto(f"{ops}/keys")
    press(page, "Tab", "Skip to the content", 1)
    page.keyboard.press("Enter")
    press(page, "Tab", "scope", 1)
    page.keyboard.type("acme")
    press(page, "Tab", "status")
    page.keyboard.type("comp")
    press(page, "Shift+Tab", "key")
    page.keyboard.press("Enter")
    page.wait_for_url("**/keys?scope=acme&key=&path=&status=completed")
    assert 3 == len(listed(page))
    assert ["acme", "completed"] == [page.get_by_label(one).input_value() for one in ("Scope", "Status")]
    press(page, "Tab", "Clear", 30)
    page.keyboard.press("Enter")
    page.wait_for_url("**/keys")
    assert 8 == len(listed(page))
    press(page, "Tab", "held-1234", 30)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Key held-1234").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(new_page: Callable[..., Page], ops: str, shop: Shop, complaints: Complaints, scheme: str) -> None:
    """Each page is as wide as a phone, in light and in dark, whatever the length of keys, scopes and headers."""
    complaints.expect("400")
    page = new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme, is_mobile=True, has_touch=True)
    long = next(row for row in shop.rows() if row["key"].startswith("www"))
    key = f"/keys/{addresses.packed(long['scope'])}/{addresses.packed(long['key'])}"
    for path in ("", "/keys", "/keys?before=x", "/live", "/held", "/endpoints", key, f"{key}/release"):
        page.goto(ops + path)
        assert (360, []) == (page.evaluate("document.documentElement.scrollWidth"), page.evaluate(TOO_WIDE)), path
        assert all(width > 300 for width in page.evaluate(CAPTIONS)), path
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme] == colour


def test_nothing_recorded_runs(page: Page, ops: str, shop: Shop) -> None:
    """A recorded page is shown as its text, and a download of it is a file with its bytes, which is not opened."""
    page.goto(f"{ops}/keys?path=/page")
    page.locator("tbody th a").click()
    assert SCRIPT == page.locator("pre").inner_text()
    assert page.title().startswith("Key www")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert "body.bin" == download.value.suggested_filename
    assert SCRIPT == download.value.path().read_text()


def test_policy_is_in_force(page: Page, ops: str, complaints: Complaints) -> None:
    """A script that got into a page would not run: the browser refuses it by the page's policy."""
    complaints.expect("Content Security Policy")
    page.goto(ops)
    page.evaluate(
        "() => { const it = document.createElement('script'); it.text = 'document.title = \"run\"'; "
        "document.body.append(it); }"
    )
    assert "run" != page.title()


def test_release(new_page: Callable[..., Page], ops: str, shop: Shop) -> None:
    """A recorded key is released without any script: asked for, refused without the box, and done with it."""
    page = new_page(java_script_enabled=False)
    page.goto(f"{ops}/held")
    page.get_by_role("link", name="held-1234").click()
    page.get_by_role("link", name="Release …").click()
    page.get_by_role("button", name="Release").click()
    page.get_by_text("is released").wait_for()
    page.goto(f"{ops}/keys?scope=globex")
    key = listed(page)[0]
    page.get_by_role("link", name=key).click()
    page.get_by_role("link", name="Release …").click()
    page.get_by_role("link", name="Leave it as it is").click()
    assert 7 == len(shop.rows())
    page.get_by_role("link", name="Release …").click()
    page.get_by_label("Drop the recorded answer").check()
    page.get_by_role("button", name="Release").click()
    page.get_by_role("status").get_by_text("is released").wait_for()
    assert key not in [row["key"] for row in shop.rows()]


def test_plots(new_page: Callable[..., Page], ops: str, picture: Callable[[Page, str], None]) -> None:
    """Figures are drawn, and have the same in words for those who don't see them."""
    page = new_page(viewport={"width": 960, "height": 720})
    page.goto(ops)
    drawn = page.get_by_role("img", name="Outcomes of retries")
    assert "replays: 14, conflicts: 3, mismatches: 1." == drawn.locator("desc").text_content()
    widths = [bar.evaluate("it => it.getBoundingClientRect().width") for bar in drawn.locator("rect").all()]
    assert widths[0] > widths[1] > widths[2] > 1
    picture(page, "console")
    page.get_by_text("As a table").nth(2).click()
    assert page.get_by_role("table", name="Outcomes of retries").get_by_role("row", name="conflicts 3").is_visible()


def test_picture() -> None:
    """The picture of the docs is a PNG of less than 150 kB, which its page shows."""
    how = ROOT / "docs" / "howto" / "console.md"
    (link,) = re.findall(r"!\[[^\]]+\]\(([^)]*console\.png)\)", how.read_text())
    found = (how.parent / link).read_bytes()
    assert found.startswith(b"\x89PNG\r\n")
    assert len(found) < 150_000
