"""A million records: a scrape of the exporter, the board in a real Chromium, and Django's admin."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from celery_leases.record import Failure, State
from tests.integration.test_django_project import manage_with
from tests.support.boards import TASK, Shop, sqlite
from tests.support.browser import Browser
from tests.support.process import GuardedProcess

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
PATIENCE = 120.0
SCRAPE_TIMEOUT = 10.0
"""Seconds: the default of Prometheus."""
PAGE_BOUND = 10.0
"""Seconds within which each page must be shown."""
LIMIT = Failure("openai.RateLimitError", "Too many.", "rate-limited", "rate_limited", "openai:x")
COPIES = {
    "order:done": 979_000,
    "order:failed": 10_000,
    "order:cooling": 10_000,
    "order:running": 900,
    "order:uncertain": 90,
    "order:abandoned": 10,
}


@pytest.fixture(scope="module", params=["postgresql", "sqlite"])
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """A million records, most of them done; its database is of the test's own."""
    if request.param == "sqlite":
        url = sqlite(tmp_path_factory.mktemp("million"))
    else:
        url = request.getfixturevalue("leases_postgres").new_database()
    made = Shop(url)
    made.records.migrate()
    made.put("order:done")
    made.put("order:failed", State.FAILED)
    wait = {"failure": LIMIT, "reason": "rate_limited", "retry_after": 3600.0}
    made.put("order:cooling", State.COOLING, **wait, resumes=True)
    made.put("order:running", State.RUNNING)
    made.put("order:abandoned", State.RUNNING)
    made.put("order:uncertain", State.UNCERTAIN)
    made.abandon("order:abandoned")
    for key, number in COPIES.items():
        made.multiply(key, number)
    made.client.close_group("openai:x", "1h")
    if request.param == "postgresql":
        with made.records.database.engine.connect() as connection:
            connection.execute(text("VACUUM ANALYZE celery_leases_records"))
    yield made
    made.close()
    if request.param == "sqlite":
        for part in Path(url.removeprefix("sqlite:///")).parent.iterdir():
            part.unlink()


@contextmanager
def serving(shop: Shop, tmp_path: Path, said: str, *command: str) -> Iterator[str]:
    """A command of celery_leases that listens; its address, without the scheme."""
    url = shop.records.database.engine.url.render_as_string(hide_password=False)
    env = os.environ | {
        "LEASES_URL": "database",
        "LEASES_DATABASE_URL": url,
        "PYTHONUNBUFFERED": "1",
    }
    served = GuardedProcess(
        [sys.executable, "-m", "celery", "-A", "tests.apps.board_app", "leases", *command],
        log=tmp_path / "served.log",
        env=env,
    )
    try:
        yield served.wait_for_log(said, PATIENCE)[1]
    finally:
        served.end()


def timed(what: str, step: Callable[[], Any], bound: float) -> None:
    """Take a step, which must end in time."""
    began = time.perf_counter()
    step()
    took = time.perf_counter() - began
    print(f"{what}: {took:.2f} s")
    assert took < bound, f"{what} took {took:.1f} s"


def test_a_scrape_ends_within_the_timeout_of_prometheus(shop: Shop, tmp_path: Path) -> None:
    with serving(
        shop, tmp_path, r"http://(127\.0\.0\.1:\d+)/metrics", "exporter", "--port", "0"
    ) as address:
        found: list[str] = []

        def scrape() -> None:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
                found[:] = [answer.read().decode()]

        timed("the first scrape", scrape, SCRAPE_TIMEOUT)
        timed("the next scrape", scrape, SCRAPE_TIMEOUT)
    assert f'celery_leases_records{{state="done",task="{TASK}"}} 979001.0' in found[0]
    assert f'celery_leases_records{{state="abandoned",task="{TASK}"}} 11.0' in found[0]


def test_the_board_shows_each_page_in_time(shop: Shop, browser: Browser, tmp_path: Path) -> None:
    with serving(
        shop, tmp_path, r"running on http://(127\.0\.0\.1:\d+)", "web", "--port", "0"
    ) as address:
        board = f"http://{address}"
        timed("the overview", lambda: browser.open(f"{board}/"), PAGE_BOUND)
        timed("its urgent keys", lambda: browser.reads("order:abandoned"), PAGE_BOUND)
        timed("its counts", lambda: browser.reads("979,001"), PAGE_BOUND)

        def rows(number: int) -> None:
            browser.until(lambda: len(browser.all("input[name=seen]")) == number, f"{number} keys")

        def listed() -> None:
            browser.open(f"{board}/keys")
            rows(50)

        def filtered() -> None:
            browser.click("input[value=failed]")
            browser.write("input[name=prefix]", "order:failed:")
            browser.click(".filter button")
            browser.until(lambda: "order:failed:10000" in browser.text(), "the latest that failed")

        def next_page() -> None:
            browser.click("a[rel=next]")
            browser.until(lambda: "order:failed:9950" in browser.text(), "the next page")

        timed("the keys", listed, PAGE_BOUND)
        timed("a filter", filtered, PAGE_BOUND)
        timed("its next page", next_page, PAGE_BOUND)

        def one_key() -> None:
            browser.open(f"{board}/key?stored=t:{TASK}|order:failed:5000")
            browser.reads("Attempts")

        def groups() -> None:
            browser.open(f"{board}/groups")
            browser.reads("openai:x")

        timed("one key", one_key, PAGE_BOUND)
        timed("the groups", groups, PAGE_BOUND)
    assert browser.problems() == []


VISIT = """
import json, time
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, reset_queries
from django.test import Client

settings.DEBUG = True
client, shown = Client(), {}
client.force_login(User.objects.create_superuser("ann"))
for query in (
    *("", "?p=2", "?p=200", "?state=failed", "?state=uncertain", "?task=shop.order"),
    *("?started=week", "?crashed=yes", "?q=order:failed:5000", "?q=nobody"),
):
    reset_queries()
    began = time.perf_counter()
    answer = client.get(f"/admin/celery_leases/leaserecord/{query}")
    took = time.perf_counter() - began
    counts = [one["sql"] for one in connection.queries if "COUNT(" in one["sql"].upper()]
    rows = answer.content.count(b'name="seen"')
    shown[query] = {"code": answer.status_code, "took": took, "counts": counts, "rows": rows}
print("shown", json.dumps(shown))
"""


def test_djangos_admin_shows_each_page_in_time(shop: Shop) -> None:
    url = shop.records.database.engine.url.render_as_string(hide_password=False)
    manage = manage_with(url)
    manage("migrate", "--verbosity", "0")
    shown = json.loads(manage("shell", "-c", VISIT).rpartition("shown ")[2])
    print({query: round(page["took"], 2) for query, page in shown.items()})
    for query, page in shown.items():
        assert (page["code"], page["counts"]) == (200, []), query
        assert page["took"] < PAGE_BOUND, query
    rows = {query: page["rows"] for query, page in shown.items()}
    assert rows == dict.fromkeys(shown, 50) | {
        "?crashed=yes": 0,
        "?q=nobody": 0,
        "?q=order:failed:5000": 1,
    }
