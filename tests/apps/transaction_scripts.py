"""A task that runs scripts of steps in a transaction of its own.

Run number n of a name plays script n; later runs play the last one.

A script is a list of steps. A step is a list: a name from :data:`STEPS` and its arguments. *way* is
the kind of transaction: ``session``, ``scoped``, ``connection``, ``driver`` or ``django``, and
words that modify it, see :class:`BodyTransaction`.
"""

import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import psycopg
import pymysql
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from celery_leases import Failures, LeasedTask, Snooze, current_lease, signals
from celery_leases.attempt import run
from celery_leases.rules import CooldownPolicy
from tests.apps.leased import app, note, plain, wait_for

__all__ = ["app", "plain"]

URL = make_url(
    os.environ["BOOKS_URL"] if "BOOKS_URL" in os.environ else os.environ["LEASES_DATABASE_URL"]
)
LITE = URL.get_backend_name() == "sqlite"
MARIA = URL.get_backend_name() == "mysql"
INVOICE = "INSERT INTO invoices (name, fence) VALUES ({0}name{1}, {0}fence{1})"
WHOLE = INVOICE.format(":", "")
BY_DRIVER = WHOLE if LITE else INVOICE.format("%(", ")s")


PG_END = ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s)")


def connected(url, *, autocommit=False):
    """A connection of the database driver, without SQLAlchemy."""
    if MARIA:
        return pymysql.connect(
            host=url.host,
            port=url.port,
            user=url.username,
            database=url.database,
            autocommit=autocommit,
        )
    return psycopg.connect(
        url.set(drivername="postgresql").render_as_string(hide_password=False),
        autocommit=autocommit,
    )


class Wrapper:
    """Behaves like Django's ``connections["default"]``, as far as the product uses that."""

    def __init__(self, connection):
        self.connection = connection

    def cursor(self):
        return self.connection.cursor()

    def rollback(self):
        self.connection.rollback()


class BodyTransaction:
    """The transaction of a run; *way* may say autocommit, repeatable, plain or elsewhere."""

    def __init__(self, way):
        self.kind, *words = way.split()
        self.words = set(words)
        self.url = URL
        if "elsewhere" in words:
            self.url = URL.set(
                database=f"{URL.database}.other" if LITE else "mysql" if MARIA else "postgres"
            )
        self.given = getattr(self, f"_{self.kind}")()

    def _engine(self):
        levels = {"autocommit": "AUTOCOMMIT", "repeatable": "REPEATABLE READ"}
        level = next((levels[word] for word in levels if word in self.words), None)
        engine = create_engine(
            self.url, poolclass=NullPool, **({"isolation_level": level} if level else {})
        )
        if LITE and level is None:
            event.listen(
                engine,
                "connect",
                lambda connection, _: setattr(connection, "isolation_level", None),
            )
            event.listen(
                engine, "begin", lambda connection: connection.exec_driver_sql(self._begin())
            )
        return engine

    def _begin(self):
        return "BEGIN" if "plain" in self.words else "BEGIN IMMEDIATE"

    def _session(self):
        return Session(self._engine())

    def _scoped(self):
        return scoped_session(sessionmaker(self._engine()))

    def _connection(self):
        return self._engine().connect()

    def _driver(self):
        if LITE:
            return sqlite3.connect(str(self.url.database), isolation_level=None)
        return connected(self.url, autocommit="autocommit" in self.words)

    def _raw(self):
        return self._engine().raw_connection()

    def _django(self):
        return Wrapper(self._driver())

    @property
    def by_driver(self):
        """Whether statements are executed without SQLAlchemy."""
        return self.kind in {"driver", "django", "raw"}

    def begin(self):
        if LITE and self.by_driver and "autocommit" not in self.words:
            self.given.cursor().execute(self._begin())
        elif self.kind == "connection" and "autocommit" not in self.words:
            self.given.begin()

    def execute(self, statement, values=None):
        """Execute one statement in the transaction."""
        if self.by_driver:
            cursor = self.given.cursor()
            cursor.execute(statement, values or ())
            return cursor
        return self.given.execute(text(statement), values or {})

    def write(self, name):
        values = {"name": name, "fence": current_lease.fence}
        self.execute(BY_DRIVER if self.by_driver else WHOLE, values)

    def end(self, how):
        """``commit`` or ``rollback``."""
        if self.kind == "django":
            getattr(self.given.connection, how)()
        else:
            getattr(self.given, how)()


class Play:
    """One run: its transactions, and what its steps returned so far."""

    def __init__(self, task, name, way):
        self.task, self.name, self.way = task, name, way
        self.lease = task.lease
        self.books: Any = None
        self.answer: Any = None

    def run(self, script):
        for step in script:
            self.play(step)
        return self.answer

    def play(self, step):
        word, *arguments = step
        do: Any = STEPS[word]
        return do(self, *arguments)

    def open(self, way=None):
        self.books = BodyTransaction(way or self.way)
        self.books.begin()

    def complete(self, result):
        self.answer = self.lease.complete(result, self.books.given)
        return self.answer

    def says(self, value):
        """Set the value that the body returns."""
        self.answer = value

    def tries(self, *step):
        """Play a step that may raise, and write its outcome to the journal."""
        began = time.monotonic()
        try:
            value = self.play(step)
        except Exception as error:  # noqa: BLE001 - it is told below
            self._told(step, began, error)
        except BaseException as error:  # noqa: BLE001 - LeaseLost is none of the above
            self._told(step, began, error)
        else:
            note("passed", name=self.name, step=step, value=value, took=time.monotonic() - began)

    def _told(self, step, began, error):
        took = time.monotonic() - began
        state = getattr(getattr(error, "orig", error), "sqlstate", None)
        note(
            "raised",
            name=self.name,
            step=step,
            error=type(error).__name__,
            text=str(error),
            took=took,
            state=state,
        )

    def each(self):
        """A loop that saves each item."""
        for _ in self.lease.each([1, 2], every=1):
            pass

    def keeps(self):
        """Leave the connection open after the body has ended, as a pool does."""
        _KEPT.append((self.name, self.books))

    def dies(self):
        mark = Path(f"{os.environ['JOURNAL']}.{self.name}.died")
        if not mark.exists():
            mark.touch()
            note("died", name=self.name)
            os.kill(os.getpid(), signal.SIGKILL)

    def ends_backend(self):
        """Make the server end the connection of the transaction."""
        asked, ended = ("SELECT connection_id()", "KILL %s") if MARIA else PG_END
        pid = self.books.execute(asked).fetchone()[0]
        with connected(URL) as other:
            other.cursor().execute(ended, (pid,))

    def enqueues(self, task, *arguments):
        """Enqueue a call of another task in the transaction."""
        return app.tasks[f"{__name__}.{task}"].delay_in(self.books.given, *arguments).id


def _raise(play, kind):
    if kind == "retry":
        raise play.task.retry(countdown=0.2, max_retries=3)
    kinds = {
        "value": ValueError(f"no luck with {play.name}"),
        "snooze": Snooze(0.2),
        "ignore": Ignore(),
        "reject": Reject("no", requeue=False),
    }
    raise kinds[kind]


_DYING: list[Play] = []
_KEPT: list[tuple[str, BodyTransaction]] = []
STEPS = {
    "open": Play.open,
    "write": lambda play: play.books.write(play.name),
    "read": lambda play: play.books.execute("SELECT count(*) FROM invoices").fetchone()[0],
    "sql": lambda play, statement: play.books.execute(statement) and None,
    "complete": Play.complete,
    "complete with": lambda play, way: play.lease.complete("another", BodyTransaction(way).given),
    "complete badly": lambda play: play.complete(object()),
    "guard": lambda play: play.lease.guard(play.books.given),
    "commit": lambda play: play.books.end("commit"),
    "rollback": lambda play: play.books.end("rollback"),
    "close": lambda play: play.books.given.close(),
    "keep": Play.keeps,
    "say": Play.says,
    "raise": _raise,
    "try": Play.tries,
    "wait": lambda _, path: wait_for(path),
    "sleep": lambda _, seconds: time.sleep(seconds),
    "note": lambda play, word: note(word, name=play.name, held=play.lease.held),
    "check": lambda play: play.lease.check(),
    "effect": lambda play: play.lease.effect("charge", lambda _: "charged").value,
    "save": lambda play: play.lease.save_progress(1),
    "each": Play.each,
    "extend": lambda play: play.lease.extend(5),
    "die": Play.dies,
    "die before release": _DYING.append,
    "end backend": Play.ends_backend,
    "enqueue": Play.enqueues,
}
"""All steps by their names."""


_completed = run.Execution._completed


def _completed_and_die(self, *args):
    """Die after the done record was read, before the lease is released."""
    while _DYING:
        _DYING.pop().dies()
    return _completed(self, *args)


run.Execution._completed = _completed_and_die


def _runs(name):
    lines = (
        Path(os.environ["JOURNAL"]).read_text().splitlines()
        if Path(os.environ["JOURNAL"]).exists()
        else []
    )
    return sum(
        found["what"] == "begin" and found.get("name") == name for found in map(json.loads, lines)
    )


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="books:{name}",
    lease_fingerprint=("name",),
    lease_failures=Failures(cooldown=CooldownPolicy(1, jitter=0), crashes=10, resume="never"),
)
def books(self, name, way, *scripts):
    run = _runs(name)
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    return Play(self, name, way).run(scripts[min(run, len(scripts) - 1)])


@task_postrun.connect(weak=False)
def _tell_kept(**_):
    """Write whether the connections that stayed open are in a transaction, and end it."""
    while _KEPT:
        name, books = _KEPT.pop()
        driver = getattr(
            books.given,
            {"raw": "dbapi_connection", "django": "connection"}.get(books.kind, ""),
            books.given,
        )
        inside = driver.in_transaction if LITE else driver.info.transaction_status.name == "INTRANS"
        note("kept", name=name, value=inside)
        books.end("rollback")


@signals.completion_stands.connect(weak=False)
def _stands(sender, event, **_):
    note("stands", about=event.key, error=event.error)
