"""One mapping from statuses and errors to HTTP answers, compared with its table in the
documentation.
"""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases import CoolingDown, LeaseStatus, PermanentFailure, Uncertain, errors
from celery_leases.errors import LeaseMisuse, LeasesError, RecordUnreadable
from celery_leases.record import Attempt, Ended, Failure
from celery_leases.status import EffectStatus
from celery_leases.web.http import (
    HttpAnswer,
    IdempotencyKeyRefused,
    answer,
    idempotency_key,
    public,
)
from tests.unit.doc_pages import blocks, markdown_rows, page, section

SECRET = "s3cret-of-the-exception"
NOW = datetime(2026, 4, 1, 12, tzinfo=UTC)
EPOCH = NOW.timestamp()


def a_status(state: str, wait: float | None = None, scope: str | None = None) -> LeaseStatus:
    """A status with everything in it that a client must not see."""
    retry_at = NOW + timedelta(seconds=wait) if wait else None
    return LeaseStatus(
        "order:7",
        "shop.order",
        state,
        attempt=2,
        retry_at=retry_at,
        retry_after=wait,
        scope=scope or ("key" if wait else None),
        group=SECRET,
        reason="rate_limited",
        detail=SECRET,
        rule=SECRET,
        holder=SECRET,
        resumes=True,
        result={"paid": 3} if state == "done" else None,
        effects=(EffectStatus(SECRET, "sent", SECRET, SECRET, NOW, None),),
        error=Failure(SECRET, SECRET),
        previous=Attempt(Ended.FAILED, Failure(SECRET, SECRET), SECRET),
        call_id=SECRET,
    )


def statuses(state: str, told: str) -> LeaseStatus:
    """The status that a row of the table speaks of."""
    if "group is closed" in told:
        return a_status(state, 299.2, "group")
    return a_status(state, 299.2) if state == "cooling" else a_status(state)


RAISED: dict[str, LeasesError] = {
    "KeyReused": errors.KeyReused(SECRET, "order:7", ["amount"]),
    "CoolingDown of the key": CoolingDown(SECRET, "order:7", EPOCH + 299.2, 299.2, "rate_limited", "r", "key"),
    "CoolingDown of its group": CoolingDown(SECRET, "order:7", EPOCH + 299.2, 299.2, "rate_limited", "r", "group"),
    "CoolingDown of a full group": CoolingDown(SECRET, "order:7", EPOCH + 299.2, 299.2, "group_rate", None, "group"),
    "LeaseHeld": errors.LeaseHeld(SECRET, "order:7", 9.1, SECRET),
    "LeaseIsLive": errors.LeaseIsLive(SECRET, "order:7", 9.1),
    "AlreadyQueued": errors.AlreadyQueued(SECRET, "order:7", SECRET, "pending"),
    "AlreadyQueued of a key that is done": errors.AlreadyQueued(SECRET, "k", SECRET, "done"),
    "AlreadyQueued of a key that has failed": errors.AlreadyQueued(SECRET, "k", SECRET, "failed"),
    "AlreadyDone": errors.AlreadyDone(SECRET, "order:7", SECRET),
    "ResultMissing": errors.ResultMissing(SECRET, "order:7", SECRET),
    "PermanentFailure": PermanentFailure(SECRET, "r", SECRET),
    "Uncertain": Uncertain(SECRET, "order:7", SECRET, SECRET),
    "IdempotencyKeyRefused": IdempotencyKeyRefused("The request needs an Idempotency-Key header."),
    "KeyUnusable": errors.KeyUnusable(SECRET),
    "UnknownKey": errors.UnknownKey(SECRET, "order:7"),
    "StoreUnavailable": errors.StoreUnavailable(SECRET, False),
    "BrokerUnavailable": errors.BrokerUnavailable(SECRET, "order:7"),
    "RescheduleFailed": errors.RescheduleFailed(SECRET, "order:7", SECRET),
    "RecordUnreadable": RecordUnreadable(SECRET, False, "order:7", SECRET),
    "any other LeasesError": errors.LeaseConfigurationError(SECRET),
}  # fmt: skip
WAITS = {"": None, "2 s": "2", "5 s": "5", "what is left": "300", "what the lease has left": "10"}


def table() -> list[list[str]]:
    return markdown_rows(section(page("http"), "The answers"))[1:]


def answers_of(row: list[str]) -> list[HttpAnswer]:
    """What the code answers in the situations of a row."""
    asked, what = row[:2]
    location = "/orders/7"
    if asked == "either":
        names = re.findall(r"`(\w+)`", what)
        found = [
            RAISED[name]
            for name in (names if what[0] == "`" and what[-1] == "`" else [what.replace("`", "")])
        ]
        return [answer(error, location=location, now=EPOCH) for error in found]
    states = re.findall(r"\w+", what.partition(", and ")[0].replace(" or ", ", "))
    how: Any = {"asked": asked.partition(",")[0], "idempotent": "Idempotency-Key" in asked}
    return [answer(statuses(state, what), location=location, **how) for state in states]


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row[0]}: {row[1]}")
def test_every_row_of_the_table_is_what_the_code_answers(row: list[str]) -> None:
    answers = answers_of(row)
    assert answers
    for sent in answers:
        code, _, place = row[2].partition(", ")
        assert sent.status == int(code)
        assert sent.headers.get("Retry-After") == WAITS[row[3]]
        assert sent.headers.get("Location") == ("/orders/7" if place else None)
        assert sent.body.get("code") == (row[4].strip("`") or None)
        problem = sent.status >= 400
        assert sent.headers["Content-Type"] == (
            "application/problem+json" if problem else "application/json"
        )
        assert sent.accepted == (sent.status == 202)
        assert SECRET not in sent.content().decode() + str(sent.headers)
        assert sent.status != 425
        assert sent.headers["Cache-Control"] == "no-store"
        assert json.loads(sent.content()) == sent.body


def test_the_table_has_every_state_and_every_error() -> None:
    told = " ".join(row[1] for row in table())
    for state in (
        "absent",
        "pending",
        "running",
        "abandoned",
        "done",
        "cooling",
        "failed",
        "uncertain",
        "unreadable",
    ):
        for asked in ("status", "work"):
            assert any(row[0].startswith(asked) and state in row[1] for row in table()), (
                asked,
                state,
            )
    assert all(name.split()[0] in told for name in RAISED)


def test_a_problem_has_the_members_of_rfc_9457_and_the_time_of_the_next_try() -> None:
    sent = answer(a_status("cooling", 299.2), asked="work", location="/orders/7")
    assert sent.body == {
        "type": "about:blank", "title": "Too Many Requests", "status": 429,
        "detail": "Retry available in 5 minutes", "instance": "/orders/7", "code": "cooling_down",
        "state": "cooling", "retry_at": "2026-04-01T12:04:59.200000+00:00", "retry_after": 300,
        "reason": "rate_limited", "scope": "key",
    }  # fmt: skip
    told = answer(RAISED["CoolingDown of the key"], location="/orders/7").body
    assert told == sent.body


def test_the_fields_of_a_body_are_those_of_the_page() -> None:
    first = section(page("http"), "The bodies").strip().splitlines()[0].partition(": ")[2]
    assert set(re.findall(r"`(\w+)`", first)) == public(a_status("done")).keys()
    problem = section(page("http"), "The bodies")
    for name in answer(a_status("cooling", 5.0), asked="work", location="/x").body:
        assert f"`{name}`" in problem


def test_what_failed_for_its_caller_may_be_asked_for_again_under_the_same_idempotency_key() -> None:
    """Its call does not resume, so a conflict would never end."""
    told = replace(a_status("pending"), resumes=False)
    assert answer(told, asked="work", idempotent=True).accepted
    assert answer(replace(told, error=None), asked="work", idempotent=True).status == 409


def test_a_reason_that_is_no_code_is_not_sent() -> None:
    assert answer(replace(a_status("pending"), reason=SECRET)).body["reason"] is None


def test_the_wait_of_an_error_that_comes_late_is_what_is_left() -> None:
    error = RAISED["CoolingDown of the key"]
    assert answer(error, now=EPOCH + 240).headers["Retry-After"] == "60"
    assert answer(error, now=EPOCH + 9000).headers["Retry-After"] == "1"
    assert answer(CoolingDown("later"), now=EPOCH).headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("location", "sent"),
    [
        ("/leases/order:7?task=shop.order&x=%2F#a", "/leases/order:7?task=shop.order&x=%2F#a"),
        ("/leases/ü€ \r\nSet-Cookie: a", "/leases/%C3%BC%E2%82%AC%20%0D%0ASet-Cookie:%20a"),
        ("/leases/half \ud83d", "/leases/half%20?"),
    ],
)
def test_a_location_is_a_url_whatever_the_key_has_in_it(location: str, sent: str) -> None:
    accepted = answer(a_status("absent"), asked="work", location=location)
    assert accepted.headers["Location"] == sent
    refused = answer(a_status("failed"), asked="work", location=location)
    assert refused.body["instance"] == sent


def test_what_json_has_no_number_for_is_sent_as_text() -> None:
    sent = answer(replace(a_status("done"), result=float("nan"), progress={"ü": float("inf")}))
    assert json.loads(sent.content())["result"] == "NaN"
    assert json.loads(sent.content())["progress"] == {"ü": "Infinity"}


# -- Idempotency-Key -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ('"8e03978e-40d5"', "8e03978e-40d5"),
        ("  8e03978e-40d5 ", "8e03978e-40d5"),
        (r'"a \"b\" \\c"', r'a "b" \c'),
        ("a:b|c", "a:b|c"),
        ("x" * 255, "x" * 255),
    ],
)
def test_a_header_is_read_as_a_quoted_string_or_as_it_is(header: str, key: str) -> None:
    assert idempotency_key(header, 7) == f"7:{key}"


@pytest.mark.parametrize(
    "header",
    [
        None, "", "  ", '""', '" "', '"a', "a b", "a, b", "a,b", '"a", "b"', "ü", "a\nb", "x" * 256,
        r'"\a"',
    ],
)  # fmt: skip
def test_an_invalid_header_is_refused_with_a_line_for_the_client(header: str | None) -> None:
    with pytest.raises(IdempotencyKeyRefused) as refused:
        idempotency_key(header, 7)
    sent = answer(refused.value)
    assert (sent.status, sent.body["code"]) == (400, "idempotency_key_refused")
    assert "Idempotency-Key header" in sent.body["detail"]


@pytest.mark.parametrize("caller", [None, "", " "])
def test_a_caller_must_be_named(caller: object) -> None:
    """Else one client would get the result of another."""
    with pytest.raises(LeaseMisuse, match="the id of the user"):
        idempotency_key("k", caller)


VISIBLE = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters='",'), min_size=1
)


@given(st.tuples(st.text(min_size=1), VISIBLE), st.tuples(st.text(min_size=1), VISIBLE))
def test_two_callers_never_share_a_key(one: tuple[str, str], other: tuple[str, str]) -> None:
    keys = []
    for caller, header in (one, other):
        try:
            keys.append(idempotency_key(header, caller))
        except ValueError:
            return
        except IdempotencyKeyRefused:
            assert len(header) > 255
            return
    assert (keys[0] == keys[1]) == (one == other)


# -- examples --------------------------------------------------------------------------------------


def test_the_examples_of_the_page_run() -> None:
    names: dict[str, Any] = {}
    for source in blocks(page("http"), "python"):
        exec(source, names)  # noqa: S102 - our own page

    class Client:
        def status(self, key: str, *, task: str) -> LeaseStatus:
            return replace(a_status("done"), key=key, task=task)

    code, headers, body = names["order_state"](Client(), 7)
    assert (code, headers["Content-Type"], json.loads(body)["result"]) == (
        200,
        "application/json",
        {"paid": 3},
    )
