"""Completion in the body's own transaction: there are always as many invoices as done records."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery.result import AsyncResult
from sqlalchemy import text

from celery_leases.keys import stored_key
from celery_leases.testing.waits import wait_until
from tests.integration.conftest import MakeStage
from tests.integration.deployments import Stage, got, spelled, until
from tests.support.records import assert_has

BOOKING = "tests.apps.transaction_scripts"
PG_REDIS = ("redis", "redis", "postgres")
PG_DATABASE = ("rabbit", "database", "postgres")
MARIA_REDIS = ("rabbit", "redis", "mariadb")
MARIA_DATABASE = ("redis", "database", "mariadb")
LITE_DATABASE = ("redis", "database", "sqlite")
TTL = 2.0
LOCK_TIMEOUT = {"postgres": 1.5, "mariadb": 2.0}
IDLE = "idle_in_transaction_session_timeout = '500ms'"
WAYS = ("session", "scoped", "connection", "driver", "django")

OPEN, WRITE, GUARD, COMMIT, ROLLBACK = ["open"], ["write"], ["guard"], ["commit"], ["rollback"]
COMPLETE = ["complete", "paid"]
BOOKED = [OPEN, WRITE, COMPLETE, COMMIT]


def make_books(stage: Stage) -> Stage:
    with stage._engine.connect() as connection:
        connection.execute(
            text("CREATE TABLE invoices (name varchar(64) NOT NULL, fence bigint NOT NULL)")
        )
    return stage


@pytest.fixture(
    scope="module",
    params=(PG_REDIS, PG_DATABASE, MARIA_REDIS, MARIA_DATABASE, LITE_DATABASE),
    ids=spelled,
)
def module_stage(request: pytest.FixtureRequest, stage_factory: MakeStage) -> Iterator[Stage]:
    """A worker of :mod:`tests.apps.transaction_scripts`; its queue must be empty at the end."""
    made = make_books(stage_factory(request.param, home=BOOKING, env={"TTL": f"{TTL:g}"}))
    yield made
    made.close_when_drained(request.session)


ON_SERVER = pytest.mark.only(database=("postgres", "mariadb"))
"""There are no row locks on SQLite."""
ON_POSTGRES = pytest.mark.only(database="postgres")
"""Other databases have no serialization failures."""
ROW_IS_LEASE = pytest.mark.only(leases="database", database=("postgres", "mariadb"))
"""Where the row is the lease, and can be locked."""
TELLS_TRANSACTIONS = pytest.mark.only(database=("postgres", "sqlite"))
"""A connection to MariaDB has no transaction ids."""


def run(stage: Stage, name: str, *scripts: list[Any], way: str = "session") -> AsyncResult:
    result: AsyncResult = stage.tasks.books.delay(name, way, *scripts)
    return result


def answer(stage: Stage, name: str, *scripts: list[Any], way: str = "session") -> Any:
    return got(run(stage, name, *scripts, way=way))


def invoices(stage: Stage, name: str) -> int:
    with stage._engine.connect() as connection:
        found = connection.execute(
            text("SELECT count(*) FROM invoices WHERE name = :name"), {"name": name}
        ).scalar()
    return int(found or 0)


def record(stage: Stage, name: str) -> dict[str, Any]:
    return stage.row("books", f"books:{name}")


def assert_balanced(stage: Stage, name: str, *, done: bool) -> None:
    """One invoice and a done record, or neither."""
    assert ((record(stage, name)["state"] == "done"), invoices(stage, name)) == (done, int(done))


def raised(stage: Stage, name: str) -> list[str]:
    return [event["error"] for event in stage.events("raised", name=name)]


# -- what can be given -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_done_record_commits_with_the_rows(stage: Stage, name: str, way: str) -> None:
    result = {"charge": "ch_1", "pages": [1, 2]}
    script = [OPEN, WRITE, ["complete", result], COMMIT]
    assert answer(stage, name, script, way=way) == result
    assert_balanced(stage, name, done=True)
    row = record(stage, name)
    assert (row["ended"], row["attempt"], row["lease_until"]) == ("returned", 1, None)
    assert answer(stage, name, script, way=way) == result
    assert len(stage.events("begin", name=name)) == 1
    assert not stage.is_held("books", f"books:{name}")


@pytest.mark.parametrize("way", WAYS)
def test_a_rollback_takes_the_done_record_along(stage: Stage, name: str, way: str) -> None:
    result = run(stage, name, [OPEN, WRITE, COMPLETE, ROLLBACK], BOOKED, way=way)
    with pytest.raises(Exception, match="its transaction was not committed") as told:
        got(result)
    assert type(told.value).__name__ == "CompletionNotCommitted"
    assert_balanced(stage, name, done=False)
    stage.client.retry(f"books:{name}", task=f"{BOOKING}.books")
    assert answer(stage, name, BOOKED, way=way) == "paid"
    assert_balanced(stage, name, done=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_transaction_left_open_is_rolled_back(stage: Stage, name: str, way: str) -> None:
    with pytest.raises(Exception, match="its transaction was not committed"):
        answer(stage, name, [OPEN, WRITE, COMPLETE], way=way)
    assert_balanced(stage, name, done=False)
    assert record(stage, name)["state"] == "cooling"


@pytest.mark.parametrize(
    "way", ["session autocommit", "connection autocommit", "driver autocommit"]
)
def test_what_commits_each_statement_is_refused(stage: Stage, name: str, way: str) -> None:
    script = [["open", way], ["try", *COMPLETE], ["try", *GUARD], *BOOKED]
    assert answer(stage, name, script) == "paid"
    assert raised(stage, name) == ["WrongDatabase"] * 2
    assert "begin a transaction first" in stage.events("raised", name=name)[0]["text"]
    assert_balanced(stage, name, done=True)


@pytest.mark.parametrize("way", ["session", "connection", "driver"])
def test_another_database_is_refused(stage: Stage, name: str, way: str) -> None:
    script = [["open", f"{way} elsewhere"], ["try", *COMPLETE], ROLLBACK, *BOOKED]
    assert answer(stage, name, script) == "paid"
    assert raised(stage, name) == ["WrongDatabase"]
    assert_balanced(stage, name, done=True)


def test_a_result_that_is_no_json_is_refused(stage: Stage, name: str) -> None:
    assert answer(stage, name, [OPEN, WRITE, ["try", "complete badly"], COMPLETE, COMMIT]) == "paid"
    (told,) = stage.events("raised", name=name)
    assert told["error"] == "EffectMisused"
    assert "complete() takes a JSON value" in told["text"]
    assert_balanced(stage, name, done=True)


def test_a_result_above_the_limit_is_returned_but_not_stored(stage: Stage, name: str) -> None:
    large = "x" * 1_100_000
    assert answer(stage, name, [OPEN, WRITE, ["complete", large], COMMIT]) == large
    assert_balanced(stage, name, done=True)
    assert_has(record(stage, name), result=None, reason="result_too_large")


# -- after the commit ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["value", "snooze", "retry", "ignore", "reject"])
def test_a_call_that_raises_after_the_commit_succeeds(stage: Stage, name: str, kind: str) -> None:
    result = run(stage, name, [*BOOKED, ["raise", kind]])
    assert got(result) == "paid"
    stage.wait_until_drained()
    assert_balanced(stage, name, done=True)
    assert (record(stage, name)["failures"], record(stage, name)["attempt"]) == (0, 1)
    assert len(stage.events("begin", name=name)) == 1
    assert len(stage.wait_for("stands", about=f"books:{name}")) == 1
    assert got(result) == "paid"
    assert not stage.is_held("books", f"books:{name}")


def test_what_is_returned_after_the_commit_is_ignored(stage: Stage, name: str) -> None:
    assert answer(stage, name, [*BOOKED, ["say", "something else"]]) == "paid"
    assert_balanced(stage, name, done=True)


def test_a_second_completion_is_refused(stage: Stage, name: str) -> None:
    script = [
        OPEN,
        WRITE,
        COMPLETE,
        ["try", "complete", "again"],
        COMMIT,
        OPEN,
        ["try", "complete", "again"],
        ROLLBACK,
    ]
    assert answer(stage, name, [*script, ["say", "paid"]]) == "paid"
    assert raised(stage, name) == ["AlreadyCompleted"] * 2
    assert_balanced(stage, name, done=True)


def test_a_body_that_continues_after_the_commit_may(stage: Stage, name: str) -> None:
    result = run(
        stage, name, [*BOOKED, ["note", "committed"], ["sleep", 2 * TTL], ["note", "went on"]]
    )
    stage.wait_for("committed", name=name)
    assert answer(stage, name, BOOKED) == "paid"
    assert got(result) == "paid"
    assert len(stage.events("went on", name=name)) == 1
    assert not stage.events("stands", about=f"books:{name}")
    assert len(stage.events("begin", name=name)) == 1


# -- before the commit -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_after_a_rollback_it_may_be_completed_again(stage: Stage, name: str, way: str) -> None:
    script = [
        OPEN,
        WRITE,
        ["complete", "first"],
        ROLLBACK,
        OPEN,
        WRITE,
        ["complete", "second"],
        COMMIT,
    ]
    assert answer(stage, name, script, way=way) == "second"
    assert_balanced(stage, name, done=True)


def test_an_error_before_the_commit_is_a_failure(stage: Stage, name: str) -> None:
    with pytest.raises(ValueError, match=f"no luck with {name}"):
        answer(stage, name, [OPEN, WRITE, COMPLETE, ["raise", "value"]])
    assert_balanced(stage, name, done=False)
    row = record(stage, name)
    assert (row["state"], row["ended"], row["failures"]) == ("cooling", "failed", 1)
    assert not stage.events("stands", about=f"books:{name}")


@pytest.mark.parametrize("way", ["session", "connection", "driver"])
def test_a_savepoint_takes_the_completion_along(stage: Stage, name: str, way: str) -> None:
    within = [
        ["sql", "SAVEPOINT inner_one"],
        WRITE,
        ["complete", "inner"],
        ["sql", "ROLLBACK TO SAVEPOINT inner_one"],
    ]
    assert answer(stage, name, [OPEN, *within, WRITE, COMPLETE, COMMIT], way=way) == "paid"
    assert_balanced(stage, name, done=True)


def test_a_savepoint_leaves_the_call_unfinished(stage: Stage, name: str) -> None:
    within = [
        ["sql", "SAVEPOINT inner_one"],
        WRITE,
        COMPLETE,
        ["sql", "ROLLBACK TO SAVEPOINT inner_one"],
    ]
    with pytest.raises(Exception, match="its transaction was not committed"):
        answer(stage, name, [OPEN, *within, COMMIT])
    assert_balanced(stage, name, done=False)


@pytest.mark.parametrize("word", ["effect", "save", "each", "extend"])
def test_after_the_commit_nothing_else_is_written(stage: Stage, name: str, word: str) -> None:
    assert answer(stage, name, [*BOOKED, ["try", word], ["note", "went on"]]) == "paid"
    (told,) = stage.events("raised", name=name)
    assert told["error"] == "AlreadyCompleted"
    assert "after complete() was committed" in told["text"]
    assert [event["held"] for event in stage.events("went on", name=name)] == [True]
    assert_balanced(stage, name, done=True)


# -- the guard -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_guarded_rows_commit_while_fenced(stage: Stage, name: str, way: str) -> None:
    script = [OPEN, GUARD, WRITE, COMMIT, OPEN, GUARD, COMPLETE, GUARD, COMMIT]
    assert answer(stage, name, script, way=way) == "paid"
    assert_balanced(stage, name, done=True)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[TELLS_TRANSACTIONS] if way in {"driver", "django"} else [])
        for way in WAYS
    ],
)
def test_a_guarded_transaction_left_open_fails(stage: Stage, name: str, way: str) -> None:
    result = run(stage, name, [OPEN, GUARD, WRITE, ["say", "paid"]], BOOKED, way=way)
    with pytest.raises(
        Exception, match=r"after guard\(\), but its transaction was not committed"
    ) as told:
        got(result)
    assert type(told.value).__name__ == "CompletionNotCommitted"
    assert_balanced(stage, name, done=False)
    assert (record(stage, name)["state"], record(stage, name)["failures"]) == ("cooling", 1)


@TELLS_TRANSACTIONS
@pytest.mark.parametrize("way", ["driver", "django", "raw"])
def test_a_next_transaction_is_not_the_guarded_one(stage: Stage, name: str, way: str) -> None:
    begin = [["sql", "BEGIN"]] if stage.record_store == "sqlite" else []
    script = [OPEN, GUARD, WRITE, COMMIT, *begin, ["read"], ["effect"], ["keep"], ["say", "paid"]]
    assert answer(stage, name, script, way=way) == "paid"
    assert_balanced(stage, name, done=True)
    assert [event["value"] for event in stage.wait_for("kept", name=name)] == [True]


@pytest.mark.parametrize("step", [GUARD, COMPLETE], ids=["guard", "complete"])
@pytest.mark.parametrize("way", ["session", "driver"])
def test_a_stale_fence_commits_nothing(stage: Stage, name: str, step: list[Any], way: str) -> None:
    gate = stage.gate()
    first = [
        ["note", "ready"],
        ["wait", str(gate)],
        OPEN,
        WRITE,
        step,
        COMMIT,
        ["note", "committed"],
    ]
    result = run(stage, name, first, BOOKED, way=way)
    stage.wait_for("ready", name=name)
    with stage._engine.connect() as connection:  # as another attempt would, which then dies
        stale = (
            "UPDATE celery_leases_records SET fence = fence + 1, owner = 'another', lease_until = 0"
        )
        key = {"key": stored_key(f"{BOOKING}.books", f"books:{name}")}
        connection.execute(text(f"{stale} WHERE stored_key = :key"), key)
    gate.touch()
    assert got(result) == "paid"
    assert len(stage.events("begin", name=name)) == 2
    assert not stage.events("committed", name=name)
    assert_balanced(stage, name, done=True)


@pytest.mark.parametrize("step", [GUARD, COMPLETE], ids=["guard", "complete"])
def test_nothing_else_is_written_meanwhile(stage: Stage, name: str, step: list[Any]) -> None:
    words = ["effect", "save", "each", "extend"]
    trials = [["try", word] for word in words]
    again = [["effect"], ["save"], ["extend"]]
    answer(stage, name, [OPEN, WRITE, step, *trials, ROLLBACK, *again, *BOOKED])
    told = stage.events("raised", name=name)
    assert [(event["step"], event["error"]) for event in told] == [
        ([word], "GuardOpen") for word in words
    ]
    assert max(event["took"] for event in told) < 0.5
    assert_balanced(stage, name, done=True)


def test_a_completion_beside_an_open_guard_is_refused(stage: Stage, name: str) -> None:
    script = [OPEN, WRITE, GUARD, ["try", "complete with", "connection"], COMPLETE, COMMIT]
    assert answer(stage, name, script) == "paid"
    (told,) = stage.events("raised", name=name)
    assert (told["error"], told["took"] < 0.5) == ("GuardOpen", True)
    assert_balanced(stage, name, done=True)


@ON_POSTGRES
def test_in_repeatable_read_a_guard_comes_first(stage: Stage, name: str) -> None:
    early = [
        ["open", "session repeatable"],
        ["read"],
        ["sleep", TTL],
        WRITE,
        ["try", *COMPLETE],
        ROLLBACK,
    ]
    late = [
        ["open", "session repeatable"],
        GUARD,
        ["read"],
        ["sleep", TTL],
        WRITE,
        COMPLETE,
        COMMIT,
    ]
    assert answer(stage, name, [*early, *late]) == "paid"
    told = stage.events("raised", name=name)
    if stage.lease_store == "database":  # a renewal is what has written it
        assert [(event["error"], event["state"]) for event in told] == [
            ("OperationalError", "40001")
        ]
    assert_balanced(stage, name, done=True)


@ON_POSTGRES
def test_in_repeatable_read_an_error_is_the_drivers(stage: Stage, name: str) -> None:
    level = ["sql", "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"]
    early = [OPEN, level, ["read"], ["sleep", TTL], WRITE, ["try", *COMPLETE], ROLLBACK]
    assert answer(stage, name, [*early, *BOOKED], way="driver") == "paid"
    told = stage.events("raised", name=name)
    if stage.lease_store == "database":
        assert [(event["error"], event["state"]) for event in told] == [
            ("SerializationFailure", "40001")
        ]
    assert_balanced(stage, name, done=True)


@pytest.mark.parametrize("ending", [COMMIT, ROLLBACK], ids=["commit", "rollback"])
def test_an_enqueued_call_shares_its_fate(stage: Stage, name: str, ending: list[Any]) -> None:
    following = f"{name}-next"
    script = [OPEN, WRITE, ["enqueue", "books", following, "session", BOOKED], COMPLETE, ending]
    result = run(stage, name, script)
    if ending is COMMIT:
        assert got(result) == "paid"
        stage.wait_for_state("books", f"books:{following}", "done")
        assert_balanced(stage, following, done=True)
    else:
        with pytest.raises(Exception, match="its transaction was not committed"):
            got(result)
        assert stage.find_row("books", f"books:{following}") is None
    assert_balanced(stage, name, done=ending is COMMIT)
    stage.wait_until_drained()
    assert len(stage.events("begin", name=following)) == int(ending is COMMIT)


# -- long transactions -----------------------------------------------------------------------------


def waits(stage: Stage, call: str) -> bool:
    """Whether a call was rescheduled, or waits in its worker."""
    return any("rescheduled in" in line or "waits here" in line for line in stage.log(call))


def contend(stage: Stage, name: str) -> list[AsyncResult]:
    """Three more calls of a name whose row is locked for long."""
    calls = []
    for _ in range(3):
        calls.append(run(stage, name, BOOKED))
        until(lambda call=calls[-1].id: waits(stage, call), "the call to wait")  # type: ignore[misc]
    return calls


@ON_SERVER
def test_a_long_transaction_holds_the_key_and_succeeds(stage: Stage, name: str) -> None:
    script = [
        OPEN,
        WRITE,
        COMPLETE,
        ["note", "locked"],
        ["sleep", 3 * TTL],
        ["note", "still"],
        ["check"],
        COMMIT,
    ]
    result = run(stage, name, script)
    stage.wait_for("locked", name=name)
    calls = contend(stage, name)
    assert [event["held"] for event in stage.wait_for("still", name=name)] == [True]
    assert got(result) == "paid"
    assert [got(call) for call in calls] == ["paid"] * 3
    assert len(stage.events("begin", name=name)) == 1
    assert not stage.events("stands", about=f"books:{name}")
    assert_balanced(stage, name, done=True)


@ON_SERVER
def test_contenders_of_a_locked_row_give_up_soon(stage: Stage, name: str) -> None:
    gate = stage.gate()
    result = run(
        stage, name, [OPEN, WRITE, COMPLETE, ["note", "locked"], ["wait", str(gate)], COMMIT]
    )
    stage.wait_for("locked", name=name)
    time.sleep(TTL)
    began = time.monotonic()
    call = run(stage, name, BOOKED)
    stage.wait_for_log(call.id, "rescheduled in")
    took = time.monotonic() - began
    gate.touch()
    assert took < LOCK_TIMEOUT[stage.record_store] + 1.0
    assert got(result) == "paid"
    assert got(call) == "paid"
    print(f"rescheduled after {took:.2f} s")


@pytest.mark.nightly
@ON_SERVER
def test_a_long_rollback_leaves_no_second_invoice(stage: Stage, name: str) -> None:
    first = [
        OPEN,
        WRITE,
        COMPLETE,
        ["note", "locked"],
        ["sleep", 3 * TTL],
        ROLLBACK,
        ["sleep", 0.5],
        *BOOKED,
    ]
    result = run(stage, name, first, BOOKED, way="driver")
    stage.wait_for("locked", name=name)
    calls = contend(stage, name)
    assert len(stage.events("begin", name=name)) == 1
    answers = [got(call) for call in [result, *calls]]
    assert answers == ["paid"] * 4
    assert_balanced(stage, name, done=True)


@pytest.mark.parametrize("way", ["session", "connection"])
def test_a_guard_that_outlasts_the_lease_goes_on(stage: Stage, name: str, way: str) -> None:
    script = [
        OPEN,
        WRITE,
        GUARD,
        ["sleep", 3 * TTL],
        ["note", "still"],
        COMMIT,
        ["effect"],
        ["say", "paid"],
    ]
    assert answer(stage, name, script, way=way) == "paid"
    assert [event["held"] for event in stage.events("still", name=name)] == [True]
    assert len(stage.events("begin", name=name)) == 1
    assert_balanced(stage, name, done=True)


@ROW_IS_LEASE
def test_a_guard_whose_session_ended_renews_the_lease(stage: Stage, name: str) -> None:
    gone = [
        OPEN,
        WRITE,
        GUARD,
        ["sleep", 1.5 * TTL],
        ["end backend"],
        ["note", "gone"],
        ["sleep", 2 * TTL],
    ]
    result = run(
        stage, name, [*gone, ["note", "still"], ["try", *COMMIT], ROLLBACK, *BOOKED], BOOKED
    )
    stage.wait_for("gone", name=name)
    wait_until(lambda: stage.is_held("books", f"books:{name}"), TTL, "the row to be renewed")
    call = run(stage, name, BOOKED)
    assert got(result) == "paid"
    assert got(call) == "paid"
    assert [event["held"] for event in stage.events("still", name=name)] == [True]
    assert len(stage.events("begin", name=name)) == 1
    assert_balanced(stage, name, done=True)


@ROW_IS_LEASE
def test_a_guard_that_is_taken_over_while_its_process_is_frozen_raises_at_once(
    stage: Stage, name: str, request: pytest.FixtureRequest
) -> None:
    """The server has ended the idle transaction, and another attempt has done the work."""
    mariadb = stage.record_store == "mariadb"
    if mariadb and request.config.getoption("--leases-mysql"):
        pytest.skip("MySQL ends idle connections only, by wait_timeout")
    idle = ["sql", f"SET {'idle_transaction_timeout = 1' if mariadb else IDLE}"]
    frozen = [
        OPEN,
        WRITE,
        idle,
        GUARD,
        ["note", "locked"],
        ["sleep", 60],
        COMMIT,
        ["note", "committed"],
    ]
    result = run(stage, name, frozen, BOOKED)
    stage.wait_for("locked", name=name)
    (begun,) = stage.wait_for("begin", name=name)
    stage.worker.pause(pid=begun["pid"])
    try:
        assert answer(stage, name, BOOKED) == "paid"
    finally:
        stage.worker.resume(pid=begun["pid"])
    began = time.monotonic()
    stage.wait_for_log(result.id, "lease lost")
    took = time.monotonic() - began
    assert took < max(TTL / 3, 1.0) + 0.5
    assert got(result) == "paid"
    assert not stage.events("committed", name=name)
    assert_balanced(stage, name, done=True)
    print(f"told {took:.2f} s after SIGCONT")


@pytest.mark.only(database="sqlite")
def test_a_plain_begin_on_sqlite_names_begin_immediate(stage: Stage, name: str) -> None:
    gate = stage.gate()
    plain = [["read"], ["note", "read"], ["wait", str(gate)], ["try", *COMPLETE], ROLLBACK]
    ways = ("session plain", "driver plain")
    scripts = [[["open", way], *plain, *BOOKED] for way in ways]
    results = [run(stage, f"{name}-{number}", script) for number, script in enumerate(scripts)]
    for number in range(len(ways)):
        stage.wait_for("read", name=f"{name}-{number}")
    assert answer(stage, f"{name}-writer", BOOKED) == "paid"
    gate.touch()
    for number, result in enumerate(results):
        assert got(result) == "paid"
        (told,) = stage.events("raised", name=f"{name}-{number}")
        assert told["error"] == "WrongDatabase"
        assert "BEGIN IMMEDIATE" in told["text"]
        assert_balanced(stage, f"{name}-{number}", done=True)


# -- without a worker ------------------------------------------------------------------------------


def test_called_directly_both_do_nothing(stage: Stage, name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("JOURNAL", str(stage.journal))
    assert stage.tasks.books(name, "session", [OPEN, GUARD, WRITE, COMPLETE, COMMIT]) == "paid"
    assert (stage.find_row("books", f"books:{name}"), invoices(stage, name)) == (None, 1)


def test_an_eager_call_completes_at_its_return(stage: Stage, name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("JOURNAL", str(stage.journal))
    for _ in range(2):
        assert (
            stage.tasks.books.apply((name, "session", [OPEN, GUARD, WRITE, COMPLETE, COMMIT])).get()
            == "paid"
        )
    assert (stage.find_row("books", f"books:{name}"), invoices(stage, name)) == (None, 1)
