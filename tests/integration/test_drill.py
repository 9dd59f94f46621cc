"""``celery leases drill`` with its own workers, on Redis and PostgreSQL: what it finds, and that it
leaves nothing behind and touches nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from sqlalchemy import text

from celery_leases.record import State
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import make_call
from celery_leases.testing.contracts.record_case import won
from celery_leases.testing.waits import wait_until
from tests.support.guard import descendants, parents
from tests.support.preloaded import preloaded
from tests.support.process import GuardedProcess

ROOT = Path(__file__).parents[2]
CELERY = [sys.executable, "-m", "celery", "-A", "tests.apps.leased"]
SOMEBODYS = json.dumps([{"body": "e30="}, "", "celery"])
"""An unacknowledged message of another queue, as kombu stores it in Redis."""


class Drill(GuardedProcess):
    """A command that prints JSON; *said* is a directory for its output and its errors."""

    def __init__(self, argv: list[str], env: dict[str, str], said: Path) -> None:
        out, self._errors = said / "out", said / "errors"
        forked = preloaded.can_run_command(argv, env)
        super().__init__(argv, log=out, errors=self._errors, env=env, cwd=ROOT, forked=forked)

    def ended(self) -> tuple[int, list[Any], str]:
        code = self.wait(100)
        steps = [json.loads(line) for line in self.logs().splitlines()]
        return code, steps, self._errors.read_text()


class Place:
    """An operator's broker, lease store and database, with work of their own in each."""

    drill: Drill | None = None

    def __init__(self, redis_url: str, database_url: str, directory: Path, said: Path) -> None:
        self.broker = redis.Redis.from_url(redis_url)
        self.lease_url = urlsplit(redis_url)._replace(path="/1").geturl()
        self.leases = redis.Redis.from_url(self.lease_url)
        self.records = SqlRecordStore(engine_for(database_url))
        self.records.migrate()
        won(self.records, make_call("t:other|1", task="other", key="1"), "redis")
        self.broker.rpush("celery", "a message")
        self.broker.hset("unacked", "tag", SOMEBODYS)
        self.broker.zadd("unacked_index", {"tag": 4e9})  # not due before 2096
        self.directory, self.said = directory, said
        self.env = os.environ | {
            "CELERY_BROKER_URL": redis_url,
            "LEASES_URL": self.lease_url,
            "LEASES_DATABASE_URL": database_url,
            "C_FORCE_ROOT": "1",
            "TMPDIR": str(directory),
        }

    def drills(self, *words: str) -> Drill:
        """``celery leases drill --yes --json`` with *words*, started on default broker settings."""
        argv = [*CELERY, "leases", "drill", "--yes", "--json", *words]
        self.drill = Drill(argv, self.env, self.said)
        return self.drill

    def check_nothing_is_left(self) -> None:
        """Only what was there before is there, in broker, lease store, database and directory."""
        with self.records.database.engine.connect() as connection:
            found = connection.execute(text("SELECT stored_key FROM celery_leases_records"))
            assert [key for (key,) in found] == ["t:other|1"]
        record = self.records.read("t:other|1")
        assert record is not None
        assert record.state is State.RUNNING
        assert {*self.broker.keys()} == {b"celery", b"unacked", b"unacked_index"}
        assert self.broker.lrange("celery", 0, -1) == [b"a message"]
        assert self.broker.hgetall("unacked") == {b"tag": SOMEBODYS.encode()}
        assert {*self.leases.keys()} <= {b"celery_leases:epoch"}
        assert [*self.directory.iterdir()] == []


@pytest.fixture
def place(leases_redis_url: str, leases_postgres_url: str, tmp_path: Path) -> Iterator[Place]:
    for name in ("left", "said"):
        (tmp_path / name).mkdir()
    made = Place(leases_redis_url, leases_postgres_url, tmp_path / "left", tmp_path / "said")
    yield made
    if made.drill is not None:
        made.drill.end()


def test_a_good_set_up_passes(place: Place) -> None:
    code, steps, err = place.drills("--ttl", "5s").ended()
    assert code == 0, (steps, err)
    assert [(step["step"], step["met"]) for step in steps] == [
        ("child", True),
        ("double", True),
        ("pause", True),
        ("worker", True),
    ]
    took = {
        (step["step"], takeover["who"]): takeover["took"]
        for step in steps
        for takeover in step["takeovers"]
    }
    assert {*took} == {
        ("child", "its own call"),
        ("pause", "another call"),
        ("worker", "another call"),
        ("worker", "its own call"),
    }
    # The body stops a sixth of the ttl before its lease ends, so the killed one had more left.
    assert took["worker", "another call"] > 0.5
    double = next(step for step in steps if step["step"] == "double")
    assert sum("started the task" in each["what"] for each in double["seen"]) == 1
    place.check_nothing_is_left()


@pytest.mark.nightly
def test_a_ttl_that_is_too_long_fails_and_is_named(place: Place) -> None:
    drill = place.drills("--ttl", "1m", "--takeover-slo", "2s", "--step", "worker")
    code, (step,), err = drill.ended()
    assert code == 1
    assert "missed: worker" in err
    another, own = step["takeovers"]
    assert (another["took"], own["took"]) == (None, None)
    assert another["why"].startswith("the ttl: ")
    assert own["why"].startswith("the ttl: ")
    place.check_nothing_is_left()


def test_ctrl_c_leaves_nothing_behind(place: Place) -> None:
    drill = place.drills("--ttl", "1m", "--step", "pause")
    wait_until(
        lambda: any(b"pause" in key for key in place.leases.keys("*:lease")), 60, "a running body"
    )
    workers = {*descendants(drill.pid)}
    assert workers
    drill.send(signal.SIGINT)
    code, steps, _ = drill.ended()
    assert (code, steps) == (1, [])
    wait_until(lambda: not workers & parents().keys(), 60, "the end of the workers")
    place.check_nothing_is_left()
