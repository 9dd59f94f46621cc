"""Messages that must not be lost: enqueued in a transaction, relayed after a crash, rescued from
the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import uuid4

from celery import Celery, Signature
from celery.result import AsyncResult
from celery.utils.time import maybe_make_aware

from celery_leases.common.texts import printable
from celery_leases.errors import (
    AlreadyQueued,
    KeyReused,
    LeaseConfigurationError,
    RecordUnreadable,
    StoreUnavailable,
)
from celery_leases.protocol.decisions import permanent_failure
from celery_leases.protocol.keys import CallKey, call_key, differing
from celery_leases.protocol.records import Ended, Record, State
from celery_leases.protocol.results import decode_stored, unreadable
from celery_leases.protocol.settlement import call_has_ended
from celery_leases.signals import logger
from celery_leases.worker import app_components
from celery_leases.worker.headers import HEADER, celery_id_of
from celery_leases.worker.stored_messages import NotKept, as_delivered, is_over, kept

if TYPE_CHECKING:
    from celery_leases.stores.sql.outbox import Outbox
    from celery_leases.stores.sql.records import SqlRecordStore
    from celery_leases.stores.sql.upserts import Writes

T = TypeVar("T")
RELAY_AT_ONCE: Final = 100
LOOKED_AT_ONCE: Final = 100
OPTIONS_KEPT: Final = frozenset(
    {
        *(
            "countdown",
            "eta",
            "expires",
            "queue",
            "exchange",
            "routing_key",
            "priority",
            "headers",
            "link",
        ),
        *(
            "link_error",
            "serializer",
            "compression",
            "time_limit",
            "soft_time_limit",
            "ignore_result",
            "shadow",
        ),
    }
)
"""Options of ``apply_async`` that are kept with a call."""
RESCUE_AFTER: Final = 900.0
"""Seconds without a change after which a record's message counts as lost."""


@dataclass(frozen=True)
class Round:
    """What one round has done: the records whose message the broker has now, and those whose
    message it has not.
    """

    published: list[Record] = field(default_factory=list)
    refused: list[Record] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether it has published anything: there may be more where a round has taken as many as
        it may.
        """
        return bool(self.published)


def enqueue(
    task: Any,
    given: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options_of_call: Mapping[str, Any],
) -> AsyncResult:
    """Write the call of *task* into the transaction *given*; see ``LeasedTask.apply_async_in``."""
    app, options, call_id = task.app, task.lease_options, str(uuid4())
    if options.rerun and options.key is not None:
        raise LeaseConfigurationError(
            f"task {task.name}: delay_in() needs a record of its own for each call, but under "
            'lease_on_done="rerun" all calls of a key share one; leave lease_key out, or publish after the commit'
        )
    parts = app_components.parts_of(app)
    key = call_key(task.name, options, task.lease_signature, call_id, args, kwargs)
    call = _NewCall(task, key, call_id, _message(task, args, kwargs, call_id, options_of_call))
    if parts.in_memory:
        return _enqueue_in_memory(parts, given, call)
    from celery_leases.stores.sql.transactions import JoinedTransaction

    transaction = JoinedTransaction(given, parts.records)
    transaction.join(key.key)
    transaction.load_layout(key.key)
    other = _written(_outbox(parts), transaction, call)
    if other is None:
        # Through Django's own connection it works where only that one sees the row: in a test's
        # transaction.
        place = transaction if transaction.is_of_django else None
        transaction.call_when_ended(lambda: _publish_own(app, key.stored, place))
    return AsyncResult(other or call_id, app=app)


@dataclass(frozen=True)
class _NewCall:
    """A call of *task* that is to be published, with its message as it is kept."""

    task: Any
    key: CallKey
    call_id: str
    message: str


class _Place(Protocol):
    """Where a record is written: a transaction of the user's, or the database, statement by
    statement.
    """

    def write(self, writes: Writes, key: str) -> bool:
        """Execute *writes* in turn until one touches a row; whether one did."""
        ...

    def read(self, stored_key: str, key: str, *, newest: bool = False) -> Record | None:
        """The row of a key."""
        ...


@dataclass(frozen=True)
class _Statements:
    """A place where each statement commits by itself."""

    records: SqlRecordStore

    def write(self, writes: Writes, key: str) -> bool:
        return self.records.database.touch(writes, {})

    def read(self, stored_key: str, key: str, *, newest: bool = False) -> Record | None:
        return self.records.read(stored_key)


def _written(outbox: Outbox, place: _Place, call: _NewCall) -> str | None:
    """Write the record of *call* with its message to *place*; the other call that the key belongs
    to, if there is one.

    Raises what a delivery of the call would, where the record has failed or stands for other
    arguments.
    """
    key, options = call.key, call.task.lease_options
    named = (call.task.name, key, call.call_id, call.message)
    if place.write(
        outbox.enqueue_writes(*named, ttl=options.ttl, retention=options.retention), key.key
    ):
        return None
    record = _found(place, key)
    if record.expired:
        writes = outbox.replace_writes(record, *named, ttl=options.ttl, retention=options.retention)
    else:
        _check_content(record, key)
        writes = (
            outbox.add_writes(record, call.message, call.call_id) if _is_with_nobody(record) else ()
        )
    if place.write(writes, key.key):
        return None
    return _queued_call(place.read(key.stored, key.key, newest=True) or record)


def _enqueue_in_memory(parts: app_components.AppParts, given: Any, call: _NewCall) -> AsyncResult:
    """The same for an eager call whose records are in memory: all is written, and run, after the
    commit of *given*.
    """
    from celery_leases.stores.sql.eager_after_commit import do_after_commit, waiting_in

    app, key = parts.app, call.key
    record = parts.records.read(key.stored)
    if record is not None and not record.expired:
        _check_content(record, key)
        if not _is_with_nobody(record):
            return AsyncResult(_queued_call(record), app=app)
    for other in waiting_in(given):
        if other.key.stored == key.stored:
            _check_same(other.key.fingerprint, other.key.digests, key)
            return AsyncResult(other.call_id, app=app)

    def committed(over: bool) -> None:
        outbox = _outbox(parts)
        if _written(outbox, _Statements(parts.records), call) is None:
            if over:
                _publish_own(app, key.stored)
            elif (queued := parts.records.read(key.stored)) is not None:
                outbox.publish_again(queued)  # the relay finds it at once

    do_after_commit(given, key, call.call_id, committed)
    return AsyncResult(call.call_id, app=app)


def is_wanted(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of *task* with these arguments must be published for its work to be done.

    ``False``: it is done, or a worker or a message has it. Raises what a delivery of the call
    would: :class:`KeyReused`, :class:`PermanentFailure`, :class:`KeyUnusable`, and
    :class:`StoreUnavailable`.
    """
    options = task.lease_options
    key = call_key(task.name, options, task.lease_signature, "", args, kwargs)
    records = app_components.parts_of(task.app).records
    records.check()
    record = records.read(key.stored)
    if record is None or record.expired or record.forgotten:
        return True
    _check_content(record, key)
    return options.rerun or _is_with_nobody(record)


_ORDER: Final = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")
"""The positional parameters of Celery's ``apply_async``."""
_CANVAS: Final = frozenset(
    {
        *("chain", "chord", "group_id", "link", "link_error", "replaced_task_nesting"),
        # Steps of a chain and bodies of chords are frozen; links are called with their parent. A
        # plain call in a body has none of these: Celery adds them after this.
        *("reply_to", "parent_id", "root_id"),
    }
)
"""Options of a call that others wait for: it is published whatever its record says."""
_publishing_stored: ContextVar[tuple[object, object] | None] = ContextVar(
    "celery_leases_as_it_is", default=None
)
"""Task and id of the message that is being published and that a record keeps. An eager body runs
inside of that, and its own calls are others.
"""


def publish_once(
    task: Any,
    publish: Callable[..., AsyncResult],
    positional: Sequence[Any],
    named: Mapping[str, Any],
) -> AsyncResult:
    """Publish a call of *task* by *publish*, Celery's own, if no other call of its key is queued or
    runs; see ``lease_queue_once``.

    Retries, calls that others wait for, and messages that a record stores are published in any
    case.
    """
    given = dict(zip(_ORDER, positional, strict=False)) | dict(named)
    carries = any(given.get(name) for name in _CANVAS) or HEADER in (given.get("headers") or {})
    stored = _publishing_stored.get() == (task.name, given.get("task_id"))
    if stored or given.get("retries") or carries:
        return publish(*positional, **named)
    app, options = task.app, task.lease_options
    args, kwargs = tuple(given.pop("args", None) or ()), dict(given.pop("kwargs", None) or {})
    if check := getattr(task, "__header__", None):
        check(*args, **kwargs)  # as apply_async does
    call_id = given.pop("task_id", None) or str(uuid4())
    parts = app_components.parts_of(app)
    parts.check_once()
    key = call_key(task.name, options, task.lease_signature, call_id, args, kwargs)
    keeps = {name: value for name, value in given.items() if name in OPTIONS_KEPT}
    outbox = _outbox(parts)
    message = _message(task, args, kwargs, call_id, keeps, "lease_queue_once")
    other = _queue(outbox, parts.records, _NewCall(task, key, call_id, message))
    if other is not None:
        return _not_published(task, publish, other, args, kwargs)
    if app.conf.task_always_eager:
        outbox.sent(key.stored, call_id)  # nothing brings an eager call back
    try:
        result = publish(args, kwargs, task_id=call_id, **given)
    except BaseException:
        with suppress(StoreUnavailable):  # then the relay publishes it, as after a crash
            outbox.withdraw(key.stored, call_id, options.retention)
        raise
    with suppress(StoreUnavailable):  # then it is published once more, which does no harm
        outbox.sent(key.stored, call_id)
    return result


def _not_published(
    task: Any,
    publish: Callable[..., AsyncResult],
    other: Record,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> AsyncResult:
    """What a caller gets whose call is not published."""
    call_id = _queued_call(other)
    if task.lease_options.on_queued == "raise":
        where = f"{printable(other.key)} is {other.state.value}, and belongs to call {call_id}"
        message = f"{where}; nothing was published"
        raise AlreadyQueued(message, other.key, call_id, other.state.value)
    if task.app.conf.task_always_eager and other.state is not State.RUNNING:
        return publish(args, kwargs)  # answered now: no backend has the result of an eager call
    return AsyncResult(celery_id_of(call_id), app=task.app)


def _queue(outbox: Outbox, records: SqlRecordStore, call: _NewCall) -> Record | None:
    """Write the record of *call*, in one statement where the key has none; the record in its way,
    if there is one.
    """
    key, options, place = call.key, call.task.lease_options, _Statements(records)
    ttl, retention = options.ttl, options.retention
    named = (call.task.name, key, call.call_id, call.message)
    if place.write(outbox.enqueue_writes(*named, ttl=ttl, retention=retention), key.key):
        return None
    record = _found(place, key)
    new_generation = options.rerun and record.state in (State.DONE, State.FAILED)
    if record.expired:
        writes = outbox.replace_writes(record, *named, ttl=ttl, retention=retention)
    elif new_generation or (_is_with_nobody(record) and not record.waits):
        new_generation = options.rerun
        writes = outbox.reassign_writes(
            record, *named, new_generation=new_generation, ttl=ttl, retention=retention
        )
    else:
        if not record.failure_delivered and record.state not in (State.FAILED, State.UNCERTAIN):
            _check_same(record.fingerprint, record.digests, key)
        return record
    return None if place.write(writes, key.key) else (place.read(key.stored, key.key) or record)


def _outbox(parts: app_components.AppParts) -> Outbox:
    from celery_leases.stores.sql.outbox import Outbox

    return Outbox(parts.records)


def _message(
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call_id: str,
    options: Mapping[str, Any],
    what: str = "delay_in()",
) -> str:
    """The message of a new call, as it is kept until it is published; *what* keeps it."""
    if unknown := options.keys() - OPTIONS_KEPT:
        raise LeaseConfigurationError(
            f"task {task.name}: apply_async_in() does not take {min(unknown)}=; a record keeps "
            + ", ".join(sorted(OPTIONS_KEPT))
        )
    serializer = options.get("serializer") or task.serializer or task.app.conf.task_serializer
    try:
        delivered = as_delivered(args, kwargs, serializer)
        return kept(
            task.signature(
                *delivered,
                task_id=call_id,
                **_times(task.app, {"expires": task.expires, **options}),
            )
        )
    except NotKept as error:
        raise LeaseConfigurationError(
            f"task {task.name}: {what} does not take these arguments: {error}"
        ) from None


def _times(app: Celery, options: Mapping[str, Any]) -> dict[str, Any]:
    """*options* with their times counted from now: the call is published later, perhaps more than
    once.
    """
    times = {
        name: value for name, value in options.items() if name != "countdown" and value is not None
    }
    if options.get("countdown") is not None:
        times["eta"] = options["countdown"]
    for name in times.keys() & {"eta", "expires"}:
        if isinstance(times[name], Real):
            now = datetime.fromtimestamp(app_components.parts_of(app).context.wall_time(), UTC)
            times[name] = now + timedelta(seconds=float(times[name]))
        if isinstance(times[name], datetime):
            times[name] = maybe_make_aware(times[name], app.timezone).isoformat()
    return times


def relay(app: Celery, limit: int = RELAY_AT_ONCE) -> Round:
    """Publish enqueued messages that are due: those whose own process died after the commit.

    Raises :class:`~celery_leases.errors.StoreUnavailable`. A message the broker does not confirm is
    due again later.
    """
    parts = app_components.parts_of(app)
    outbox, done = _outbox(parts), Round()
    for stored_key in outbox.due(limit):
        _publish_due(parts, outbox, stored_key, done)
    return done


def stranded(
    app: Celery, *, older: float = RESCUE_AFTER, limit: int = RELAY_AT_ONCE
) -> list[Record]:
    """The records :func:`rescue` would publish a message of now."""
    parts = app_components.parts_of(app)
    return _stranded(parts, _outbox(parts), older, limit)


def rescue(app: Celery, *, older: float = RESCUE_AFTER, limit: int = RELAY_AT_ONCE) -> Round:
    """Publish the stored messages of records that no worker and no queue seems to have.

    That is: unchanged for *older* seconds and running without a live lease, pending, or cooling for
    a time that is over if they run again by themselves; and messages that are due, as :func:`relay`
    does. Only tasks with ``lease_store_arguments``, and enqueued calls, store their message. An
    extra copy does no harm, but none is published for *older* seconds after the last one. Raises
    :class:`~celery_leases.errors.StoreUnavailable`. A message the broker does not confirm is due
    again later.
    """
    parts = app_components.parts_of(app)
    outbox, done = _outbox(parts), Round()
    for record in _stranded(parts, outbox, older, limit):
        if _unless_locked(lambda: outbox.publish_again(record)):  # noqa: B023 - called at once
            _publish_due(parts, outbox, record.stored_key, done)
    return done


def publish_stored(app: Celery, stored_key: str) -> bool | None:
    """Publish the stored message of the record *stored_key*, whether or not a worker has it;
    ``None`` if there is none.

    ``None`` too for an expired message, or while a transaction has locked the row. ``False``: the
    broker did not confirm it. Raises :class:`~celery_leases.errors.StoreUnavailable`.
    """
    parts = app_components.parts_of(app)
    outbox, done = _outbox(parts), Round()
    record = parts.records.read(stored_key, lenient=True)
    if record is None or record.message is None or not _can_be_published(record):
        return None
    if not _unless_locked(lambda: outbox.publish_again(record)):
        return None
    _publish_due(parts, outbox, stored_key, done)
    return bool(done.published)


def _publish_due(
    parts: app_components.AppParts, outbox: Outbox, stored_key: str, done: Round
) -> None:
    """Publish the message of one key, unless another process has taken it; an expired message is
    dropped.
    """
    record = _unless_locked(lambda: outbox.take_due(stored_key))
    if record is None:
        return
    try:
        if _has_expired(record):
            logger.info("%s is not published, because its message has expired", record.key)
            outbox.drop(record)
        else:
            (done.published if _publish(parts, outbox, record) else done.refused).append(record)
    except RecordUnreadable as error:
        logger.error("not published: %s", error)
        done.refused.append(record)


def _stranded(
    parts: app_components.AppParts, outbox: Outbox, older: float, limit: int
) -> list[Record]:
    """The oldest records that no call has; any number of live ones may come before them."""
    found: list[Record] = []
    last: Record | None = None
    shut: dict[str, bool] = {}
    while len(found) < limit:
        page = outbox.stranded(older, LOOKED_AT_ONCE, last)
        found += [
            record
            for record in page
            if _can_be_published(record)
            and not (_is_over(record) or _is_live(parts, record) or _waits(parts, record, shut))
        ]
        if len(page) < LOOKED_AT_ONCE:
            break
        last = page[-1]
    return found[:limit]


def _waits(parts: app_components.AppParts, record: Record, shut: dict[str, bool]) -> bool:
    """Whether the call of *record* waits for the closed gate of its group; *shut* remembers each
    group.
    """
    group = record.failure.group if record.failure is not None else None
    if group is None or record.publish_at is not None or record.state is State.RUNNING:
        return False
    if group not in shut:
        gate = parts.leases.gate(group)
        shut[group] = gate is not None and gate.blocked_for > 0
    return shut[group]


def _can_be_published(record: Record) -> bool:
    try:
        return not _has_expired(record)
    except RecordUnreadable as error:
        logger.error("not published: %s", error)
        return False


def _is_over(record: Record) -> bool:
    """Whether the call that the kept message is of has ended."""
    return (
        record.publish_at is None and call_has_ended(record) and not _has_message_of_another(record)
    )


def _has_message_of_another(record: Record) -> bool:
    """Whether a message of another call was published since the last attempt."""
    if record.published_at is None or record.published_at <= (record.finished_at or 0):
        return False
    call_id = _message_of(record).get("options", {}).get("task_id")
    return call_id is not None and call_id != record.call_id.partition("~")[0]


def _is_live(parts: app_components.AppParts, record: Record) -> bool:
    return record.state is State.RUNNING and parts.leases.holder(record.stored_key) is not None


def _unless_locked(step: Callable[[], T]) -> T | None:
    """What *step* gives; ``None`` where a transaction has the row locked, with which its message is
    in good hands.
    """
    try:
        return step()
    except StoreUnavailable as error:
        if error.executed is not False:
            raise
        logger.info("a record is locked, the next round tries it again: %s", error)
        return None


def _is_with_nobody(record: Record) -> bool:
    """Whether the call of a record does not come back by itself: its caller, or an operator, was
    told so.
    """
    expired = _has_expired(record)
    if record.publish_at is not None and not expired:
        return False
    told = call_has_ended(record) and (expired or not _has_message_of_another(record))
    forgotten = not record.call_id and record.message is None
    return told or (
        record.state is State.PENDING and (record.ended is Ended.RELEASED or forgotten or expired)
    )


def _has_expired(record: Record) -> bool:
    """Whether a worker would discard the kept message; a call that has begun does not expire."""
    options = _message_of(record).get("options", {})
    over = is_over(options.get("expires"), datetime.fromtimestamp(record.now / 1e6, UTC))
    return over and not _has_begun(record, options)


def _message_of(record: Record) -> dict[str, Any]:
    """The kept message; raises :class:`RecordUnreadable` for one that was changed by hand."""
    found = decode_stored(record.message, record.key, "message", record.task)
    if not isinstance(found, dict | None) or not isinstance((found or {}).get("options", {}), dict):
        wrong = TypeError("not a message")
        text = unreadable(record.key, record.task, "message", record.message, wrong)
        raise RecordUnreadable(text, False, record.key, "message")
    return found or {}


def _has_begun(record: Record, options: Mapping[str, Any]) -> bool:
    return record.attempt > 0 and options.get("task_id") == record.call_id.partition("~")[0]


def _queued_call(record: Record) -> str:
    """The call a record belongs to; where another one's message is to be published or was since the
    last attempt, that one.
    """
    queued = record.publish_at is not None or _has_message_of_another(record)
    kept = _message_of(record) if queued else {}
    return str(kept.get("options", {}).get("task_id") or record.call_id)


def _found(place: _Place, key: CallKey) -> Record:
    """The record that prevents a new one."""
    record = place.read(key.stored, key.key, newest=True)
    if record is None:
        raise StoreUnavailable(
            f"{key.key}: another transaction is enqueuing the key now; try again", False
        )
    return record


def _check_content(record: Record, key: CallKey) -> None:
    """Raise what a delivery of the call would: the record has failed, or stands for other
    arguments.
    """
    if record.state in (State.FAILED, State.UNCERTAIN):
        raise permanent_failure(record)
    if not (record.ended is Ended.FAILED and not record.resumes):
        _check_same(record.fingerprint, record.digests, key)


def _check_same(fingerprint: str | None, digests: Mapping[str, str] | None, key: CallKey) -> None:
    if None not in (key.fingerprint, fingerprint) and key.fingerprint != fingerprint:
        names = differing(key.digests, digests)
        listed = ", ".join(names) or "their fingerprint"
        message = f"{key.key} stands for a call with other arguments; they differ in {listed}"
        raise KeyReused(message, key.key, names)


def _publish_own(app: Celery, stored_key: str, place: _Place | None = None) -> None:
    """After the transaction: publish what it committed; the next relay or rescue does what goes
    wrong here.

    The row is read and written in *place*, by default over a connection of the records. An eager
    call is run: what its body raises is raised here where Celery propagates it.
    """
    parts = app_components.parts_of(app)
    outbox = _outbox(parts)
    if app.conf.task_always_eager:
        if (record := _taken(outbox, stored_key, place)) is not None:
            _run(parts, outbox, record, place)
        return
    try:
        record = _taken(outbox, stored_key, place)
        if record is not None:
            _publish(parts, outbox, record, place)
    except Exception as error:  # noqa: BLE001 - the user's commit has succeeded, and must not seem to have failed
        logger.warning(
            "%s is enqueued, but could not be published; the next relay or rescue will: %s",
            stored_key,
            error,
        )


def _taken(outbox: Outbox, stored_key: str, place: _Place | None) -> Record | None:
    """Take the message of one key to publish it, if it is still to be published."""
    if place is None:
        return outbox.take(stored_key)
    record = place.read(stored_key, stored_key)
    if record is None or record.publish_at is None:
        return None
    writes, taken = outbox.take_writes(record)
    return taken if place.write(writes, stored_key) else None


def _note_published(outbox: Outbox, record: Record, place: _Place | None) -> None:
    if place is None:
        outbox.published(record)
    else:
        place.write(outbox.published_writes(record), record.stored_key)


def _as_it_stands(record: Record) -> dict[str, Any]:
    """The kept message; with as many retries as Celery has given the call since, or it would be
    taken for a copy.

    A call that has begun does not expire any more.
    """
    message = _message_of(record)
    options = message.setdefault("options", {})
    if options.get("task_id") == record.call_id and record.retries:
        options["retries"] = record.retries
    if _has_begun(record, options):
        options["expires"] = None
    return message


def _publish(
    parts: app_components.AppParts, outbox: Outbox, record: Record, place: _Place | None = None
) -> bool:
    if parts.app.conf.task_always_eager:
        _run(parts, outbox, record, place)
        return True
    try:
        message = _as_it_stands(record)
        with _publishing_stored_message(message):
            parts.copies.publish(message)
    except Exception as error:  # noqa: BLE001 - whatever the broker said, the message stays where it is
        logger.warning(
            "%s could not be published, the next relay or rescue tries again: %s", record.key, error
        )
        return False
    with suppress(StoreUnavailable):  # then it is published once more, which does no harm
        _note_published(outbox, record, place)
    return True


def _run(
    parts: app_components.AppParts, outbox: Outbox, record: Record, place: _Place | None
) -> None:
    """Run an eager call: it cannot be rescheduled, so it is not published again."""
    _note_published(outbox, record, place)
    message = _as_it_stands(record)
    with _publishing_stored_message(message):
        Signature.from_dict(message, app=parts.app).apply_async()


@contextmanager
def _publishing_stored_message(message: Mapping[str, Any]) -> Iterator[None]:
    """Enclose the publishing of a *message* that a record keeps."""
    named = (message.get("task"), message.get("options", {}).get("task_id"))
    before = _publishing_stored.set(named)
    try:
        yield
    finally:
        _publishing_stored.reset(before)
