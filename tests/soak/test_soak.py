"""A link does what it is told, the judgement sees what is wrong, and a minute breaks no promise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import create_engine, text

from celery_leases.testing.waits import wait_until
from tests.soak.judging import Judgement, _bodies, _effects, _undone
from tests.soak.links import Link
from tests.soak.load import Key
from tests.support.servers import RedisServer


def test_a_link_is_cut_refused_and_held_back(leases_redis: RedisServer) -> None:
    with Link(leases_redis.port) as link:
        options: Any = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 0.3}
        with redis.Redis(port=link.port, **options) as client:
            client.ping()
            assert link.cut() == 1
            wait_until(lambda: link.cut() == 0, 5, "the connection to end")
            client.ping()
            link.refusing = True
            wait_until(lambda: link.cut() == 0, 5, "the connection to end")
            assert not any(_answers(client) for _ in range(3))
            link.heal()
            wait_until(lambda: _answers(client), 5, "the link to be healed")
            link.stall()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            link.heal()
            wait_until(lambda: _answers(client), 5, "the link to be healed")


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def deployment(tmp_path: Path, *events: dict[str, Any]) -> Any:
    journal = tmp_path / "journal"
    journal.write_text("".join(json.dumps(each) + "\n" for each in events))
    database = create_engine(f"sqlite:///{tmp_path / 'records.db'}")
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE proofs (name text)"))
        connection.execute(text("CREATE TABLE celery_leases_records (key text, state text)"))
        connection.execute(
            text(
                "INSERT INTO celery_leases_records VALUES ('play:a', 'done'), ('play:b', 'cooling')"
            )
        )
        connection.execute(text("INSERT INTO proofs VALUES ('b'), ('b'), ('c')"))
    return SimpleNamespace(stage=SimpleNamespace(journal=journal), database=database)


def test_two_bodies_at_once_are_measured(tmp_path: Path) -> None:
    def event(what: str, at: float, attempt: int, name: str = "a") -> dict[str, Any]:
        return {"what": what, "t": at, "name": name, "attempt": attempt, "pid": attempt}

    made = deployment(
        tmp_path,
        event("begin", 1.0, 1),
        event("begin", 2.0, 2),
        event("over", 3.5, 1),
        event("over", 4.0, 2),
        event("begin", 4.0, 3),
        event("begin", 1.0, 9, "killed"),
        event("begin", 2.0, 10, "killed"),
        event("over", 3.0, 10, "killed"),
    )
    found = Judgement()
    _bodies(made, found)
    assert (found.runs, found.overlaps, found.longest_overlap) == (5, 1, 1.5)


def test_a_second_charge_a_second_commit_and_a_lost_call_are_seen(tmp_path: Path) -> None:
    charges = [
        {"what": "charge", "name": name, "idempotency_key": key}
        for name, key in (("a", "1"), ("a", "1"), ("d", "1"), ("d", "2"))
    ]
    made = deployment(tmp_path, *charges)
    keys = {
        Key("play", name, way)
        for name, way in (("a", "effect"), ("b", "complete"), ("c", "complete"), ("d", "effect"))
    }
    assert sorted(_effects(made, Counter(keys))) == [
        "effects once: d was charged under 2 keys",
        "one commit: b has 2 invoices",
    ]
    assert _undone(made, Counter(keys)) == ["play:b: cooling", "play:c: None", "play:d: None"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("leases", ["redis", "database"])
def test_a_minute_of_faults_breaks_no_promise(leases: str) -> None:
    """``make soak`` takes longer."""
    argv = [sys.executable, "-m", "tests.soak", "--minutes", "1", "--leases", leases]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
