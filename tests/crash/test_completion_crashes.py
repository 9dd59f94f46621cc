"""Deaths around ``complete()``: however the process, its connection or its server ends, invoices
equal done records.
"""

from typing import Any

import pytest
from sqlalchemy import make_url, text

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.crash.cutting_proxy import CuttingProxy
from tests.integration.deployments import spelled

BOOKING = "tests.apps.transaction_scripts"
OPEN, WRITE, COMPLETE, COMMIT, DIE = ["open"], ["write"], ["complete", "paid"], ["commit"], ["die"]
BOOKED = [OPEN, WRITE, COMPLETE, COMMIT]
DEATHS: dict[str, tuple[list[Any], int]] = {
    "before it": ([OPEN, WRITE, DIE, COMPLETE, COMMIT], 2),
    "before the commit": ([OPEN, WRITE, COMPLETE, DIE, COMMIT], 2),
    "after the commit": ([*BOOKED, DIE], 1),
    "before the release": ([*BOOKED, ["die before release"]], 1),
}
"""What a body does, and how often it is run until the key is done."""
COMBINATIONS = [
    ("redis", "redis", "postgres"),
    ("rabbit", "database", "postgres"),
    ("rabbit", "redis", "mariadb"),
    ("redis", "database", "mariadb"),
    ("redis", "database", "sqlite"),
    ("rabbit", "redis", "sqlite"),
]
ON_SERVERS = pytest.mark.parametrize("combination", COMBINATIONS[:4], ids=spelled)


def make_books(scene: Scene) -> Scene:
    with scene._engine.connect() as connection:
        connection.execute(
            text("CREATE TABLE invoices (name varchar(64) NOT NULL, fence bigint NOT NULL)")
        )
    return scene


def assert_balanced(scene: Scene, name: str, *, done: bool) -> dict[str, Any]:
    """One invoice and a done record, or neither; the record."""
    with scene._engine.connect() as connection:
        query = text("SELECT count(*) FROM invoices WHERE name = :name")
        invoices = connection.execute(query, {"name": name}).scalar()
    row = scene.row("books", f"books:{name}")
    assert ((row["state"] == "done"), invoices) == (done, int(done)), row
    return row


def run(scene: Scene, name: str, script: list[Any], way: str = "session") -> Any:
    """A call that plays *script* once, and then does its work without trouble."""
    return scene.tasks.books.delay(name, way, script, BOOKED)


@pytest.mark.both_lease_stores
@pytest.mark.parametrize("combination", COMBINATIONS, ids=spelled)
def test_a_process_that_is_killed_around_the_completion_books_once(
    scene_factory: MakeScene, name: str
) -> None:
    scene = make_books(scene_factory(home=BOOKING, concurrency=len(DEATHS), ttl=10, visibility=30))
    names = {where: f"{name}-{number}" for number, where in enumerate(DEATHS)}
    results = {where: run(scene, names[where], script) for where, (script, _) in DEATHS.items()}
    for where, (_, runs) in DEATHS.items():
        assert results[where].get(timeout=60) == "paid", where
        assert len(scene.events("died", name=names[where])) == 1
        assert len(scene.events("begin", name=names[where])) == runs, where
        assert_balanced(scene, names[where], done=True)
    for each in names.values():
        wait_until(
            lambda each=each: not scene.is_held("books", f"books:{each}"),  # type: ignore[misc]
            20,
            "the leases to end",
        )
    scene.wait_until_drained()


@ON_SERVERS
def test_a_commit_whose_reply_is_lost_has_succeeded(
    scene_factory: MakeScene,
    request: pytest.FixtureRequest,
    name: str,
    combination: tuple[str, ...],
) -> None:
    kind = combination[-1]
    commit = (
        b"\x03COMMIT" if kind == "mariadb" else b"COMMIT"
    )  # its driver says AUTOCOMMIT when it connects
    server = request.getfixturevalue(f"leases_{kind}")
    url = server.new_database()
    with CuttingProxy(server.port) as proxy:
        through = (
            make_url(url)
            .set(host="127.0.0.1", port=proxy.port)
            .render_as_string(hide_password=False)
        )
        scene = make_books(
            scene_factory(
                combination,
                home=BOOKING,
                urls={kind: url},
                env={"BOOKS_URL": through},
                visibility=30,
            )
        )
        for way in ("session", "driver"):
            proxy.cut(commit)
            after = f"{name}-after-{way}"
            assert run(scene, after, BOOKED, way).get(timeout=30) == "paid"
            assert proxy.was_cut.is_set()
            assert len(scene.wait_for("stands", about=f"books:{after}")) == 1
            assert len(scene.events("begin", name=after)) == 1
            assert_balanced(scene, after, done=True)

            proxy.cut(commit, before=True)
            assert_booked_by_the_second_run(scene, f"{name}-before-{way}", BOOKED, way)
            assert proxy.was_cut.is_set()


@ON_SERVERS
def test_a_backend_that_ends_inside_the_transaction_takes_the_completion_along(
    scene_factory: MakeScene, name: str
) -> None:
    scene = make_books(scene_factory(home=BOOKING, visibility=30))
    for way in ("session", "connection", "driver", "django"):
        script = [OPEN, WRITE, COMPLETE, ["end backend"], COMMIT]
        assert_booked_by_the_second_run(scene, f"{name}-{way}", script, way)


def assert_booked_by_the_second_run(scene: Scene, name: str, script: list[Any], way: str) -> None:
    """The first run gets a database error and writes nothing; the second run succeeds."""
    assert run(scene, name, script, way).get(timeout=30) == "paid"
    first, second = scene.events("begin", name=name)
    assert second["fence"] > first["fence"]
    assert not scene.events("stands", about=f"books:{name}")
    row = assert_balanced(scene, name, done=True)
    assert row["previous_ended"] == "failed"
