"""An operator who opens a cooldown group also ends the cooldowns of the keys that
failed because of it.
"""

from pathlib import Path

from celery_leases.ops.client import OperatorClient
from celery_leases.record import (
    Ended,
    Failure,
    Outcome,
    State,
)
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import claimed, make_call


def test_only_the_keys_of_the_opened_group_may_run_at_once(tmp_path: Path) -> None:
    """Keys of another group, or that cool down for another reason, keep waiting."""
    url = f"sqlite:///{tmp_path}/records.db"
    client, records = OperatorClient("database", url), SqlRecordStore(engine_for(url))
    records.check()
    for key, group in (("t:mail|1", "smtp"), ("t:mail|2", "sms"), ("t:mail|3", None)):
        record = claimed(records.claim(make_call(key, ttl=15.0), "database"))
        failure = Failure("Limited", "slow down", "rate-limited", "rate_limited", group)
        cooled = Outcome(
            State.COOLING, Ended.FAILED, 1, 0, 0, 3600.0, retry_after=600.0, failure=failure
        )
        assert records.settle(record, cooled)
    assert not client.open_group("smtp")
    waits = {status.key: status.retry_after is not None for status in client.page().statuses}
    assert waits == {"t:mail|1": False, "t:mail|2": True, "t:mail|3": True}
    client.close()
    records.database.close()
