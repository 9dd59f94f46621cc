"""``celery -A … leases …`` as an operator types it: what it prints, how it ends, and what it
changes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from celery_leases.record import Ended, State
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import make_call
from celery_leases.testing.contracts.record_case import outcome, won
from tests.support.commands import run_command

APP = "tests.apps.leased"
WORK, RERUN = f"{APP}.work", f"{APP}.rerun"


class Operator:
    """A terminal with an app whose leases and records are in one database."""

    def __init__(self, database_url: str) -> None:
        self.env = os.environ | {
            "LEASES_DATABASE_URL": database_url,
            "LEASES_URL": "database",
            "CELERY_BROKER_URL": "memory://",
        }
        self.records = SqlRecordStore(engine_for(database_url))

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "celery", "-A", "tests.apps.leased", "leases", *words]
        return run_command(command, env=self.env)

    def sees(self, *words: str) -> str:
        done = self.types(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def lists(self, *words: str) -> list[Any]:
        return [json.loads(line) for line in self.sees("list", *words, "--json").splitlines()]

    def runs(self, task: str, key: str) -> None:
        """Let a call of *task* hold *key*."""
        call = make_call(f"t:{task}|{key}", task=task, key=key, ttl=600.0)
        DatabaseLeaseStore(self.records).acquire(call)

    def finished(
        self, task: str, key: str, state: State = State.DONE, result: str = '{"sent": 1}'
    ) -> None:
        call = make_call(f"t:{task}|{key}", task=task, key=key)
        record = won(self.records, call, "database")
        assert self.records.settle(record, outcome(record, state, Ended.RETURNED, result=result))


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    someone = Operator(f"sqlite:///{tmp_path / 'records.db'}")
    someone.records.migrate()
    return someone


def test_a_running_key_is_shown_and_forgotten_only_by_force(operator: Operator) -> None:
    operator.runs(WORK, "invoice:1")
    shown = json.loads(operator.sees("show", "invoice:1", "--json"))
    assert (shown["state"], shown["task"], shown["attempt"]) == ("running", WORK, 1)
    assert shown["holder"]
    refused = operator.types("forget", "invoice:1")
    assert refused.returncode == 1
    assert "force" in refused.stderr
    before = operator.records.read(f"t:{WORK}|invoice:1")
    assert (
        json.loads(operator.sees("forget", "invoice:1", "--force", "--json"))["state"] == "absent"
    )
    after = operator.records.read(f"t:{WORK}|invoice:1")
    assert before is not None
    assert after is not None
    assert after.fence > before.fence


@pytest.mark.parametrize(
    "words",
    [("retry",), ("forget",), ("resolve", "--done"), ("resolve", "--retry"), ("release",)],
    ids=" ".join,
)
def test_an_operator_gives_the_retention(operator: Operator, words: tuple[str, ...]) -> None:
    if words[0] == "release":
        operator.runs(WORK, "invoice:1")
    else:
        operator.finished(WORK, "invoice:1", State.FAILED)
    operator.sees(words[0], "invoice:1", *words[1:], "--retention", "30d")
    record = operator.records.read(f"t:{WORK}|invoice:1")
    assert record is not None
    assert record.expires_at is not None
    assert (record.expires_at - record.now) / 1e6 == pytest.approx(30 * 86_400, abs=60)
    assert operator.types(words[0], "invoice:1", *words[1:], "--retention", "soon").returncode == 2


def test_a_released_key_is_free_and_keeps_its_history(operator: Operator) -> None:
    operator.runs(WORK, "invoice:2")
    done = operator.types("release", "invoice:2", "--json")
    assert json.loads(done.stdout)["state"] == "pending"
    assert "no message was published" in done.stderr
    record = operator.records.read(f"t:{WORK}|invoice:2")
    assert record is not None
    assert (record.state, record.attempt, record.lease_remaining) == (State.PENDING, 1, 0.0)


def test_forget_frees_a_failed_key_and_release_refers_to_it(operator: Operator) -> None:
    operator.finished(WORK, "invoice:3", State.FAILED)
    assert "leases retry" in operator.types("release", "invoice:3").stderr
    assert json.loads(operator.sees("forget", "invoice:3", "--json"))["state"] == "absent"


@pytest.mark.parametrize(
    "words",
    [("list",), ("show", "invoice:5"), ("retry", "invoice:5"), ("forget", "invoice:5")],
    ids=" ".join,
)
def test_an_unknown_task_is_no_empty_list(operator: Operator, words: tuple[str, ...]) -> None:
    operator.finished(WORK, "invoice:5")
    asked = operator.types(*words, "--task", "tests.apps.leased.wrok")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "its leased tasks are " in asked.stderr
    assert f" {APP}.auto," in asked.stderr
    operator.finished("renamed.since", "invoice:5")
    assert operator.types(*words, "--task", "renamed.since").returncode != 2


def test_a_number_that_json_does_not_know_is_printed_as_text(operator: Operator) -> None:
    operator.finished(
        WORK, "invoice:6", result='{"mean": NaN, "bounds": [-Infinity, Infinity, 1.5]}'
    )

    def strictly(text: str) -> Any:
        return json.loads(text, parse_constant=pytest.fail)

    for shown in map(
        strictly, (operator.sees("show", "invoice:6", "--json"), operator.sees("list", "--json"))
    ):
        assert shown["result"] == {"mean": "NaN", "bounds": ["-Infinity", "Infinity", 1.5]}


@pytest.mark.parametrize("verb", ["open", "close"])
def test_a_group_without_a_name_is_refused(operator: Operator, verb: str) -> None:
    asked = operator.types("group", verb, " ")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "is blank" in asked.stderr
    assert operator.sees("group", "list") == "all groups are open\n"


def test_a_shared_key_needs_no_task(operator: Operator) -> None:
    operator.finished("ours", "shared:1")
    operator.finished(WORK, "shared:1")
    assert "ours" in operator.sees("show", "/ours/shared:1")
    assert "forgotten" in operator.types("forget", "/ours/shared:1").stderr
    states = {record.stored_key: record.state for record in operator.records.named("shared:1")}
    assert states == {"t:ours|shared:1": State.PENDING, f"t:{WORK}|shared:1": State.DONE}


def test_an_unknown_key_is_absent(operator: Operator) -> None:
    asked = operator.types("show", "nothing", "--json")
    assert asked.returncode == 1
    assert json.loads(asked.stdout)["state"] == "absent"
    assert operator.types("release", "nothing").returncode == 1


def test_without_tables_the_command_to_run_is_named_and_runs(leases_postgres_url: str) -> None:
    operator = Operator(leases_postgres_url)
    asked = operator.types("list")
    assert asked.returncode == 1
    assert "leases migrate" in asked.stderr
    assert "CREATE TABLE" in operator.sees("migrate", "--sql")
    assert operator.types("list").returncode == 1
    assert "the tables were created in version 1: " in operator.sees("migrate")
    assert "the tables already have version 1: " in operator.sees("migrate")
    assert operator.sees("list").startswith("STATE")
    with operator.records.database.engine.connect() as connection:
        connection.execute(text("UPDATE celery_leases_version SET version = 3, made_by = '9.9'"))
    refused = operator.types("migrate")
    assert refused.returncode == 1
    assert "install celery_leases 9.9 or later" in refused.stderr


def test_an_unreachable_database_is_one_line(tmp_path: Path) -> None:
    operator = Operator("postgresql+psycopg://me:secret@127.0.0.1:1/x?connect_timeout=2")
    asked = operator.types("list")
    assert asked.returncode == 1
    assert "Traceback" not in asked.stderr
    assert "secret" not in asked.stderr


def test_a_terminal_obeys_nothing_that_a_key_holds(operator: Operator) -> None:
    key = "evil\x1b[2J\nline\u202e"
    operator.runs(WORK, key)
    for words in (("show", f"t:{WORK}|{key}"), ("list",)):
        seen = operator.sees(*words)
        assert r"evil\x1b[2J\nline\u202e" in seen
        assert all(line.isprintable() for line in seen.splitlines())
    refused = operator.types("forget", f"t:{WORK}|{key}").stderr
    assert "\x1b" not in refused
    (listed,) = operator.lists()
    assert (listed["key"], listed["message_code"]) == (key, "running")
