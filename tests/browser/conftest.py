"""Fixtures for tests in a real browser.

A test that takes a page runs in the browser's own thread, so that it uses a page as if there were no thread. A
fixture of yours that touches a page has to do so through ``chromium.run``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask
from werkzeug.serving import BaseWSGIServer, make_server

from tests.support.browser import Chromium, Complaints

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with a page in the browser's thread, and fail it for what its pages complain of."""
    values: dict[str, Any] = pyfuncitem.funcargs
    if "opened" not in values:
        return None
    browser, complaints, pages = (values[name] for name in ("chromium", "complaints", "opened"))
    arguments = {name: values[name] for name in pyfuncitem._fixtureinfo.argnames}
    browser.run(lambda: pyfuncitem.obj(**arguments))
    browser.run(lambda: settle(pages))
    faults = complaints.faults()
    if faults:
        pytest.fail("the browser's console:\n" + "\n".join(faults), pytrace=False)
    return True


def settle(pages: list[Page]) -> None:
    """Wait until all that the pages have reported so far has arrived here."""
    for page in pages:
        if not page.is_closed():
            page.evaluate("0")


def close(pages: list[Page]) -> None:
    """Close pages with their contexts."""
    for page in pages:
        page.context.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """The browser, one for each worker of the test run, started by the first test that wants it."""
    browser = Chromium()
    yield browser
    browser.stop()


@pytest.fixture
def complaints() -> Complaints:
    """What the test's pages report as errors. It fails the test, but for what :meth:`Complaints.expect` lets pass."""
    return Complaints()


@pytest.fixture
def opened(chromium: Chromium) -> Iterator[list[Page]]:
    """The pages that the test has opened; all of them are closed at its end."""
    pages: list[Page] = []
    yield pages
    chromium.run(lambda: close(pages))


@pytest.fixture
def new_page(chromium: Chromium, complaints: Complaints, opened: list[Page]) -> Callable[..., Page]:
    """A function that opens a page in a fresh context, with the options of :meth:`Chromium.open`."""

    def open_page(**options: Any) -> Page:
        opened.append(chromium.open(complaints, **options))
        return opened[-1]

    return open_page


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    """A page in a fresh context."""
    return new_page()


@pytest.fixture
def picture() -> Callable[[Page, str], None]:
    """A function that takes a picture of a whole page for the docs; in `make pictures` alone, since keys are random."""

    def take(page: Page, name: str) -> None:
        if folder := os.environ.get("IDEMPOTENCY_TESTS_PICTURES"):
            page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    return take


@pytest.fixture
def serve() -> Iterator[Callable[[Flask], str]]:
    """A function that serves an app by threads of this process and returns its address, without a slash at the end."""
    servers: list[tuple[BaseWSGIServer, threading.Thread]] = []

    def start(app: Flask) -> str:
        server = make_server("127.0.0.1", 0, app, threaded=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()
