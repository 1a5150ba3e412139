"""The browser of the tests itself: what is reported fails a test, and nothing is left behind in the test's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from flask import Flask

from tests.support.browser import Chromium, Complaints
from tests.support.skips import REQUIRE_ALL

if TYPE_CHECKING:
    from playwright.sync_api import Page

POLICY = "default-src 'none'"


@pytest.fixture
def address(serve: Callable[[Flask], str]) -> str:
    """Where pages are served whose policy allows nothing."""
    app = Flask(__name__)

    @app.get("/<body>")
    def answer(body: str) -> tuple[str, dict[str, str]]:
        return {
            "plain": "<h1>plain</h1>",
            "inline": "<script>document.title = 'ran'</script>",
        }[body], {"Content-Security-Policy": POLICY}

    return serve(app)


def test_page(page: Page, address: str) -> None:
    """A page is rendered by a real browser, in a thread that is not the main one."""
    page.goto(f"{address}/plain")
    assert "plain" == page.get_by_role("heading").inner_text()
    assert threading.current_thread() is not threading.main_thread()


def test_violation(page: Page, address: str, complaints: Complaints) -> None:
    """A script that the page's policy forbids does not run, and is a fault of the test that does not expect it."""
    page.goto(f"{address}/inline")
    assert "ran" != page.title()
    (fault,) = complaints.faults()
    assert "Content Security Policy" in fault
    complaints.expect("Content Security Policy")
    assert [] == complaints.faults()


def test_uncaught_error(page: Page, address: str, complaints: Complaints) -> None:
    """What a page's script throws, and what it writes to the console as an error, are faults."""
    page.goto(f"{address}/plain")
    page.evaluate("console.warn('a warning'); console.error('written'); setTimeout(() => { throw Error('thrown') }, 0)")
    page.wait_for_function("() => new Promise(done => setTimeout(() => done(true), 10))")
    assert ["written", "thrown"] == [fault.rpartition(" (")[0] for fault in complaints.faults()]
    complaints.expect("written|thrown")
    complaints.expect("missing")
    assert ["nothing on the console matches 'missing'"] == complaints.faults()
    complaints._expected.remove("missing")


def test_fresh_context(new_page: Callable[..., Page], address: str) -> None:
    """Pages share nothing: what one has stored, another does not find."""
    first, second = new_page(), new_page(viewport={"width": 320, "height": 640})
    for page in (first, second):
        page.goto(f"{address}/plain")
    first.evaluate("localStorage.setItem('mine', 'kept')")
    assert ["kept", None] == [page.evaluate("localStorage.getItem('mine')") for page in (first, second)]
    assert 320 == second.evaluate("innerWidth")


def test_no_loop_is_left(chromium: Chromium) -> None:
    """With the browser running, an event loop can be started in the thread that started the browser."""

    async def answer() -> int:
        return 42

    assert 42 == asyncio.run(answer())


def test_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a browser a test is skipped with a reason, and fails where everything has to be there."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(REQUIRE_ALL, raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs the program chromium"):
        Chromium()
    monkeypatch.setenv(REQUIRE_ALL, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{REQUIRE_ALL}=1 allows no such skip"):
        Chromium()
