"""Records as rows of the table, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

import celery_leases
from celery_leases.decide.claim import claimed
from celery_leases.decide.repairs import settled
from celery_leases.errors import RecordUnreadable
from celery_leases.keys import call_key
from celery_leases.options import DATABASE, LeaseOptions
from celery_leases.record import (
    Attempt,
    Ended,
    Failure,
    Outcome,
    PastAttempt,
    Record,
    State,
)
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.rows import (
    COMPARED,
    DETAILS,
    WHEN_CLAIMED,
    WHEN_NEW,
    WHEN_SETTLED,
    column_values,
    details_of,
    insert_parameters,
    read_details,
    settle_parameters,
    success_parameters,
)
from celery_leases.stores.sql.schema import Tables
from tests.unit.decision_inputs import KEY, NOW, OURS, a_record
from tests.unit.test_claim_rules import a_claim

FULL: dict[str, Any] = {
    "lease_until": NOW + 1, "retry_at": NOW + 2, "result": "1", "reason": "r",
    "ended": Ended.FAILED, "failure": Failure("E", "no", rule="r", group="g", ambiguous=True),
    "previous": Attempt(Ended.CRASHED, Failure("F", ""), "host-b/18"), "crashed_at": NOW + 3,
    "crashed_call": "c", "other_crashes": {"d": 2}, "finished_at": NOW + 4, "expires_at": NOW + 5, "retention": 2.3,
    "quick_retries": 2, "cooldowns": 3, "failures": 4, "failed_at": NOW + 6, "resumes": True,
    "message": "{}", "publish_at": NOW + 7, "published_at": NOW + 8,
    "progress": '{"generation":0,"value":"1","positions":{}}',
    "finished_calls": ("a!b c", "!", "ü"), "finished_results": {"a!b c": "1", "!": None},
    "history": (PastAttempt(NOW, NOW + 5, Ended.FAILED, "host-b/18", "E: no", "r"),), "unrun": True,
    "traceback": "  File", "order": NOW, "arrived": NOW, "unordered": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "record", [a_record(State.PENDING), a_record(State.FAILED, lease_ttl=2.3, **FULL)]
)
def test_a_record_is_the_same_after_it_was_written_and_read(record: Record) -> None:
    row = column_values(record)
    read = rows.to_record({**row, "now": record.now})
    assert (read, repr(read)) == (record, repr(record))  # a flag is no integer
    assert type(row["resumes"]) is int
    assert set(row) == set(Tables().records.c.keys())


def test_a_running_row_has_its_expiry_for_a_success() -> None:
    record = a_record(State.RUNNING, retention=9.0)
    assert column_values(record)["expires_at"] == record.started_at + 9_000_000
    assert rows.to_record({**column_values(record), "now": NOW}) == record


def test_a_record_of_a_first_run_has_no_details() -> None:
    plain: dict[str, Any] = {"retention": 7 * 86_400.0, "fingerprint": None, "digests": None}
    assert column_values(a_record(State.DONE, **plain))["details"] is None


def test_a_fingerprint_is_not_stored_beside_the_digests() -> None:
    today = call_key("t", LeaseOptions(key="k"), signature(lambda *args: args), "c", (1, 2), {})
    record = a_record(
        State.DONE, retention=7 * 86_400.0, fingerprint=today.fingerprint, digests=today.digests
    )
    assert json.loads(details_of(record) or "") == {"args": today.digests}
    found, _ = read_details(details_of(record), None)
    assert (found["fingerprint"], found["digests"]) == (today.fingerprint, today.digests)


def test_the_full_record_differs_from_an_empty_one_in_each_field() -> None:
    """Or the test above would miss one."""
    empty, full = (
        a_record(State.PENDING),
        a_record(State.FAILED, lease_ttl=2.3, **FULL),
    )
    same = {
        field.name
        for field in fields(Record)
        if getattr(empty, field.name) == getattr(full, field.name)
    }
    given = {
        "stored_key", "task", "key", "fence", "owner", "call_id", "holder", "attempt", "generation",
        "crashes",
    }  # fmt: skip
    given |= {
        "retries", "lease_store", "created_at", "started_at", "now", "fingerprint", "digests",
        "unreadable",
    }  # fmt: skip
    assert same == given


@pytest.mark.parametrize("state", State)
def test_a_swap_writes_all_that_a_claim_changes(state: State) -> None:
    for row in (a_record(state, **FULL), a_record(state, OURS), a_record(state, expires_at=NOW)):
        call = a_claim(
            runs="each",
            message="m",
            retention=9.0,
            key=replace(KEY, fingerprint="f", digests={}),
        )
        before, after = column_values(row), column_values(claimed(row, call, DATABASE, NOW))
        changed = {name for name in before if before[name] != after[name]}
        assert changed <= set(WHEN_CLAIMED)
    assert set(COMPARED) <= set(before)


@pytest.mark.parametrize("failed", [True, False])
def test_an_outcome_writes_what_it_changes(failed: bool) -> None:
    row = a_record(State.RUNNING, failed_at=NOW - 5, finished_calls=("a",), lease_until=NOW + 1)
    given: dict[str, Any] = {
        "reason": "r", "result": "1", "failure": Failure("E", "no"), "finished": {"b": "2"},
    }  # fmt: skip
    given |= {
        "quick_retries": 2, "cooldowns": 3, "resumes": True, "progress": "{}", "crashed_call": "c",
        "other_crashes": {"d": 1}, "retries": 5,
    }  # fmt: skip
    outcome = Outcome(
        State.COOLING, Ended.FAILED, 2, 3, 4, 9.0, retry_after=1.0, failed=failed, **given
    )
    values = settle_parameters(row, outcome)
    assert (values["wait"], values["keep"], values["keep_at_least"]) == (10**6, 10**7, 9_900_000)
    assert type(values["new_resumes"]) is int
    assert json.loads(values["new_details"]).get("failed_at") == (failed or row.failed_at)
    written = {name: values[f"new_{name}"] for name in (*WHEN_SETTLED, DETAILS)} | {
        "progress": values["new_progress"]
    }
    moments: dict[str, Any] = {
        "retry_at": NOW + 1_000_000,
        "expires_at": NOW + 10_000_000,
        "finished_at": NOW,
    }
    moments |= {"lease_until": None}
    found = {**column_values(row), **written, **moments, "now": row.now}
    assert {**found, "progress": None} != {**column_values(row), "now": row.now}
    found |= {"progress": '{"generation":0,"positions":{}}'}
    expected = replace(settled(row, outcome, NOW), progress=found["progress"])
    assert rows.to_record(found) == expected


def test_an_outcome_without_texts_keeps_its_state_and_counts() -> None:
    failure = Failure("E" * 300, "no", rule="r", group="g", ambiguous=True)
    plain = Outcome(State.COOLING, Ended.FAILED, 2, 3, 4, 9.0, retry_after=1.0, failed=True)
    assert rows.without_texts(replace(plain, reason="r")) == plain
    full = replace(
        plain, result="1", failure=failure, reason="r", progress="{}", finished={"b": "2"}
    )
    assert rows.without_texts(full) == replace(
        plain,
        reason="result_refused",
        failure=replace(failure, type="E" * 255, message=rows.TEXT_REFUSED, group=None),
        finished={"b": None},
    )


def test_how_most_attempts_end_takes_no_room() -> None:
    row = a_record(State.RUNNING)
    done = Outcome(State.DONE, Ended.RETURNED, 1, 0, 0, 9.0, result="1")
    assert settle_parameters(row, done)["new_ended"] is None
    assert settle_parameters(row, replace(done, ended=Ended.IGNORED))["new_ended"] == "ignored"
    for ended in (Ended.RETURNED, Ended.RESOLVED):
        found = column_values(a_record(State.DONE, ended=ended))
        assert rows.to_record({**found, "now": NOW}).ended is ended


def test_the_details_stay_as_they_are_at_a_first_success() -> None:
    row = a_record(State.RUNNING)
    done = Outcome(State.DONE, Ended.RETURNED, 1, 0, 0, 9.0, result="1")
    assert "new_details" not in settle_parameters(row, done)
    forever = settle_parameters(row, replace(done, retention=None, reason="r" * 300))
    assert forever["new_reason"] == "r" * 255
    assert (forever["wait"], forever["keep"], forever["keep_at_least"]) == (None, None, None)
    for change in (
        {"failures": 1},
        {"retries": 1},
        {"failed": True},
        {"finished": {}},
        {"crashed_call": "c"},
    ):
        given: dict[str, Any] = change
        assert "new_details" in settle_parameters(row, replace(done, **given))


def test_the_parameters_of_an_insert_are_the_columns_of_the_new_row() -> None:
    for row in (
        a_record(State.RUNNING, retention=9.0, started_at=0),
        a_record(State.RUNNING, **FULL),
    ):
        columns = column_values(row)
        expected = {f"new_{name}": columns[name] for name in WHEN_NEW}
        assert insert_parameters(row) == expected
    assert rows.guard_parameters(a_record(State.RUNNING, lease_ttl=2.3))["ttl"] == 2_300_000


OTHER_OUTCOMES: dict[str, Any] = {
    "ended": Ended.IGNORED, "attempt": 7, "failures": 1, "crashes": 1, "retention": None,
    "retries": 1, "retry_after": 1.0, "reason": "r", "failure": Failure("E", "no"),
    "quick_retries": 1, "cooldowns": 1, "failed": True, "resumes": True, "progress": "{}",
    "finished": {"b": "2"}, "crashed_call": "c", "other_crashes": {"d": 1}, "unrun": True,
}  # fmt: skip
"""A value of each field that a first success does not have."""


def test_a_success_is_written_in_short_only_if_it_changes_nothing_else() -> None:
    row = a_record(State.RUNNING)
    done = Outcome(State.DONE, Ended.RETURNED, row.attempt, 0, row.crashes, 9.0, result="1")
    written_in_short = success_parameters(row, done) or {}
    assert (written_in_short["keep"], written_in_short["keep_at_least"]) == (9_000_000, 8_910_000)
    written = {"state", "result", "traceback", "closing"}
    assert {field.name for field in fields(Outcome)} == written | set(OTHER_OUTCOMES)
    for name, value in OTHER_OUTCOMES.items():
        assert not success_parameters(row, replace(done, **{name: value})), name
    other_rows: dict[str, Any] = {"resumes": True, "crashes": 3, "attempt": 2, "failures": 4}
    for name, value in other_rows.items():
        assert not success_parameters(replace(row, **{name: value}), done), name


NO_DETAILS: dict[str, Any] = {"fingerprint": None, "digests": None}
KNOWN = '{"generation":2,'


def derived(seed: int) -> dict[str, Any]:
    return {"generation": 2**30 + seed % 2**29, **NO_DETAILS}


UNREADABLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"fence": "x"}, {"fence": 0}),
    ({"lease_until": "x"}, {"lease_until": None}),
    ({"attempt": None}, {"attempt": 0}),
    ({"state": "x"}, {"state": State.UNCERTAIN}),
    ({"fence": "x", "state": "x"}, {"fence": 0, "state": State.UNCERTAIN}),
    ({"ended": "x"}, {}),
    *(({"progress": x}, {}) for x in ("{", "5", '{"value":"{"}', '{"positions":5}')),
    *(({"details": x}, derived(NOW - 9_000_000)) for x in ("{", "5", '{"generation":"x"}')),
    ({"details": "{", "fence": "x"}, {**derived(NOW), "fence": 0}),
    ({"details": '{"args":"x"}'}, {**NO_DETAILS, "generation": 0}),
    *(
        ({"details": f"{KNOWN}{x}}}"}, {**NO_DETAILS, "generation": 2})
        for x in ('"retries":"x"', '"args":{"a":1}', '"finished":"x"', '"finished":[1]')
    ),
]
"""Columns that a decision needs, with a value that cannot be read, and what operators see."""


@pytest.mark.parametrize(("changes", "seen"), UNREADABLE)
def test_what_a_decision_needs_and_cannot_read_is_an_error(
    changes: dict[str, Any], seen: dict[str, Any]
) -> None:
    """It counts as absent for operators, who see the first problem."""
    record = a_record(State.PENDING)
    found = {**column_values(record), **changes, "now": NOW}
    with pytest.raises(RecordUnreadable) as caught:
        rows.to_record(found)
    error = caught.value
    assert (error.key, error.executed) == (record.key, False)
    assert error.column in changes
    lenient = rows.to_record(found, lenient=True)
    assert f"column {error.column}" in (lenient.unreadable or "")
    assert replace(lenient, unreadable=None) == replace(record, **seen)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("error", value) for value in ("{", "5")),
        *(("details", f'{{"{name}":5}}') for name in ("before", "past", "trace", "unrun")),
    ],
)
def test_what_no_decision_needs_counts_as_empty(
    caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    record = a_record(State.PENDING, **NO_DETAILS)
    read = rows.to_record({**column_values(record), column: value, "now": NOW})
    assert read == record
    assert f"column {column}" in caplog.text


def test_fields_of_a_later_release_and_missing_ones_are_ignored() -> None:
    found, unreadable = read_details('{"later":1,"generation":2}', None)
    assert (found["generation"], unreadable) == (2, None)
    assert rows.failure_in('{"later":1}') == Failure("", "")


def test_the_group_of_an_unreadable_error_is_not_known() -> None:
    stored = rows.written(Failure("E", "no", group="g"))
    assert [rows.group_of(error) for error in (stored, None, "{")] == ["g", None, None]


def test_a_new_field_of_the_document_is_one_line(tmp_path: Path) -> None:
    """In a copy of the package: it is written, read, kept by a claim and an outcome, and emptied as
    the line says.
    """
    copy = tmp_path / "celery_leases"
    copytree(Path(celery_leases.__file__).parent, copy, ignore=ignore_patterns("__pycache__"))
    record = copy / "record.py"
    line = '    urgency: int = field(default=0, metadata=details("urgency", _FORGET))\n'
    text = record.read_text()
    record.write_text(text.replace("    unreadable:", f"{line}    unreadable:"))
    script = tmp_path / "use.py"
    script.write_text(NEW_FIELD)
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NEW_FIELD = """
from dataclasses import replace

from celery_leases.decide.claim import claimed
from celery_leases.decide.repairs import reset, settled
from celery_leases.record import Ended, Outcome, Record, State
from celery_leases.stores.sql.rows import column_values, to_record
from celery_leases.testing.contracts.calls import make_call

plain = Record("t:t|k", "t", "k", State.PENDING, 1, 1, 1, 1)
row = replace(plain, urgency=3)
assert column_values(plain)["details"] is None
assert to_record({**column_values(row), "now": 1}) == row
taken = claimed(row, make_call("t:t|k"), "database", 2)
done = settled(taken, Outcome(State.DONE, Ended.RETURNED, 1, 0, 0, 9.0), 3)
assert (taken.urgency, done.urgency, reset(done, keep=True).urgency) == (3, 3, 3)
assert reset(done, keep=False).urgency == 0
"""
