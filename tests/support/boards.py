"""A board with records for a test, and an HTTP client that uses it like a browser."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from celery import Celery
from sqlalchemy import text

from celery_leases import LeasedTask
from celery_leases.ops.client import OperatorClient
from celery_leases.record import Ended, Failure, Record, State
from celery_leases.testing.contracts.calls import make_call
from celery_leases.testing.contracts.record_case import closed, won
from celery_leases.testing.waits import wait_until

TASK = "shop.order"
SECRET = "hunter2-hunter2"
NOT_YET = ("Reading", "Counting", "Examining", "Reading the run times", "Reading the broker")
PATIENCE = 60.0
ERROR = Failure("shop.Broken", f"<script>alert(1)</script> password={SECRET}", "error", "error")


class Shop:
    """A Celery app with one task, and records of that task."""

    def __init__(self, database_url: str, leases_url: str = "database") -> None:
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.update(leases_url=leases_url, leases_database_url=database_url)

        @self.app.task(
            base=LeasedTask, name=TASK, lease_key="order:{number}", time_limit=90, shared=False
        )
        def order(number: int) -> None:
            pass

        self.client = OperatorClient.from_app(self.app, eager=False)
        self.records = self.client._records

    def put(self, key: str, state: State = State.DONE, **more: Any) -> Record:
        """Create a record in this state. The lease of a running one lasts a day."""
        request = make_call(f"t:{TASK}|{key}", task=TASK, key=key, ttl=86_400.0)
        record = won(self.records, request, "database")
        if state is not State.RUNNING:
            ended = Ended.RETURNED if state is State.DONE else Ended.FAILED
            if state is not State.DONE:
                more = {"failure": ERROR, "reason": "error"} | more
            closed(self.records, record, state, ended=ended, retention=864_000.0, **more)
        return record

    def abandon(self, key: str) -> None:
        """Let the lease of a running key expire."""
        self.sql(
            f"UPDATE celery_leases_records SET lease_until = 1 WHERE stored_key = 't:{TASK}|{key}'"  # noqa: S608
        )

    def sql(self, statement: str) -> None:
        """Execute a statement that changes the tables."""
        with self.records.database.engine.begin() as connection:
            connection.execute(text(statement))

    def multiply(self, key: str, number: int) -> None:
        """Copy the record of *key* *number* times. The copies have the suffixes ``:1``, ``:2``
        …, and each started a second before the next one.
        """
        columns = self.records.tables.records.c.keys()
        changed = {
            "stored_key": "stored_key || ':' || n",
            "key": "\"key\" || ':' || n",
            **{
                name: f"{name} - CAST({number} - n AS BIGINT) * 1000000"
                for name in ("created_at", "started_at", "finished_at")
            },
        }
        values = ", ".join(changed.get(name, f'"{name}"') for name in columns)
        names = ", ".join(f'"{name}"' for name in columns)
        for first in range(1, number + 1, 100_000):  # a longer statement would time out
            last = min(number, first + 99_999)
            self.sql(
                f"INSERT INTO celery_leases_records ({names}) "  # noqa: S608
                f"WITH RECURSIVE numbers (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM numbers WHERE n < {last}) "
                f"SELECT {values} FROM celery_leases_records, numbers WHERE stored_key = 't:{TASK}|{key}'"
            )

    def state(self, key: str) -> str:
        """The state of a key."""
        return self.client.status(f"t:{TASK}|{key}").state

    def close(self) -> None:
        """Close the connections."""
        self.records.database.close()


class Visitor:
    """An HTTP client that reads pages and sends forms, as a browser does."""

    def __init__(self, board: Any, base_url: str = "http://board", under: str = "") -> None:
        from starlette.testclient import TestClient

        self.http = TestClient(board, base_url=base_url, raise_server_exceptions=False)
        self.origin, self.under = base_url, under

    def sees(self, path: str, status: int = 200) -> str:
        """The HTML of a page, once all its parts are loaded."""
        found: list[Any] = []

        def read() -> bool:
            found[:] = [self.http.get(self.under + path)]
            return not any(f"{word}…</p>" in found[0].text for word in NOT_YET)

        wait_until(read, PATIENCE, f"all of {path}")
        assert found[0].status_code == status, found[0].text
        return str(found[0].text)

    def sends(self, path: str, fields: Any, **headers: str) -> Any:
        """The response to a form with the CSRF token of a page."""
        page = self.sees("/groups")
        held = re.search(r'name="token" value="(\w+)"', page)
        pairs = [*(fields.items() if isinstance(fields, dict) else fields)]
        given = [("token", held[1])] if held else []
        return self.posts(path, [*given, *pairs], **headers)

    def posts(self, path: str, pairs: Any, **headers: str) -> Any:
        """The response to a form."""
        from urllib.parse import urlencode

        sent = {"Origin": self.origin, "Content-Type": "application/x-www-form-urlencoded"}
        return self.http.post(
            self.under + path,
            content=urlencode(pairs),
            headers=sent | headers,
            follow_redirects=True,
        )

    def confirms(self, path: str, fields: Any) -> tuple[list[tuple[str, str]], str]:
        """The hidden fields of the page that asks for confirmation, and its text."""
        page = self.sends(path, fields)
        assert page.status_code == 200, page.text
        return hidden(page.text), words(page.text)


def hidden(page: str) -> list[tuple[str, str]]:
    """The hidden fields of the form that asks for confirmation."""
    form = page.partition('class="confirm"')[2]
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form)
    return [(name, html.unescape(value)) for name, value in found if name != "token"]


def seen_in(page: str) -> dict[str, str]:
    """The values of the check boxes of a list, by key."""
    found = re.findall(r'name="seen" value="([^"]*)"', page)
    return {
        unquote(html.unescape(value)).partition("|")[2]: html.unescape(value) for value in found
    }


def words(page: str) -> str:
    """The visible text of a page."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def sqlite(where: Path) -> str:
    """The URL of an empty database."""
    return f"sqlite:///{where / 'records.db'}"
