"""The example's page in a browser: pay, lose the answer, and look into the ledger."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from flask import Flask

from examples.payments.shop import create_app
from tests.support.apps import close
from tests.support.browser import Complaints
from tests.support.server import GunicornServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]

LOSE = "Lose the next answer"
GUARD = "Flask-Idempotency guards the route"

#: What Chromium says of a connection that was cut.
CUT = "ERR_EMPTY_RESPONSE"


#: What does not fit into its box or into the window, by its tag and id. Inline elements have no width of their own.
TOO_WIDE = """() => [...document.querySelectorAll("html, body *")]
    .filter(it => it.clientWidth && it.scrollWidth > it.clientWidth || it.getBoundingClientRect().right > innerWidth)
    .map(it => `${it.tagName} ${it.id}`)"""


@pytest.fixture
def shop(sqlite_url: str, serve: Callable[[Flask], str]) -> Iterator[str]:
    """Where the shop is open, under Werkzeug's server, with a provider that takes no time."""
    app = create_app({"SQLALCHEMY_DATABASE_URI": sqlite_url, "PROVIDER_DELAY": 0})
    yield serve(app)
    close(app)


@pytest.fixture
def shop_of_gunicorn(sqlite_url: str, gunicorn: Callable[..., GunicornServer]) -> Iterator[str]:
    """Where the same shop is open under gunicorn, which keeps connections open for further requests."""
    env = {"FLASK_SQLALCHEMY_DATABASE_URI": sqlite_url, "FLASK_PROVIDER_DELAY": "0"}
    app = "examples.payments.shop:create_app()"
    server = gunicorn(app, worker_class="gthread", workers=2, threads=4, preload=True, env=env)
    yield server.url
    assert "Traceback" not in server.log


def open_shop(page: Page, address: str) -> None:
    """Go in, and wait until there is a ledger."""
    page.goto(address)
    page.get_by_text("No charge yet").wait_for()
    page.locator("#pay:not([aria-disabled])").wait_for()


def pay(page: Page, verdict: str, button: str = "Pay 42.00 EUR") -> None:
    """Press the button, and wait for the verdict."""
    page.get_by_role("button", name=button).click()
    page.get_by_role("status").get_by_text(verdict).wait_for()
    page.locator("#pay:not([aria-disabled])").wait_for()


def ledger(page: Page) -> list[str]:
    """For which payment each charge of the ledger is, and what is below them."""
    return page.locator("#charges td:nth-child(2), #count").all_inner_texts()


def messages(page: Page) -> list[str]:
    """What was sent and what came back, without keys and numbers of charges."""
    lines = page.get_by_role("log").get_by_role("listitem").all_inner_texts()
    return [re.sub(r"[0-9a-f]{32}|no\. \d+", "*", line) for line in lines]


def keys(page: Page) -> list[str]:
    """The keys that were sent, in order."""
    return re.findall(r"Idempotency-Key: ([0-9a-f]{32})", page.get_by_role("log").inner_text())


def test_pay(page: Page, shop: str) -> None:
    """Two payments are two charges under two keys."""
    open_shop(page, shop)
    pay(page, "Charged once.")
    pay(page, "Charged once.")
    assert ["payment 1", "payment 2", "2 payments, 2 charges"] == ledger(page)
    assert "84.00 EUR" == page.locator("#total").inner_text()
    assert 2 == len(set(keys(page)))
    assert ["→ POST /charges, Idempotency-Key: *", "← 201: charge *"] * 2 == messages(page)


def test_lost_answer(
    new_page: Callable[..., Page], shop: str, complaints: Complaints, picture: Callable[[Page, str], None]
) -> None:
    """A payment whose answer is lost is sent again with its key, gets the replay, and is charged once."""
    complaints.expect(CUT)
    page = new_page(viewport={"width": 900, "height": 640})
    open_shop(page, shop)
    page.get_by_role("switch", name=LOSE).check()
    pay(page, "Charged once: the retry got the recorded answer")
    assert ["payment 1", "1 payment, 1 charge"] == ledger(page)
    sent, nothing, again, replay = messages(page)
    assert sent == again == "→ POST /charges, Idempotency-Key: *"
    assert nothing.startswith("← nothing (")
    assert "← 201, Idempotent-Replay: true: charge *" == replay
    assert 1 == len(set(keys(page)))
    assert not page.get_by_role("switch", name=LOSE).is_checked()
    picture(page, "shop")


@pytest.mark.parametrize("shown_in", ["README.md", "examples/payments/README.md"])
def test_picture(shown_in: str) -> None:
    """The page's picture is a PNG of less than 150 kB, which both READMEs show."""
    readme = ROOT / shown_in
    (link,) = re.findall(r"!\[[^\]]+\]\(([^)]*shop\.png)\)", readme.read_text())
    assert ROOT / "docs" / "_static" / "shop.png" == (readme.parent / link).resolve()
    picture = (readme.parent / link).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) < 150_000


@pytest.mark.parametrize("server", ["shop", "shop_of_gunicorn"])
def test_unguarded(page: Page, server: str, request: pytest.FixtureRequest, complaints: Complaints) -> None:
    """Without the guard a payment whose answer is lost is charged twice: by the page's retry, and not by the browser's.

    A browser sends a POST again by itself when a connection breaks that it has used before.
    """
    complaints.expect(CUT)
    open_shop(page, request.getfixturevalue(server))
    page.get_by_role("switch", name=GUARD).uncheck()
    page.get_by_role("switch", name=LOSE).check()
    pay(page, "Charged twice")
    assert ["payment 1", "payment 1, again", "1 payment, 2 charges"] == ledger(page)
    assert ["→ POST /unguarded/charges, Idempotency-Key: *", "← 201: charge *"] == messages(page)[2:]
    assert 1 == len(set(keys(page)))


def test_keyboard(page: Page, shop: str, complaints: Complaints) -> None:
    """Everything can be done by keyboard: the switch, the payment; focus is seen, and stays where it is."""
    complaints.expect(CUT)
    open_shop(page, shop)
    focused = page.locator(":focus")
    names = []
    for press in ("Space", None, "Enter"):
        page.keyboard.press("Tab")
        names.append(focused.get_attribute("id"))
        assert "solid" == focused.evaluate("one => getComputedStyle(one).outlineStyle")
        if press:
            page.keyboard.press(press)
    assert ["lose", "guard", "pay"] == names
    page.keyboard.press("Enter")  # a second press during a payment starts no other
    page.get_by_role("status").get_by_text("Charged once: the retry").wait_for()
    assert "pay" == focused.get_attribute("id")
    assert 2 == len(keys(page))
    assert ["payment 1", "1 payment, 1 charge"] == ledger(page)


def test_phone(new_page: Callable[..., Page], shop: str, complaints: Complaints) -> None:
    """On a narrow phone nothing has to be scrolled sideways, and what is touched is large enough for a finger."""
    complaints.expect(CUT)
    page = new_page(viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    open_shop(page, shop)
    page.get_by_text(GUARD).tap()
    page.get_by_text(LOSE).tap()
    pay(page, "Charged twice")
    pay(page, "Charged once.")
    assert "126.00 EUR" == page.locator("#total").inner_text()
    assert [] == page.evaluate(TOO_WIDE)
    heights = page.locator("button, .switch").evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")
    assert 4 == len(heights)
    assert min(heights) >= 44


def test_payment_without_an_answer(page: Page, shop: str, complaints: Complaints) -> None:
    """A payment that gets no answer keeps its key, over a reload too, and is the one that is tried again."""
    complaints.expect("ERR_INTERNET_DISCONNECTED")
    open_shop(page, shop)
    page.context.set_offline(True)
    pay(page, "The shop does not answer")
    (key,) = keys(page)
    page.context.set_offline(False)
    page.reload()
    page.get_by_text("No charge yet").wait_for()
    pay(page, "Charged once.", "Try again")
    assert [key] == keys(page)
    assert ["payment 1", "1 payment, 1 charge"] == ledger(page)
    assert "Pay 42.00 EUR" == page.locator("#pay").inner_text()


def test_another_ledger(page: Page, shop: str, complaints: Complaints) -> None:
    """A reload keeps the ledger; who starts over, or whom the shop does not know any more, gets an empty one."""
    open_shop(page, shop)
    pay(page, "Charged once.")
    page.reload()
    page.get_by_text("1 payment, 1 charge").wait_for()
    page.get_by_role("button", name="Start over").click()
    page.get_by_text("No charge yet").wait_for()
    assert [] == messages(page)
    pay(page, "Charged once.")
    complaints.expect("401")
    page.evaluate("sessionStorage.setItem('visit', JSON.stringify({token: 'old', payments: 3, charges: {}}))")
    page.reload()
    page.get_by_text("No charge yet").wait_for()
    pay(page, "Charged once.")
    assert ["payment 1", "1 payment, 1 charge"] == ledger(page)


def test_roles(page: Page, shop: str) -> None:
    """A screen reader is told what the switches mean, what the table is, and the verdict when it comes."""
    open_shop(page, shop)
    pay(page, "Charged once.")
    tree = page.locator("main").aria_snapshot()
    for line in (
        f'- switch "{LOSE}"',
        f'- switch "{GUARD}" [checked]',
        '- button "Pay 42.00 EUR"',
        "- status: Charged once.",
        '- table "Ledger":',
        '- log "What is sent, and what comes back":',
    ):
        assert line in tree
    described = page.get_by_role("switch").evaluate_all(
        "all => all.map(one => document.getElementById(one.getAttribute('aria-describedby')).textContent)"
    )
    assert ["The server", "Off: the"] == [" ".join(one.split()[:2]) for one in described]
