"""The statuses and errors that HTTP answers are made of, and the rows of the table of answers."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_leases import CoolingDown, LeaseStatus, PermanentFailure, Uncertain, errors
from celery_leases.errors import LeasesError, RecordUnreadable
from celery_leases.record import Attempt, Ended, Failure
from celery_leases.status import EffectStatus
from celery_leases.web.http import HttpAnswer, IdempotencyKeyRefused, answer

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


RAISED: dict[str, LeasesError] = {
    "`KeyReused`": errors.KeyReused(SECRET, "order:7", ["amount"]),
    "`CoolingDown` of the key": CoolingDown(SECRET, "order:7", EPOCH + 299.2, 299.2, "rate_limited", "r", "key"),
    "`CoolingDown` of its group": CoolingDown(SECRET, "order:7", EPOCH + 299.2, 299.2, "rate_limited", "r", "group"),
    "`CoolingDown` of a full group": CoolingDown(SECRET, "order:7", EPOCH + 299.2, 299.2, "group_rate", None, "group"),
    "`LeaseHeld`": errors.LeaseHeld(SECRET, "order:7", 9.1, SECRET),
    "`LeaseIsLive`": errors.LeaseIsLive(SECRET, "order:7", 9.1),
    "`AlreadyQueued`": errors.AlreadyQueued(SECRET, "order:7", SECRET, "pending"),
    "`AlreadyQueued` of a key that is done": errors.AlreadyQueued(SECRET, "k", SECRET, "done"),
    "`AlreadyQueued` of a key that has failed": errors.AlreadyQueued(SECRET, "k", SECRET, "failed"),
    "`AlreadyDone`": errors.AlreadyDone(SECRET, "order:7", SECRET),
    "`ResultMissing`": errors.ResultMissing(SECRET, "order:7", SECRET),
    "`PermanentFailure`": PermanentFailure(SECRET, "r", SECRET),
    "`Uncertain`": Uncertain(SECRET, "order:7", SECRET, SECRET),
    "`IdempotencyKeyRefused`": IdempotencyKeyRefused("The request needs an Idempotency-Key header."),
    "`KeyUnusable`": errors.KeyUnusable(SECRET),
    "`UnknownKey`": errors.UnknownKey(SECRET, "order:7"),
    "`StoreUnavailable`": errors.StoreUnavailable(SECRET, False),
    "`BrokerUnavailable`": errors.BrokerUnavailable(SECRET, "order:7"),
    "`RescheduleFailed`": errors.RescheduleFailed(SECRET, "order:7", SECRET),
    "`RecordUnreadable`": RecordUnreadable(SECRET, False, "order:7", SECRET),
    "any other `LeasesError`": errors.LeaseConfigurationError(SECRET),
}  # fmt: skip
STATES = (
    "absent", "pending", "running", "abandoned", "done", "cooling", "failed", "uncertain", "unreadable",
)  # fmt: skip
WITH_KEY = "work, with an `Idempotency-Key`"
WAITS = {None: "", "2": "2 s", "5": "5 s", "300": "what is left", "10": "what the lease has left"}


def situations() -> Iterator[tuple[str, str, HttpAnswer]]:
    """What is asked, the key or the error, and what the code answers."""
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("status", {"asked": "status"}),
        ("work", {"asked": "work"}),
        (WITH_KEY, {"asked": "work", "idempotent": True}),
    )
    for name, how in asked:
        for state in STATES:
            subject = a_status(state, 299.2 if state == "cooling" else None)
            yield name, state, answer(subject, location="/orders/7", **how)
    for state in ("absent", "pending", "cooling"):
        subject = a_status(state, 299.2, "group")
        sent = answer(subject, asked="work", location="/orders/7")
        yield "work", f"{state}, and its group is closed", sent
    for what, error in RAISED.items():
        yield "either", what, answer(error, location="/orders/7", now=EPOCH)


def answer_rows() -> list[tuple[str, str, str, str, str]]:
    """The rows of the table of answers: situations with the same answer share one."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    same = {}
    for asked, what, sent in situations():
        place = ", with `Location`" if "Location" in sent.headers else ""
        problem = f"`{sent.body['code']}`" if "code" in sent.body else ""
        told = f"{sent.status}{place}", WAITS[sent.headers.get("Retry-After")], problem
        if asked == "work":
            same[what] = told
        if asked != WITH_KEY or same[what] != told:  # else the row of "work" says it
            rows.setdefault((asked, *told), []).append(what)
    return [(asked, _joined(what), *told) for (asked, *told), what in rows.items()]  # type: ignore[misc]


def _joined(what: list[str]) -> str:
    closed = [one.partition(", and ")[0] for one in what if ", and " in one]
    if closed:
        return f"{', '.join(closed)}, and its group is closed"
    return ", ".join(what)
