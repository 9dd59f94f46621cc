"""A headless Chromium, controlled through ChromeDriver, which ends with the test.

The programs are in Debian's packages ``chromium`` and ``chromium-driver``, and selenium controls
them. Nothing is downloaded by a test. ``.ci/run`` installs the packages; if it cannot, it sets
``LEASES_NO_BROWSER``, and the tests are skipped in CI too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from celery_leases.testing.waits import wait_until
from tests.support.process import GuardedProcess

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds to wait for a page. A busy machine may need many."""
TRIES = 3
"""How often ChromeDriver is started if the port that it has chosen is in use."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root cannot use the sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",  # it is small in containers
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--lang=en-US",
)


class Browser:
    """A Chromium with one window. ``driver`` is the driver of selenium."""

    def __init__(self, home: Path, chromium: str, chromedriver: str) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={home / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._process, port = _started(home, chromedriver)
        try:
            self.driver: Any = webdriver.Remote(f"http://127.0.0.1:{port}", options=options)
        except BaseException:
            self._process.end()
            raise
        self.driver.set_page_load_timeout(PATIENCE)

    def close(self) -> None:
        """End the browser with all its processes."""
        self._process.end()

    def open(self, url: str) -> None:
        """Load a page. For basic authentication write ``http://user:password@host/``."""
        self.driver.get(url)

    def find(self, css: str) -> Any:
        """The first visible element for a selector; waits for it."""

        def shown() -> Any:
            return next((one for one in self.all(css) if one.is_displayed()), None)

        return self.until(shown, f"an element {css!r}")

    def all(self, css: str) -> list[Any]:
        """The elements for a selector that exist now."""
        return list(self.driver.find_elements("css selector", css))

    def click(self, css: str) -> None:
        """Click on the first visible element for a selector; waits for it."""
        self.find(css).click()

    def write(self, css: str, text: str) -> None:
        """Replace the text of a field."""
        field = self.find(css)
        field.clear()
        field.send_keys(text)

    def text(self) -> str:
        """The visible text of the page."""
        return str(
            self.driver.execute_script("return document.body ? document.body.innerText : ''")
        )

    def reads(self, words: str) -> None:
        """Wait until the page contains *words*. Raises AssertionError with the text of the page."""
        try:
            self.until(lambda: words in self.text(), repr(words))
        except TimeoutError as error:
            raise AssertionError(
                f"{error}; the page at {self.driver.current_url}:\n{self.text()}"
            ) from None

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Wait until *condition* is true, and return its value. An error of the driver counts as
        false, because a new page may have replaced an element.
        """
        from selenium.common.exceptions import WebDriverException

        found: list[T] = []

        def is_true() -> bool:
            try:
                value = condition()
            except WebDriverException:
                return False
            found[:] = [value]
            return bool(value)

        wait_until(is_true, PATIENCE, what)
        return found[0]

    def problems(self) -> list[str]:
        """The messages of the console since the last call: errors of scripts, refused styles,
        missing files.
        """
        entries = self.driver.execute("getLog", {"type": "browser"})["value"]
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path, width: int = 1100, height: int = 700) -> None:
        """Write a PNG of a window of this size."""
        self.driver.set_window_size(width, height)
        path.write_bytes(self.driver.get_screenshot_as_png())


def _started(home: Path, chromedriver: str) -> tuple[GuardedProcess, str]:
    """A ChromeDriver, and its port.

    It takes a free port of IPv6, and ends if the same port of IPv4 is in use.
    """
    for remaining in reversed(range(TRIES)):
        home.mkdir(exist_ok=True)
        process = GuardedProcess(
            [chromedriver, "--port=0"], log=home / "chromedriver.log", homes=[home]
        )
        try:
            started = process.wait_for_log(r"started successfully on port (\d+)", PATIENCE)
        except BaseException as error:
            process.end()
            if not remaining or "Address already in use" not in str(error):
                raise
        else:
            return process, str(started[1])
    raise AssertionError("not reached")


def missing_browser(what: str) -> None:
    """Skip the test. In CI fail it, unless ``.ci/run`` could not install a browser."""
    in_ci = os.environ.get("CI", "").lower() in {"1", "true"}
    if in_ci and not os.environ.get("LEASES_NO_BROWSER"):
        pytest.fail(f"missing browser: {what} (a skip on a laptop)", pytrace=False)
    pytest.skip(f"missing browser: {what}")


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A :class:`Browser` for one test."""
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        missing_browser("install Debian's chromium and chromium-driver")
    pytest.importorskip("selenium", reason="selenium is in the dependency group test")
    assert chromium is not None
    assert chromedriver is not None
    home = Path(tempfile.mkdtemp(prefix="leases-browser-"))
    started = Browser(home, chromium, chromedriver)
    yield started
    started.close()
    shutil.rmtree(home, ignore_errors=True)
