"""A stored call is restored exactly as it would have been delivered, or it is not stored."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, chord, signature

from celery_leases.outbox.calls import _current_message, _has_expired
from celery_leases.record import Record, State
from celery_leases.results import decode
from celery_leases.worker.stored_messages import NotStorable, as_delivered, stored_form

APP = Celery("kept", set_as_current=False)


class Size(StrEnum):
    """Equal to its text, and of another type."""

    LARGE = "large"


@pytest.mark.parametrize(
    "value",
    [
        None, 1, 1.5, True, "ä", [1, [2]], {"a": {"b": [None]}}, b"x", Decimal("1.50"),
        dict.fromkeys(("task", "args", "kwargs", "options")), UUID(int=7),
        datetime(2026, 4, 1, tzinfo=UTC),
    ],
    ids=repr,
)  # fmt: skip
def test_arguments_that_json_restores_are_stored(value: Any) -> None:
    text = stored_form(signature("t", (value,), {"k": value}, app=APP))
    assert (decode(text)["args"], decode(text)["kwargs"]) == ([value], {"k": value})


@pytest.mark.parametrize(
    "value", [(1, 2), [(1,)], {1: 2}, {"a": {True: 0}}, Size.LARGE, [{"a": Size.LARGE}]], ids=repr
)
def test_arguments_that_json_would_change_are_not_stored(value: Any) -> None:
    following = signature("t", (value,), app=APP)
    calls = [
        following,
        signature("t", (), {"k": value}, app=APP),
        signature("t", link=[following], app=APP),
    ]
    for call in calls:
        with pytest.raises(NotStorable, match="would change"):
            stored_form(call)


def test_arguments_of_types_without_json_are_not_stored() -> None:
    with pytest.raises(NotStorable, match="no JSON form"):
        stored_form(signature("t", (object(),), app=APP))


def test_a_canvas_is_stored_unchanged() -> None:
    whole = chord([signature("t", (1,), app=APP)], signature("t", (2,), app=APP), app=APP)
    call = signature("t", (whole,), {"then": whole}, link=[whole], chain=[whole], app=APP)
    assert decode(stored_form(call))["args"][0]["task"] == "celery.chord"


@pytest.mark.parametrize(
    ("serializer", "delivered"),
    [("json", [[1, 2], {"1": Decimal(2)}]), ("pickle", [(1, 2), {1: Decimal(2)}])],
)
def test_arguments_are_delivered_as_their_serializer_gives_them_back(serializer, delivered) -> None:
    """JSON has no tuples; pickle has, and is read though none from others would be."""
    assert as_delivered([(1, 2), {1: Decimal(2)}], {}, serializer) == (delivered, {})


@pytest.mark.parametrize(
    ("serializer", "value"), [("json", object()), ("pickle", lambda: 1), ("unheard-of", 1)]
)
def test_a_call_that_cannot_be_published_raises(serializer: str, value: Any) -> None:
    with pytest.raises(
        NotStorable, match=f"cannot be published with the serializer '{serializer}'"
    ):
        as_delivered([value], {}, serializer)


RECORD = Record("t:a|1", "a", "1", State.PENDING, 1, 0, 0, 0, call_id="call-1", attempt=1)


@pytest.mark.parametrize(("call_id", "retries"), [("call-1", 2), ("call-2", 0)])
def test_a_call_that_celery_has_retried_is_published_with_its_retries(call_id, retries) -> None:
    """With fewer it would be dropped as a copy of the attempt before; another call's count is not
    its own.
    """
    kept = json.dumps({"task": "a", "options": {"task_id": "call-1", "retries": 0}})
    record = replace(RECORD, message=kept, call_id=call_id, retries=2)
    assert _current_message(record)["options"]["retries"] == retries


@pytest.mark.parametrize(
    ("attempt", "call_id", "begun"),
    [
        (0, "call-1", False),
        (1, "call-1", True),
        (1, "call-1~replaced~1", True),
        (1, "call-2", False),
    ],
)
def test_a_stored_call_expires_until_it_has_begun(attempt: int, call_id: str, begun: bool) -> None:
    end = "2026-04-01T12:00:00+00:00"
    kept = json.dumps({"task": "a", "options": {"task_id": "call-1", "expires": end}})
    now = int(datetime.fromisoformat(end).timestamp() * 1e6)
    record = replace(RECORD, message=kept, call_id=call_id, attempt=attempt, now=now)
    assert (_has_expired(record), _has_expired(replace(record, now=now - 1))) == (not begun, False)
    assert _current_message(record)["options"]["expires"] == (None if begun else end)
