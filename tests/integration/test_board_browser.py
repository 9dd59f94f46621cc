"""The board as an operator has it: the command serves it, a real Chromium shows it.

With LEASES_PICTURES, a directory, the pictures of docs/how-to/board.md are written into it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_leases.record import Failure, State
from tests.support.boards import SECRET, TASK, Shop, sqlite
from tests.support.browser import Browser
from tests.support.process import GuardedProcess

PATIENCE = 60.0
PASSWORD = "correct-horse-battery"
LIMIT = Failure(
    "openai.RateLimitError",
    "Error code: 429 - Rate limit reached for gpt-5 on requests per min (RPM): Limit 3, Used 3.",
    "rate-limited",
    "rate_limited",
    "openai:gpt-5",
)
DECLINED = Failure("shop.CardDeclined", f"insufficient_funds, token={SECRET}", "refused", "refused")
MINUTE = 60_000_000


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(sqlite(tmp_path))
    for number in range(1840, 1870):
        made.put(f"order:{number}")
    for number in range(1900, 1905):
        made.put(f"order:{number}", State.FAILED, failure=DECLINED, reason="refused")
    for number in range(3):
        wait = {"failure": LIMIT, "reason": "rate_limited", "retry_after": 240.0 + number}
        made.put(f"summary:{number}", State.COOLING, **wait, resumes=True)
    made.put("payout:31", State.UNCERTAIN)
    made.put("report:north", State.RUNNING)
    made.put("report:south", State.RUNNING)
    made.abandon("report:south")
    for number in range(1840, 1870):
        took = f"finished_at = started_at + {(number * number * 31337) % 9_000_000 + 400_000}"
        made.sql(f"UPDATE celery_leases_records SET {took} WHERE \"key\" = 'order:{number}'")  # noqa: S608
    grow_old(made, "order:1903")
    made.client.close_group("openai:gpt-5", "4m", "the provider says so")
    yield made
    made.close()


def grow_old(shop: Shop, key: str) -> None:
    """Give a key a history of three attempts within half an hour."""
    record = shop.records.read(f"t:{TASK}|{key}")
    assert record is not None
    first = record.started_at - 30 * MINUTE
    past: list[list[Any]] = [
        [first, 4 * MINUTE, "failed", "web1/410", "ConnectionError: reset", "refused-connection"],
        [first + 9 * MINUTE, None, "crashed", "web1/417"],
    ]
    details = json.dumps(
        {"failures": 2, "past": past, "trace": "  shop.py:41 in order\n    charge(card)"}
    )
    shop.sql(
        f"UPDATE celery_leases_records SET details = '{details}', attempt = 3, "  # noqa: S608
        f"created_at = {first}, started_at = {first + 20 * MINUTE}, "
        f"finished_at = {first + 27 * MINUTE} WHERE \"key\" = '{key}'"
    )


@pytest.fixture
def board(shop: Shop, tmp_path: Path) -> Iterator[str]:
    """The address of a board that asks for a password, without its scheme."""
    passwords = tmp_path / "passwords"
    passwords.write_text(f"ann:{PASSWORD}\n")
    passwords.chmod(0o600)
    command = ["-m", "celery", "-A", "tests.apps.board_app", "leases", "web", "--port", "0"]
    env = os.environ | {
        "LEASES_URL": "database",
        "LEASES_DATABASE_URL": sqlite(tmp_path),
        "PYTHONUNBUFFERED": "1",
    }
    served = GuardedProcess(
        [sys.executable, *command, "--password-file", str(passwords)],
        log=tmp_path / "board.log",
        env=env,
    )
    yield served.wait_for_log(r"running on http://(127\.0\.0\.1:\d+)", PATIENCE)[1]
    served.end()


@pytest.fixture
def pictures() -> Path | None:
    wanted = os.environ.get("LEASES_PICTURES")
    return Path(wanted) if wanted else None


@pytest.mark.timeout(400)  # many pages, each of which a busy machine may take long to show
def test_an_operator_filters_selects_confirms_and_sees_the_result(
    shop: Shop, board: str, browser: Browser, pictures: Path | None, tmp_path: Path
) -> None:
    where = pictures or tmp_path
    browser.open(f"http://{board}/")
    assert "Overview" not in browser.text(), "without a password"
    browser.problems()  # the console says that it was refused
    browser.open(f"http://ann:{PASSWORD}@{board}/")
    browser.open(f"http://{board}/")
    browser.reads("report:south")
    browser.until(lambda: "Counting" not in browser.text(), "the counts")
    text = browser.text()
    assert text.index("report:south") < text.index("payout:31") < text.index("openai:gpt-5")
    browser.picture(where / "board-overview.png", 1000, 900)

    # The page lives: what changes is seen without a click.
    shop.client.resolve(f"t:{TASK}|payout:31", "done")
    browser.reads("No key is uncertain.")

    browser.open(f"http://{board}/key?stored=t:{TASK}|order:1903")
    browser.reads("Attempts")
    assert len(browser.all("svg.timeline rect")) == 3
    assert SECRET not in browser.text()
    browser.picture(where / "board-key.png", 1000, 900)

    browser.click("a[href='/keys']")
    browser.click("input[value=failed]")
    browser.write("input[name=prefix]", "order:19")
    browser.click(".filter button")
    browser.until(lambda: len(browser.all("input[name=seen]")) == 5, "the keys that failed")
    browser.picture(where / "board-keys.png", 1000, 660)
    browser.click("#all")
    shop.client.forget(f"t:{TASK}|order:1900")
    browser.click("button[value=retry]:not([id])")
    browser.reads("Retry: 4 keys?")
    browser.reads("These have changed since the page was shown")
    browser.picture(where / "board-confirm.png", 1000, 680)
    shop.client.forget(f"t:{TASK}|order:1901")
    browser.click("button.main")
    browser.reads("3 changed, 1 unchanged")
    assert [shop.state(f"order:{number}") for number in range(1900, 1905)] == [
        *("absent", "absent"),
        *["pending"] * 3,
    ]

    browser.open(f"http://{board}/runtimes")
    browser.reads("31 runs")
    browser.picture(where / "board-runtimes.png", 1000, 720)

    browser.open(f"http://{board}/groups")
    browser.click("input[name=group]")
    browser.click("button[value=open]")
    browser.click("button.main")
    browser.reads("1 changed")
    assert shop.client.groups() == []
    assert browser.problems() == []
