"""``make play`` in a real Chromium: with real workers, and with a server that has no events.

``LEASES_PICTURES=docs/pictures`` takes the screenshot of docs/tutorial/play.md again.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.browser import Browser
from tests.support.process import GuardedProcess

ROOT = Path(__file__).parents[2]
PHONE = 400


class Page:
    """The page as its reader sees it."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    def text(self, css: str) -> str:
        """The texts of the elements for a selector."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join(' ')"
        )
        return str(self.browser.driver.execute_script(script, css)).strip()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait, and leave the processor to what is awaited."""
        return self.browser.until(lambda: condition() or time.sleep(0.25), what)

    def shows(self, css: str, words: str) -> None:
        """Wait until an element has the words."""
        self.until(lambda: words in self.text(css), f"{words!r} in {css}")

    def says(self, number: int, words: str) -> None:
        """Wait until the leased side of a document has the words."""
        self.shows(f'[data-document="{number}"] .leases', words)

    def press(self, number: int, kind: str) -> None:
        """Press a button of a document."""
        self.browser.click(f'[data-document="{number}"] button.{kind}')

    def submit(self) -> int:
        number = len(self.browser.all("#list > li")) + 1
        self.browser.click("#submit")
        self.shows(f'[data-document="{number}"]', f"Document {number}")
        return number

    def trouble(self, kind: str) -> None:
        """Choose the provider's trouble, and wait until the provider has it."""
        self.browser.click(f'input[name="trouble"][value="{kind}"]')
        asked = "return fetch('state').then(answer => answer.json())"
        self.until(
            lambda: self.browser.driver.execute_script(asked)["provider"]["trouble"] == kind,
            f"the trouble {kind!r}",
        )


@pytest.fixture
def play(tmp_path: Path) -> Iterator[GuardedProcess]:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "example_project.play", "--port", "0"]
    process = GuardedProcess(command, log=tmp_path / "play.log", cwd=ROOT, env=env)
    yield process
    process.end()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_page_keeps_promises(play: GuardedProcess, browser: Browser, tmp_path: Path) -> None:
    """At the end the connection is lost, and the page shows that."""
    page = opened(play, browser)
    pays_once(page)
    counts_down_and_drains(page, Path(os.environ.get("LEASES_PICTURES", tmp_path)))
    is_taken_over(page)
    is_decided_by_a_person(page)
    can_be_read_by_all(browser)
    assert_ends(page, play, tmp_path)


@pytest.mark.timeout(300)
def test_a_double_click_pays_once(play: GuardedProcess, browser: Browser, tmp_path: Path) -> None:
    page = opened(play, browser)
    pays_once(page)
    assert_ends(page, play, tmp_path)


def opened(play: GuardedProcess, browser: Browser) -> Page:
    """The page, once both workers run."""
    browser.open(play.wait_for_log(r"Open (http://\S+)", 60)[1])
    browser.driver.set_window_size(1100, 800)
    page = Page(browser)
    page.shows("#connection", "Live")
    for worker in ("worker-a", "worker-b"):
        page.shows("#workers", f"{worker} is running")
    return page


def assert_ends(page: Page, play: GuardedProcess, tmp_path: Path) -> None:
    """Nothing was refused or raised on the page, and Ctrl-C leaves nothing behind."""
    assert page.browser.problems() == []
    play.send(signal.SIGINT)
    assert play.wait(60) == 0, play.logs()
    assert "nothing is left behind" in play.logs()
    assert list((tmp_path / "temporary").iterdir()) == []
    page.shows("#connection", "Connection lost")


def pays_once(page: Page) -> None:
    """For every button."""
    from selenium.webdriver.common.action_chains import ActionChains

    number = page.submit()
    again = page.browser.find(f'[data-document="{number}"] button.again')
    ActionChains(page.browser.driver).double_click(again).perform()
    page.shows(f'[data-document="{number}"]', "pressed 3 times")
    page.says(number, "Done")
    page.shows("#leases-paid", "1")
    page.shows("#plain-paid", "3")
    assert page.browser.find("#leases-paid").text == "1"


def counts_down_and_drains(page: Page, pictures: Path) -> None:
    """From the server's number; and open the group, and all documents run."""
    browser = page.browser
    browser.find("#limit").send_keys("\ue010")  # the key End: 300 s
    page.shows("#limit-shown", "300 s")
    page.trouble("limited")
    waiting = [page.submit(), page.submit()]
    for number in waiting:
        page.says(number, "Retry available in 5 minutes")
    page.shows("#group", "The group is closed (rate limited)")

    def left() -> int:
        minutes, seconds = page.text(f'[data-document="{waiting[0]}"] [role=timer]').split(":")
        return 60 * int(minutes) + int(seconds)

    first = left()
    assert 240 < first <= 305
    page.until(lambda: left() < first - 1, "a countdown")
    browser.driver.execute_script("window.scrollTo(0, 0)")
    browser.picture(pictures / "play.png", 1100, 800)
    calls = browser.find("#leases-calls").text
    page.press(waiting[0], "often")
    page.shows(f'[data-document="{waiting[0]}"]', "pressed 11 times")
    assert browser.find("#leases-calls").text == calls
    page.trouble("none")
    browser.click("#open-group")
    for number in waiting:
        page.says(number, "Done")
        page.says(number, "paid once")


def is_taken_over(page: Page) -> None:
    """A body that ends before its worker is killed proves nothing: then another document."""
    browser = page.browser
    for _ in range(5):
        number = page.submit()
        page.says(number, "Running")
        for kill in browser.all("#workers button"):
            kill.click()
        page.says(number, "Done")
        page.says(number, "paid once")
        if f"Document {number}: taken over after a crash" in browser.find("#log").text:
            break
    else:
        pytest.fail(f"no document was taken over:\n{browser.find('#log').text}")
    for worker in ("worker-a", "worker-b"):
        page.shows("#workers", f"{worker} is running")


def is_decided_by_a_person(page: Page) -> None:
    """The person sees what the provider has charged."""
    page.browser.click("#tells")
    page.trouble("timeout")
    number = page.submit()
    page.says(number, "It may have been executed; a person must check")
    assert "has charge sum_" in page.text(f'[data-document="{number}"] .decide')
    page.press(number, "charged")
    page.says(number, "Done")
    page.says(number, "paid once")
    page.shows("#log", f"Document {number}: a person decided that it was charged")


def can_be_read_by_all(browser: Browser) -> None:
    """Every control has a name; a phone shows all without scrolling sideways."""
    controls = [one for one in browser.all("button, input") if one.is_displayed()]
    assert len(controls) > 20
    assert [one.get_attribute("outerHTML") for one in controls if not one.accessible_name] == []
    names = [one.accessible_name for one in controls if one.tag_name == "button"]
    assert len(names) == len(set(names))
    assert browser.find("#log").aria_role == "log"
    browser.driver.set_window_size(PHONE, 800)
    width = "return document.documentElement.scrollWidth - window.innerWidth"
    assert browser.driver.execute_script(width) <= 0


STATE: dict[str, Any] = {
    "documents": [],
    "totals": {
        side: {"paid": 0, "cents": 0, "calls": 0, "refused": 0} for side in ("leases", "plain")
    },
    "group": {"name": "provider", "state": "open", "retry_after": None, "reason": None},
    "workers": [],
    "provider": {
        "latency": 1.0,
        "error_rate": 0.0,
        "trouble": "none",
        "limit": 20.0,
        "tells": True,
        "limited_for": 0.0,
    },
    "log": [],
}


def test_a_page_without_events_asks_again_and_again(browser: Browser) -> None:
    from werkzeug.serving import make_server

    from example_project.play import web
    from example_project.play.desk import Desk, NotPossible

    class Refusing:
        def submit(self) -> int:
            raise NotPossible("there are enough documents")

    shown = STATE | {"workers": [{"name": "a@x", "short": "worker-a", "up": True}]}
    news = web.PageState(lambda: shown)
    news.refresh()
    page = web.make_page(cast(Desk, Refusing()), news, events=False)
    server = make_server("127.0.0.1", 0, page, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.reads("No live connection: polls every 2 seconds")
        browser.reads("worker-a is running")
        shown["workers"][0]["up"] = False
        news.refresh()
        browser.reads("worker-a was killed, and starts again")
        news._run = "another"
        shown["workers"] = []
        news.refresh()
        browser.until(lambda: "worker-a" not in browser.text(), "the page of another run")
        browser.click("#submit")
        browser.reads("Not possible: there are enough documents")
        assert not any(
            re.search("Content Security Policy|Uncaught", line) for line in browser.problems()
        )
    finally:
        server.shutdown()
