"""One mapping from statuses and errors to HTTP answers, compared with its table in the
documentation.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases import CoolingDown, LeaseStatus
from celery_leases.errors import LeaseMisuse
from celery_leases.web.http import (
    _ERRORS,
    HttpAnswer,
    IdempotencyKeyRefused,
    answer,
    idempotency_key,
)
from tests.unit.doc_pages import blocks, page
from tests.unit.http_cases import EPOCH, RAISED, SECRET, a_status, situations


@pytest.mark.parametrize("situation", [*situations()], ids=lambda one: f"{one[0]}: {one[1]}")
def test_no_answer_tells_what_is_for_operators(situation: tuple[str, str, HttpAnswer]) -> None:
    sent = situation[2]
    problem = sent.status >= 400
    kind = "application/problem+json" if problem else "application/json"
    assert sent.headers["Content-Type"] == kind
    assert sent.accepted == (sent.status == 202)
    assert SECRET not in sent.content().decode() + str(sent.headers)
    assert sent.status != 425
    assert sent.headers["Cache-Control"] == "no-store"
    assert json.loads(sent.content()) == sent.body


def test_every_error_with_an_answer_of_its_own_is_among_the_situations() -> None:
    told = " ".join(what for _, what, _ in situations())
    for kind in _ERRORS:
        assert f"`{kind.__name__}`" in told


def test_a_problem_has_the_members_of_rfc_9457_and_the_time_of_the_next_try() -> None:
    sent = answer(a_status("cooling", 299.2), asked="work", location="/orders/7")
    assert sent.body == {
        "type": "about:blank", "title": "Too Many Requests", "status": 429,
        "detail": "Retry available in 5 minutes", "instance": "/orders/7", "code": "cooling_down",
        "state": "cooling", "retry_at": "2026-04-01T12:04:59.200000+00:00", "retry_after": 300,
        "reason": "rate_limited", "scope": "key",
    }  # fmt: skip
    told = answer(RAISED["`CoolingDown` of the key"], location="/orders/7").body
    assert told == sent.body


def test_what_failed_for_its_caller_may_be_asked_for_again_under_the_same_idempotency_key() -> None:
    """Its call does not resume, so a conflict would never end."""
    told = replace(a_status("pending"), resumes=False)
    assert answer(told, asked="work", idempotent=True).accepted
    assert answer(replace(told, error=None), asked="work", idempotent=True).status == 409


def test_a_reason_that_is_no_code_is_not_sent() -> None:
    assert answer(replace(a_status("pending"), reason=SECRET)).body["reason"] is None


def test_the_wait_of_an_error_that_comes_late_is_what_is_left() -> None:
    error = RAISED["`CoolingDown` of the key"]
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
    for source in blocks(page("http-requests"), "python"):
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
