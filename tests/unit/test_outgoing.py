"""A kept message is published as its call stands now."""

import json
from dataclasses import replace

import pytest

from celery_leases.core.records import Record, State
from celery_leases.seam.outgoing import _as_it_stands

RECORD = Record("t:a|1", "a", "1", State.PENDING, 1, "", "call-1", "", 1, 0, 0, 0, 0, "", 15.0, 0, 0, 0)


@pytest.mark.parametrize(("call_id", "retries"), [("call-1", 2), ("call-2", 0)])
def test_a_call_that_celery_has_retried_is_published_with_its_retries(call_id: str, retries: int) -> None:
    """With fewer it would be dropped as a copy of the attempt before; another call's count is not its own."""
    kept = json.dumps({"task": "a", "options": {"task_id": "call-1", "retries": 0}})
    record = replace(RECORD, message=kept, call_id=call_id, retries=2)
    assert _as_it_stands(record)["options"]["retries"] == retries
