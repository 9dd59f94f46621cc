"""A stored message is published with the current headers of its call."""

import json
from dataclasses import replace
from datetime import datetime

import pytest

from celery_leases.outbox.calls import _current_message, _has_expired
from celery_leases.record import Record, State

RECORD = Record(
    "t:a|1", "a", "1", State.PENDING, 1, "", "call-1", "", 1, 0, 0, 0, 0, "", 15.0, 0, 0, 0
)


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
