"""The message for a person who waits: one line in every state, without text of an exception, and
its code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from celery_leases.decide.answers import Holder
from celery_leases.decide.endings import ExitCause
from celery_leases.errors import Cooldown, RetryLater
from celery_leases.failures.actions import Reason
from celery_leases.groups.group import ClosedGroup
from celery_leases.record import Ended, Failure, Record, State
from celery_leases.results import failure_of
from celery_leases.status import LeaseStatus, MessageCode, status_of

SECRET_TEXT = "Server error '500' for url 'http://127.0.0.1:18099/a'\nFor more information check http://127.0.0.1"
HOLDER = Holder("token", "call-1", "host/1", 15.0, 10.0)
ROW = Record(
    "t:shop.work|k", "shop.work", "k", State.PENDING, 1, 1, 1, 1, call_id="call-1", attempt=1
)


def situations() -> Iterator[tuple[Record | None, Holder | None]]:
    """Every state with and without an error, a wait, a holder, a resuming call, and an unknown
    outcome.
    """
    yield from ((None, None), (None, HOLDER))
    flags = [*product((False, True), repeat=3)]
    for state, wait, holder, (resumes, failed, unsure) in product(
        State, (None, 300_000_001), (None, HOLDER), flags
    ):
        failure = (
            Failure("httpx.HTTPError", SECRET_TEXT, "r", "error", ambiguous=unsure)
            if failed
            else None
        )
        ended = Ended.FAILED if failed else Ended.INTERRUPTED
        row = replace(
            ROW, state=state, retry_at=wait, resumes=resumes, failure=failure, ended=ended
        )
        yield row, holder
    revoked = replace(ROW, ended=Ended.TERMINATED, reason=ExitCause.REVOKED.value)
    yield from ((revoked, None), (replace(revoked, retry_at=300_000_001), None))
    yield replace(ROW, unreadable="progress"), None
    yield replace(ROW, state=State.PENDING, call_id="call-1", ended=None), None


def told(record: Record | None, holder: Holder | None = None) -> LeaseStatus:
    return status_of("k", "shop.work", record, holder, wall_time=1e9)


def test_in_every_state_the_message_is_one_line_without_the_exceptions_text() -> None:
    texts: dict[MessageCode, set[str]] = {}
    for record, holder in situations():
        status = told(record, holder)
        message = status.message()
        assert message.isprintable()
        assert "Server" not in message
        assert "http" not in message
        assert "attempt 0" not in message
        assert (status.as_json()["message"], status.as_json()["message_code"]) == (
            message,
            status.message_code,
        )
        texts.setdefault(status.message_code, set()).add(message)
    # A key is not replaced, only one of its calls.
    assert set(texts) == {*MessageCode} - {MessageCode.REPLACED}
    assert all(len(found) == 1 for found in texts.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": State.FAILED}, "Failed for good; it may have been executed"),
        ({"state": State.COOLING}, "It failed and may have been executed. Retry available now"),
        (
            {"retry_at": 300_000_001},
            "It failed and may have been executed. Retry available in 5 minutes",
        ),
        ({"resumes": True}, "It failed and may have been executed. It runs again any moment"),
        (
            {"resumes": True, "retry_at": 300_000_001},
            "It failed and may have been executed. It runs again in 5 minutes",
        ),
    ],
)
def test_a_call_that_may_have_been_executed_says_so(changes: dict[str, Any], message: str) -> None:
    failure = Failure("httpx.ReadTimeout", SECRET_TEXT, "r", "outcome_unknown", ambiguous=True)
    assert told(replace(ROW, failure=failure, ended=Ended.FAILED, **changes)).message() == message


def test_a_key_that_is_taken_and_not_yet_claimed_is_starting() -> None:
    assert told(None, HOLDER).message() == "Starting"


def test_a_forgotten_key_is_absent() -> None:
    empty = replace(ROW, attempt=0, call_id="", ended=None)
    status = told(empty)
    assert (status.state, status.message(), status.key) == ("absent", "Not started yet", "k")
    assert told(replace(empty, call_id="call-2", message="{}")).state == "pending"  # enqueued


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (Cooldown("1h", reason="draft not ready"), "draft not ready"),
        (Cooldown(reason="a: b"), "a: b"),
        (Cooldown(60), None),
        (RetryLater(1, "locked"), "locked"),
        (ValueError("a: b"), None),
    ],
)
def test_the_reason_a_body_gives_is_the_detail(error: Exception, detail: str | None) -> None:
    failure = replace(failure_of(error), reason=Reason.ASKED.value)
    status = told(replace(ROW, state=State.COOLING, failure=failure, ended=Ended.FAILED))
    assert (status.reason, status.detail) == ("asked", detail)


def test_a_key_without_a_record_at_a_closed_group_says_what_it_waits_for() -> None:
    closed_group = ClosedGroup("openai:x", 2, 60.0, "rate_limited", "rate-limited", "Too many.")
    shown = status_of("k", "shop.work", None, None, closed_group=closed_group, wall_time=0.0)
    assert (shown.state, shown.scope) == ("absent", "group")
    assert shown.what_next().startswith("Its group openai:x opens in 60 seconds")


def test_an_operator_reads_what_a_further_call_of_the_key_does() -> None:
    done, failed = replace(ROW, state=State.DONE), replace(ROW, state=State.FAILED)
    assert told(done).what_next().startswith("A further call gets the saved result")
    latest = [told(replace(row, arrived=1, finished_calls=("c",))) for row in (done, failed)]
    assert all(status.what_next().startswith("A newer call runs") for status in latest)
    assert told(replace(done, finished_calls=("c",))).what_next() == "The next call runs the body."
    running = told(replace(ROW, state=State.RUNNING, arrived=1), HOLDER)
    assert "the newest runs and answers the others" in replace(running, waiting=("a",)).what_next()


def test_no_message_has_the_words_of_an_operator() -> None:
    words = re.compile(r"process|broker|deliver|message|worker|record|lease|revoke", re.IGNORECASE)
    assert not [code for code in MessageCode if words.search(code.text)]
