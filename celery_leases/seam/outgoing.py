"""Messages that must not be lost: enqueued in a transaction, relayed after a crash, rescued from the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

from celery import Celery
from celery.result import AsyncResult
from celery.utils.time import maybe_make_aware

from celery_leases.core.decisions import refused_for_good
from celery_leases.core.errors import KeyReused, LeaseConfigurationError, RecordUnreadable, StoreUnavailable
from celery_leases.core.keys import CallKey, call_key, differing
from celery_leases.core.records import Ended, Record, State
from celery_leases.core.results import kept_value, unreadable
from celery_leases.seam import apps
from celery_leases.seam.kept import NotKept, as_delivered, is_over, kept
from celery_leases.signals import logger

if TYPE_CHECKING:
    from celery_leases.stores.outbox import Outbox
    from celery_leases.stores.transactions import JoinedTransaction

T = TypeVar("T")
RELAY_AT_ONCE: Final = 100
LOOKED_AT_ONCE: Final = 100
OPTIONS_KEPT: Final = frozenset(
    {
        *("countdown", "eta", "expires", "queue", "exchange", "routing_key", "priority", "headers", "link"),
        *("link_error", "serializer", "compression", "time_limit", "soft_time_limit", "ignore_result", "shadow"),
    }
)
"""Options of ``apply_async`` that are kept with a call."""
RESCUE_AFTER: Final = 900.0
"""Seconds without a change after which a record's message is taken to be with nobody."""


@dataclass(frozen=True)
class Round:
    """What one round has done: the records whose message the broker has now, and those whose message it has not."""

    published: list[Record] = field(default_factory=list)
    refused: list[Record] = field(default_factory=list)


def enqueue(
    task: Any, given: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options_of_call: Mapping[str, Any]
) -> AsyncResult:
    """Write the call of *task* into the transaction *given*; see ``LeasedTask.apply_async_in``."""
    app, options, call_id = task.app, task.lease_options, str(uuid4())
    if options.rerun and options.key is not None:
        raise LeaseConfigurationError(
            f"task {task.name}: delay_in() needs a record of its own for each call, but under "
            'lease_on_done="rerun" all calls of a key share one; leave lease_key out, or publish after the commit'
        )
    parts = apps.parts_of(app)
    key = call_key(task.name, options, task.lease_signature, call_id, args, kwargs)
    message = _message(task, args, kwargs, call_id, options_of_call)
    from celery_leases.stores.transactions import JoinedTransaction

    outbox = _outbox(parts)
    transaction = JoinedTransaction(given, parts.records)
    transaction.join(key.key)
    transaction.know_layout(key.key)
    spans = {"ttl": options.ttl, "retention": options.retention}
    if not transaction.write(outbox.enqueuing(task.name, key, call_id, message, **spans), key.key):
        record = _found(transaction, key)
        if record.expired:
            writes = outbox.replacing(record, task.name, key, call_id, message, **spans)
        else:
            _check_content(record, key)
            writes = outbox.adding(record, message, call_id) if _is_with_nobody(record) else ()
        if not transaction.write(writes, key.key):
            return AsyncResult(_queued_call(transaction.read(key.stored, key.key, newest=True) or record), app=app)
    transaction.when_ended(lambda: _publish_own(app, key.stored))
    return AsyncResult(call_id, app=app)


def _outbox(parts: apps.AppParts) -> Outbox:
    from celery_leases.stores.outbox import Outbox

    return Outbox(parts.records)


def _message(
    task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call_id: str, options: Mapping[str, Any]
) -> str:
    """The message of a new call, as it is kept until it is published."""
    if unknown := options.keys() - OPTIONS_KEPT:
        raise LeaseConfigurationError(
            f"task {task.name}: apply_async_in() does not take {min(unknown)}=; a record keeps "
            + ", ".join(sorted(OPTIONS_KEPT))
        )
    serializer = options.get("serializer") or task.serializer or task.app.conf.task_serializer
    try:
        delivered = as_delivered(args, kwargs, serializer)
        return kept(
            task.signature(*delivered, task_id=call_id, **_times(task.app, {"expires": task.expires, **options}))
        )
    except NotKept as error:
        raise LeaseConfigurationError(f"task {task.name}: delay_in() does not take these arguments: {error}") from None


def _times(app: Celery, options: Mapping[str, Any]) -> dict[str, Any]:
    """*options* with their times counted from now: the call is published later, perhaps more than once."""
    times = {name: value for name, value in options.items() if name != "countdown" and value is not None}
    if options.get("countdown") is not None:
        times["eta"] = options["countdown"]
    for name in times.keys() & {"eta", "expires"}:
        if isinstance(times[name], Real):
            times[name] = datetime.now(UTC) + timedelta(seconds=float(times[name]))
        if isinstance(times[name], datetime):
            times[name] = maybe_make_aware(times[name], app.timezone).isoformat()
    return times


def relay(app: Celery, limit: int = RELAY_AT_ONCE) -> Round:
    """Publish enqueued messages that are due: those whose own process died after the commit.

    Raises :class:`~celery_leases.errors.StoreUnavailable`. A message the broker does not confirm is due again later.
    """
    parts = apps.parts_of(app)
    outbox, done = _outbox(parts), Round()
    for stored_key in outbox.due(limit):
        _publish_due(parts, outbox, stored_key, done)
    return done


def stranded(app: Celery, *, older: float = RESCUE_AFTER, limit: int = RELAY_AT_ONCE) -> list[Record]:
    """The records :func:`rescue` would publish a message of now."""
    parts = apps.parts_of(app)
    return _stranded(parts, _outbox(parts), older, limit)


def rescue(app: Celery, *, older: float = RESCUE_AFTER, limit: int = RELAY_AT_ONCE) -> Round:
    """Publish the kept messages of records that are with nobody.

    That is: unmoved for *older* seconds and running without a live lease, pending, or cooling that is over and was to
    run by itself; and whatever is due, as :func:`relay` does. Only tasks with ``lease_store_arguments``, and enqueued
    calls, keep their message. A copy too many does no harm, but none is published for *older* seconds after the last
    one. Raises :class:`~celery_leases.errors.StoreUnavailable`. A message the broker does not confirm is due again
    later.
    """
    parts = apps.parts_of(app)
    outbox, done = _outbox(parts), Round()
    for record in _stranded(parts, outbox, older, limit):
        if _unless_locked(lambda: outbox.publish_again(record)):  # noqa: B023 - called at once
            _publish_due(parts, outbox, record.stored_key, done)
    return done


def _publish_due(parts: apps.AppParts, outbox: Outbox, stored_key: str, done: Round) -> None:
    """Publish the message of one key, unless somebody else has taken it; one that has expired is dropped."""
    record = _unless_locked(lambda: outbox.take_due(stored_key))
    if record is None:
        return
    try:
        if _has_expired(record):
            logger.info("%s is not published, as its message has expired", record.key)
            outbox.drop(record)
        else:
            (done.published if _publish(parts, outbox, record) else done.refused).append(record)
    except RecordUnreadable as error:
        logger.error("not published: %s", error)
        done.refused.append(record)


def _stranded(parts: apps.AppParts, outbox: Outbox, older: float, limit: int) -> list[Record]:
    """The oldest records that are with nobody; any number of live ones may stand before them."""
    found: list[Record] = []
    last: Record | None = None
    while len(found) < limit:
        page = outbox.stranded(older, LOOKED_AT_ONCE, last)
        found += [record for record in page if _can_be_published(record) and not _is_live(parts, record)]
        if len(page) < LOOKED_AT_ONCE:
            break
        last = page[-1]
    return found[:limit]


def _can_be_published(record: Record) -> bool:
    try:
        return not _has_expired(record)
    except RecordUnreadable as error:
        logger.error("not published: %s", error)
        return False


def _is_live(parts: apps.AppParts, record: Record) -> bool:
    return record.state is State.RUNNING and parts.parts.leases.holder(record.stored_key) is not None


def _unless_locked(step: Callable[[], T]) -> T | None:
    """What *step* gives; ``None`` where a transaction has the row locked, with which its message is in good hands."""
    try:
        return step()
    except StoreUnavailable as error:
        if error.executed is not False:
            raise
        logger.info("a record is locked, the next round looks again: %s", error)
        return None


def _is_with_nobody(record: Record) -> bool:
    """Whether the call of a record does not come back by itself: its caller, or an operator, was told so."""
    expired = _has_expired(record)
    if record.publish_at is not None and not expired:
        return False
    told = record.state in (State.PENDING, State.COOLING) and record.ended is Ended.FAILED and not record.resumes
    forgotten = not record.call_id and record.message is None
    return told or (record.state is State.PENDING and (record.ended is Ended.RELEASED or forgotten or expired))


def _has_expired(record: Record) -> bool:
    """Whether a worker would discard the kept message; a call that has begun does not expire."""
    options = _message_of(record).get("options", {})
    over = is_over(options.get("expires"), datetime.fromtimestamp(record.now / 1e6, UTC))
    return over and not _has_begun(record, options)


def _message_of(record: Record) -> dict[str, Any]:
    """The kept message; raises :class:`RecordUnreadable` for one that was changed by hand."""
    found = kept_value(record.message, record.key, "message", record.task)
    if not isinstance(found, dict | None) or not isinstance((found or {}).get("options", {}), dict):
        wrong = TypeError("not a message")
        text = unreadable(record.key, record.task, "message", record.message, wrong)
        raise RecordUnreadable(text, False, record.key, "message")
    return found or {}


def _has_begun(record: Record, options: Mapping[str, Any]) -> bool:
    return record.attempt > 0 and options.get("task_id") == record.call_id.partition("~")[0]


def _queued_call(record: Record) -> str:
    """The call a record belongs to; where another one's message is still to be published, that one."""
    kept = _message_of(record) if record.publish_at is not None else {}
    return str(kept.get("options", {}).get("task_id") or record.call_id)


def _found(transaction: JoinedTransaction, key: CallKey) -> Record:
    """The record that stands in the way of a new one."""
    record = transaction.read(key.stored, key.key, newest=True)
    if record is None:
        raise StoreUnavailable(f"{key.key}: another transaction is enqueuing it at this moment; try again", False)
    return record


def _check_content(record: Record, key: CallKey) -> None:
    """Raise what a delivery of the call would: the record has failed, or stands for other arguments."""
    if record.state in (State.FAILED, State.UNCERTAIN):
        raise refused_for_good(record)
    told = record.ended is Ended.FAILED and not record.resumes
    if not told and None not in (key.fingerprint, record.fingerprint) and key.fingerprint != record.fingerprint:
        names = differing(key.digests, record.digests)
        listed = ", ".join(names) or "their fingerprint"
        message = f"{key.key} stands for a call with other arguments; they differ in {listed}"
        raise KeyReused(message, key.key, names)


def _publish_own(app: Celery, stored_key: str) -> None:
    """After the transaction: publish what it committed; the next relay or rescue does what goes wrong here."""
    parts = apps.parts_of(app)
    outbox = _outbox(parts)
    try:
        record = outbox.take(stored_key)
        if record is not None:
            _publish(parts, outbox, record)
    except Exception as error:  # noqa: BLE001 - the user's commit has succeeded, and must not seem to have failed
        logger.warning(
            "%s is enqueued, but could not be published; the next relay or rescue will: %s", stored_key, error
        )


def _as_it_stands(record: Record) -> dict[str, Any]:
    """The kept message; with as many retries as Celery has given the call since, or it would be taken for a copy.

    A call that has begun does not expire any more.
    """
    message = _message_of(record)
    options = message.setdefault("options", {})
    if options.get("task_id") == record.call_id and record.retries:
        options["retries"] = record.retries
    if _has_begun(record, options):
        options["expires"] = None
    return message


def _publish(parts: apps.AppParts, outbox: Outbox, record: Record) -> bool:
    try:
        parts.copies.publish(_as_it_stands(record))
    except Exception as error:  # noqa: BLE001 - whatever the broker said, the message stays where it is
        logger.warning("%s could not be published, the next relay or rescue tries again: %s", record.key, error)
        return False
    with suppress(StoreUnavailable):  # then it is published once more, which does no harm
        outbox.published(record)
    return True
