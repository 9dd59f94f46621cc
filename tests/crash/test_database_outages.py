"""The records database restarts, is down, or loses a reply, during the claim and the settle.

In each case the outcome is decided by reading the record again: each call ends exactly once, and no
crash is counted.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.cutting_proxy import CuttingProxy
from tests.integration.deployments import spelled
from tests.support.servers import PostgresServer

REDIS_LEASES = ("rabbit", "redis", "postgres")
DATABASE_LEASES = ("redis", "database", "postgres")
BOTH_LEASES = pytest.mark.parametrize("combination", [REDIS_LEASES, DATABASE_LEASES], ids=spelled)
CLAIM = b"INSERT INTO celery_leases_records"
SETTLE = b"finished_at=CAST"


@pytest.mark.both_lease_stores
@BOTH_LEASES
@pytest.mark.parametrize("carried_out", [True, False], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("statement", [CLAIM, SETTLE], ids=["claim", "settle"])
def test_a_statement_whose_reply_is_lost_is_decided_by_reading_back(
    scene_factory: MakeScene,
    leases_postgres: PostgresServer,
    name: str,
    statement: bytes,
    carried_out: bool,
) -> None:
    url = leases_postgres.new_database()
    with CuttingProxy(leases_postgres.port) as proxy:
        through = url.replace(f":{leases_postgres.port}/", f":{proxy.port}/")
        env = {"LEASES_DATABASE_URL": through}
        scene = scene_factory(urls={"postgres": url}, ttl=3, visibility=30, env=env)
        proxy.cut(statement, before=not carried_out)
        value = scene.tasks.work.delay(name, 0.1).get(timeout=40)
        assert proxy.was_cut.is_set()
        row = scene.done_once("work", name)
        assert (len(scene.events("begin", name=name)), row["fence"], row["attempt"]) == (
            1,
            value["fence"],
            1,
        )
        assert "refused" not in "\n".join(scene.log(name))
        assert not scene.is_held("work", f"work:{name}")


@BOTH_LEASES
def test_a_claim_whose_reply_is_lost_for_longer_than_the_lease_is_no_crash(
    scene_factory: MakeScene, leases_postgres: PostgresServer, name: str
) -> None:
    """The row belongs to an attempt that never ran."""
    url = leases_postgres.new_database()
    with CuttingProxy(leases_postgres.port) as proxy:
        through = url.replace(f":{leases_postgres.port}/", f":{proxy.port}/")
        env = {"LEASES_DATABASE_URL": through}
        scene = scene_factory(urls={"postgres": url}, ttl=2, visibility=60, env=env)
        proxy.refusing = True
        proxy.cut(CLAIM)
        result = scene.tasks.work.delay(name)
        assert proxy.was_cut.wait(20)
        open_row = scene.wait_for_state("work", f"work:{name}", "running")
        scene.wait_for_log(result.id, "rescheduled in")
        proxy.refusing = False
        value = result.get(timeout=40)
        row = scene.done_once("work", name, crashes=0)
        assert len(scene.events("begin", name=name)) == 1
        assert value["fence"] == row["fence"] > open_row["fence"]
        assert row["previous_ended"] == "lost"


@pytest.mark.both_lease_stores
@BOTH_LEASES
def test_an_outcome_is_written_after_an_outage_at_the_settle(
    scene_factory: MakeScene, own_postgres: PostgresServer, name: str
) -> None:
    """The outage is longer than the ttl."""
    scene = scene_factory(urls={"postgres": own_postgres.new_database()}, ttl=2, visibility=60)
    gate, result = scene.hold("work", name, answer="kept")
    own_postgres.kill()
    gate.touch()
    (ended,) = scene.wait_for("end", name=name)
    wait_until(lambda: time.monotonic() - ended["t"] > 5.0, 10, "an outage of 5 s")
    own_postgres.start()
    back = time.monotonic()
    assert result.get(timeout=40) == "kept"
    settled = time.monotonic()
    row = scene.done_once("work", name)
    assert (len(scene.events("begin", name=name)), row["attempt"]) == (1, 1)
    assert scene.tasks.work.delay(name, gate=str(gate), answer="kept").get(timeout=20) == "kept"
    print(f"settled {settled - back:.2f} s after the database was back")


def test_a_duplicate_that_finds_the_database_back_first_waits_for_the_holder(
    scene_factory: MakeScene, leases_postgres: PostgresServer, name: str
) -> None:
    url = leases_postgres.new_database()
    with CuttingProxy(leases_postgres.port) as proxy:
        env = {"LEASES_DATABASE_URL": url.replace(f":{leases_postgres.port}/", f":{proxy.port}/")}
        scene = scene_factory(
            DATABASE_LEASES, urls={"postgres": url}, ttl=2, visibility=60, env=env
        )
        gate, result = scene.hold("work", name)
        scene.another(env={"LEASES_DATABASE_URL": url})
        proxy.refusing = True
        proxy.cut(SETTLE, before=True)
        gate.touch()
        assert proxy.was_cut.wait(20)
        engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            connection.execute(text(f"{ends} AND pid <> pg_backend_pid()"))
        scene.wait_until_free("work", f"work:{name}")
        duplicate = scene.tasks.work.delay(name, gate=str(gate))
        scene.wait_for_log(duplicate.id, "received")
        proxy.refusing = False
        assert duplicate.get(timeout=40) == result.get(timeout=40)
        assert len(scene.events("begin", name=name)) == 1
        scene.done_once("work", name, crashes=0)


def test_a_database_frozen_beyond_the_ttl_at_the_settle_gets_one_end(
    scene_factory: MakeScene, own_postgres: PostgresServer, name: str
) -> None:
    scene = scene_factory(
        REDIS_LEASES, urls={"postgres": own_postgres.new_database()}, ttl=2, concurrency=2
    )
    gate, result = scene.hold("work", name)
    (begun,) = scene.events("begin", name=name)
    own_postgres.pause()
    gate.touch()
    (ended,) = scene.wait_for("end", name=name)
    duplicate = scene.tasks.work.delay(name, gate=str(gate))
    wait_until(lambda: time.monotonic() - ended["t"] > 2 * scene.ttl, 10, "twice the ttl")
    held = scene.client._leases.holder(f"t:tests.apps.leased.work|work:{name}")
    own_postgres.resume()
    assert held is not None
    assert held.call_id == result.id
    assert (
        result.get(timeout=20)
        == duplicate.get(timeout=20)
        == {"name": name, "fence": begun["fence"]}
    )
    scene.done_once("work", name)


@pytest.mark.parametrize(
    "combination", [("redis", "database", "sqlite"), ("rabbit", "redis", "sqlite")], ids=spelled
)
def test_a_sqlite_file_locked_by_another_writer_is_waited_for(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(ttl=5, visibility=60)
    file = scene.database_url.removeprefix("sqlite:///")
    gate = scene.gate()
    with _sqlite_locked(file, 3.0):
        result = scene.tasks.work.delay(name, gate=str(gate))
        scene.wait_for_log(result.id, "received")
        assert not scene.events("begin", name=name)
    scene.wait_for("begin", name=name)
    with _sqlite_locked(file, 3.0):
        gate.touch()
        scene.wait_for("end", name=name)
    assert result.get(timeout=30)["name"] == name
    row = scene.done_once("work", name)
    assert (len(scene.events("begin", name=name)), row["attempt"]) == (1, 1)


@contextmanager
def _sqlite_locked(file: str, seconds: float) -> Iterator[None]:
    """Hold the write lock for *seconds*; the block may end sooner, and then waits for the rest."""
    held, over = threading.Event(), time.monotonic() + seconds

    def hold() -> None:
        connection = sqlite3.connect(file, timeout=20, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        held.set()
        while time.monotonic() < over:
            time.sleep(0.02)
        connection.execute("ROLLBACK")
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    yield
    thread.join()


def test_a_worker_without_a_descriptor_left_fails_no_call(
    scene_factory: MakeScene, leases_postgres: PostgresServer, tmp_path: Path, name: str
) -> None:
    """Each new connection raises a bare OSError."""
    starved = tmp_path / "starved"
    url, env = leases_postgres.new_database(), {"STARVED": str(starved)}
    scene = scene_factory(
        DATABASE_LEASES,
        urls={"postgres": url},
        ttl=3,
        concurrency=2,
        module="tests.apps.without_descriptors",
        env=env,
    )
    gate, begun = scene.hold("work", name)
    starved.touch()
    with create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as other:
        ended = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
        other.execute(text(f"{ended} AND datname = current_database()"))
    gate.touch()
    waiting = scene.tasks.work.delay(f"{name}-2")
    scene.wait_for_log(waiting.id, "Too many open files")
    starved.unlink()
    assert [result.get(timeout=40)["name"] for result in (begun, waiting)] == [name, f"{name}-2"]
    scene.done_once("work", name)
    scene.done_once("work", f"{name}-2")


def test_a_worker_that_has_no_descriptor_left_for_its_first_calls_fails_none(
    scene_factory: MakeScene, tmp_path: Path, name: str
) -> None:
    starved = tmp_path / "starved"
    scene = scene_factory(
        DATABASE_LEASES,
        concurrency=2,
        module="tests.apps.without_descriptors",
        env={"STARVED": str(starved)},
    )
    starved.touch()
    calls = [scene.tasks.work.delay(f"{name}-{number}") for number in range(4)]
    scene.wait_for_log("did not begin, returned to the broker", "Too many open files", number=2)
    assert len(scene.log("did not begin, retrying")) >= 2
    starved.unlink()
    assert {call.get(timeout=40)["name"] for call in calls} == {
        f"{name}-{number}" for number in range(4)
    }
    assert "raised unexpected" not in scene.logs()
