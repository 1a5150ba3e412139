"""A real browser: the distribution's Chromium, headless, driven by Playwright, and what its console complains of."""

from __future__ import annotations

import contextvars
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.skips import missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright

#: How distributions call it.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: Seconds that a page has for what a test waits for. It takes milliseconds; this is for a busy machine.
PATIENCE = 10.0

#: Seconds that a browser has to start in.
START = 45.0

T = TypeVar("T")


def find_chromium() -> str:
    """Return the path of the distribution's Chromium, or skip the running test with a reason."""
    found = filter(None, map(shutil.which, PROGRAMS))
    return next(found, None) or missing("needs the program chromium (or google-chrome), which is not installed here")


class Complaints:
    """What pages have reported on their consoles as errors, uncaught exceptions and violations of their CSP among them.

    :ivar heard: each message, with an address where there is one.
    """

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._expected: list[str] = []

    def listen(self, context: BrowserContext) -> None:
        """Write down what each page of a context reports from now on. Chromium reports violations as errors."""
        context.on("console", self._hear)
        context.on("weberror", lambda thrown: self.heard.append(f"{thrown.error} (not caught)"))

    def _hear(self, said: ConsoleMessage) -> None:
        if said.type == "error":
            self.heard.append(f"{said.text} ({said.location['url'] or 'no address'})")

    def expect(self, pattern: str) -> None:
        """Let messages pass that a regular expression is found in. The test fails if there is none."""
        self._expected.append(pattern)

    def faults(self) -> list[str]:
        """The messages that nothing expects, and the patterns for which no message came."""
        surplus = [one for one in self.heard if not any(re.search(pattern, one) for pattern in self._expected)]
        unmet = [pattern for pattern in self._expected if not any(re.search(pattern, one) for one in self.heard)]
        return [*surplus, *(f"nothing on the console matches {pattern!r}" for pattern in unmet)]


class Chromium:
    """A browser process, from construction to :meth:`stop`.

    Playwright's synchronous interface keeps an event loop running in the thread that started it, and answers in that
    thread alone. It gets a thread of its own here, so that tests that start a loop themselves can run in the same
    process; whatever touches a page has to go through :meth:`run`.
    """

    def __init__(self) -> None:
        program = find_chromium()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="browser", initializer=self._enter)
        try:
            self._playwright, self._browser = self.run(lambda: _launch(program))
        except BaseException:
            self._thread.shutdown()
            raise

    def _enter(self) -> None:
        self._ident = threading.get_ident()

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in the browser's thread, with the caller's context variables, and return what it returns."""
        if threading.get_ident() == getattr(self, "_ident", None):
            return function()
        return self._thread.submit(contextvars.copy_context().run, function).result()

    def open(self, complaints: Complaints, **options: Any) -> Page:
        """A page with no cookies and an empty cache. Its context is the page's alone.

        :param complaints: hears of what the page reports.
        :param options: further ones of Playwright's ``new_context``: ``viewport``, ``has_touch`` …
        """

        def make() -> Page:
            context = self._browser.new_context(**options)
            context.set_default_timeout(PATIENCE * 1000)
            complaints.listen(context)
            return context.new_page()

        return self.run(make)

    def stop(self) -> None:
        """End the browser and its thread."""

        def end() -> None:
            self._browser.close()
            self._playwright.stop()

        self.run(end)
        self._thread.shutdown()


def _launch(program: str) -> tuple[Playwright, Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE * 1000)
    playwright = sync_playwright().start()
    # Chromium refuses to run as root with its sandbox. A container's /dev/shm may be too small for it.
    options = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.getuid() == 0 else [])]
    try:
        return playwright, playwright.chromium.launch(executable_path=program, args=options, timeout=START * 1000)
    except BaseException:
        playwright.stop()
        raise
