"""Messages stored in records: calls enqueued in a transaction, calls queued once per key, the relay
and the rescue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import uuid4

from celery import Celery, Signature
from celery.result import AsyncResult
from celery.signals import before_task_publish
from celery.utils.time import maybe_make_aware

from celery_leases.attempt.process import Process
from celery_leases.decide.after_run import call_has_ended
from celery_leases.decide.before_run import permanent_failure
from celery_leases.decide.repairs import NewCall
from celery_leases.errors import (
    AlreadyQueued,
    LeaseConfigurationError,
    RecordUnreadable,
    StoreUnavailable,
)
from celery_leases.keys import (
    CallKey,
    call_key,
    is_short_form,
    key_reused,
    same_arguments,
)
from celery_leases.record import Ended, Record, State
from celery_leases.results import decode_stored, unreadable
from celery_leases.text.cleaning import printable
from celery_leases.text.notices import logger
from celery_leases.worker import processes
from celery_leases.worker.headers import HEADER, call_id_of, celery_id_of
from celery_leases.worker.stored_messages import (
    HeaderRecorder,
    NotStorable,
    as_delivered,
    has_expired,
    stored_form,
)

if TYPE_CHECKING:
    from celery_leases.stores.sql.dialects import Writes
    from celery_leases.stores.sql.outbox import Outbox
    from celery_leases.stores.sql.records import SqlRecordStore

T = TypeVar("T")
RELAY_AT_ONCE: Final = 100
READ_AT_ONCE: Final = 100
STORED_OPTIONS: Final = frozenset(
    {
        *("countdown", "eta", "expires", "queue", "exchange", "routing_key", "priority", "headers"),
        *("link", "link_error", "serializer", "compression", "time_limit", "soft_time_limit"),
        *("ignore_result", "shadow"),
    }
)
"""Options of ``apply_async`` that are stored with a call."""
RESCUE_AFTER: Final = 900.0
"""Seconds without a change after which a record's message counts as lost."""


@dataclass(frozen=True)
class RelayResult:
    """The result of one relay or rescue: the records whose message was published, and those whose
    message was not.
    """

    published: list[Record] = field(default_factory=list)
    refused: list[Record] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was published, so that more messages may be due."""
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
    if options.reruns and options.key is not None:
        raise LeaseConfigurationError(
            f"task {task.name}: delay_in() needs a record of its own for each call, but under "
            f'lease_runs="{options.runs}" all calls of a key share one; publish after the commit'
        )
    process = processes.process_of(app)
    headers = headers_of(task, args, kwargs, options_of_call.get("headers"), call_id)
    key = call_key(task.name, options, task.lease_signature, call_id, args, kwargs, headers)
    stored = {**options_of_call, "headers": headers} if headers else options_of_call
    call = _new_call(task, key, call_id, _message(task, args, kwargs, call_id, stored))
    if process.in_memory:
        return _enqueue_in_memory(process, given, call)
    from celery_leases.stores.sql.transactions import JoinedTransaction

    transaction = JoinedTransaction(given, process.records)
    transaction.join(key.key)
    other = _write_record(process, transaction, call)
    if other is None:
        # Through Django's own connection it works where only that one sees the row: in a test's
        # transaction.
        rows = transaction if transaction.is_of_django else None
        transaction.call_when_ended(lambda: _publish_after_commit(app, key.stored, rows))
    return AsyncResult(other or call_id, app=app)


def _new_call(task: Any, key: CallKey, call_id: str, message: str) -> NewCall:
    options = task.lease_options
    return NewCall(task.name, key, call_id, message, options.ttl, options.retention)


class _RowAccess(Protocol):
    """Reads and writes records, in a transaction of the user's own or with autocommit."""

    def write(self, writes: Writes, key: str) -> bool:
        """Execute *writes* in order until one of them changes a row; return whether one did."""
        ...

    def read(self, stored_key: str, key: str, *, newest: bool = False) -> Record | None:
        """The record of a key; *newest*: also if another transaction has committed it since this
        one began.
        """
        ...


@dataclass(frozen=True)
class _Autocommit:
    """Commits each statement by itself."""

    records: SqlRecordStore

    def write(self, writes: Writes, key: str) -> bool:
        from celery_leases.stores.sql.records import KEY_UNUSABLE_ERRORS

        with KEY_UNUSABLE_ERRORS:
            return self.records.database.touch(writes, {})

    def read(self, stored_key: str, key: str, *, newest: bool = False) -> Record | None:
        return self.records.read(stored_key)


def headers_of(
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    call_id: str | None = None,
) -> Mapping[str, Any]:
    """The headers that a message of *task* gets if it is published here and now, without those of
    Celery; *given* are the caller's own.

    Task classes and apps add headers of a tenant, a user or a trace, so the call is published to
    nowhere. With a *call_id*, receivers of ``before_task_publish`` add theirs too.
    """
    app = task.app
    receivers = call_id is not None and bool(before_task_publish.receivers)
    if app.conf.task_always_eager or not (receivers or _headers_are_added(task)):
        return dict(given or {})
    recorder = HeaderRecorder(app.connection_for_write(), stops=not receivers)
    call_id = call_id or str(uuid4())
    with _publishing_stored_message({"task": task.name, "options": {"task_id": call_id}}):
        recorder.record(task, args, kwargs, given, call_id)
    of_celery = app.amqp.create_task_message(call_id, task.name).headers.keys()
    return {
        name: value
        for name, value in recorder.headers.items()
        if name not in of_celery and name not in ("stamps", "stamped_headers")
    }


def _headers_are_added(task: Any) -> bool:
    """Whether a class of the user or of a library publishes in its own way. What is patched into
    Celery's own classes does not count.
    """
    return any(
        name in vars(base) and base.__module__ not in _PUBLISHING
        for kind, name in ((type(task), "apply_async"), (type(task.app), "send_task"))
        for base in kind.__mro__
    )


_PUBLISHING: Final = frozenset({"celery.app.base", "celery.app.task", "celery_leases.task"})


def _write_record(process: Process, rows: _RowAccess, call: NewCall) -> str | None:
    """Write the record of *call* with its message; return the id of another call if the key
    belongs to one, and nothing was written.

    Raises what a delivery of the call would raise if the record has failed or has other arguments.
    """
    key, outbox = call.key, _outbox(process)
    while not rows.write(outbox.enqueue_writes(call), key.key):
        record = _existing_record(rows, key)
        if record.expired:
            writes = outbox.replace_writes(record, call)
        else:
            _check_arguments(record, key)
            if not _has_no_open_call(record):
                return _queued_call(record)
            writes = outbox.add_writes(record, call.message, call.call_id)
        if rows.write(writes, key.key):
            _revoke_if_unpublished(process.app, record)
            break
        # Another caller has changed the record since it was read, so it is read again.
    return None


def _enqueue_in_memory(process: Process, given: Any, call: NewCall) -> AsyncResult:
    """:func:`enqueue` for an eager call whose records are in memory: the record is written, and the
    call run, after the commit of *given*.
    """
    from celery_leases.stores.memory import do_after_commit, waiting_in

    app, key = process.app, call.key
    record = process.records.read(key.stored)
    if record is not None and not record.expired:
        _check_arguments(record, key)
        if not _has_no_open_call(record):
            return AsyncResult(_queued_call(record), app=app)
    for other in waiting_in(given):
        if other.key.stored == key.stored:
            _check_same(other.key, key)
            return AsyncResult(other.call_id, app=app)

    def committed(over: bool) -> None:
        outbox = _outbox(process)
        if _write_record(process, _Autocommit(process.records), call) is None:
            if over:
                _publish_after_commit(app, key.stored)
            elif (queued := process.records.read(key.stored)) is not None:
                outbox.publish_again(queued)  # the relay finds it at once

    do_after_commit(given, key, call.call_id, committed)
    return AsyncResult(call.call_id, app=app)


def must_be_published(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of *task* with these arguments must be published for its work to be done.

    ``False``: the work is done, or a call of it runs or waits. Raises what a delivery of the call
    would raise: :class:`KeyReused`, :class:`PermanentFailure` or :class:`KeyUnusable`; and
    :class:`StoreUnavailable`.
    """
    options = task.lease_options
    headers = headers_of(task, args, kwargs) if options.tenant is not None else None
    key = call_key(task.name, options, task.lease_signature, "", args, kwargs, headers)
    records = processes.process_of(task.app).records
    records.check()
    record = records.read(key.stored)
    if record is None or record.expired or record.forgotten:
        return True
    if options.reruns and record.state is not State.UNCERTAIN:
        return True
    _check_arguments(record, key)
    return _has_no_open_call(record)


_ORDER: Final = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")
"""The positional parameters of Celery's ``apply_async``."""
_CANVAS: Final = frozenset(
    {
        *("chain", "chord", "group_id", "link", "link_error", "replaced_task_nesting"),
        # Steps of a chain and bodies of chords have a reply_to, links have their parent. A plain
        # call in a body has none of these here, because Celery adds them later.
        *("reply_to", "parent_id", "root_id"),
    }
)
"""Options of a call that other calls wait for. Such a call is published whatever its record says.
"""
_publishing_stored: ContextVar[tuple[object, object] | None] = ContextVar(
    "celery_leases_publishing_stored", default=None
)
"""The task and id of the stored message that is being published. They are compared, because an
eager body runs during the publish, and may make other calls.
"""


def arguments_of(positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``apply_async``, by name."""
    return dict(zip(_ORDER, positional, strict=False)) | dict(named)


def is_published_before(task: Any, given: Mapping[str, Any]) -> bool:
    """Whether these arguments of ``apply_async`` are those of a retry, a stored message, or a call
    that its own body publishes again.
    """
    call_id = given.get("task_id")
    stored = _publishing_stored.get() == (task.name, call_id)
    itself = call_id is not None and call_id == task.request.id
    carries = HEADER in (given.get("headers") or {})
    return bool(stored or given.get("retries") or carries or itself)


def publish_once(
    task: Any,
    publish: Callable[..., AsyncResult],
    positional: Sequence[Any],
    named: Mapping[str, Any],
) -> AsyncResult:
    """Publish a call of *task* by *publish*, Celery's own ``apply_async``, if no other call of its
    key is queued or runs; see ``lease_outbox="once"``.

    Retries, calls that other calls wait for, stored messages, and calls that their own body
    publishes again are published in any case.
    """
    given = arguments_of(positional, named)
    if any(given.get(name) for name in _CANVAS) or is_published_before(task, given):
        return publish(*positional, **named)
    app, options = task.app, task.lease_options
    args, kwargs = tuple(given.pop("args", None) or ()), dict(given.pop("kwargs", None) or {})
    if check := getattr(task, "__header__", None):
        check(*args, **kwargs)  # as apply_async does
    task_id = given.pop("task_id", None) or str(uuid4())
    call_id = call_id_of(task_id, None)
    if is_short_form(call_id):
        # A caller of another call of the key gets the result of this one by its whole id.
        raise LeaseConfigurationError(
            f"task {task.name}: lease_outbox='once' takes a task_id of at most 255 characters"
        )
    process = processes.process_of(app)
    process.check_once()
    headers = headers_of(task, args, kwargs, given.get("headers"))
    key = call_key(task.name, options, task.lease_signature, call_id, args, kwargs, headers)
    keeps = {name: value for name, value in given.items() if name in STORED_OPTIONS}
    if headers:
        keeps["headers"] = headers
    outbox = _outbox(process)
    message = _message(task, args, kwargs, task_id, keeps, "lease_outbox='once'")
    call = _new_call(task, key, call_id, message)
    write = partial(_write_queued, process, call, each_runs=options.each_runs)
    other = write()
    while other is not None and other.state is State.PENDING and not outbox.share(other):
        other = write()
    if other is not None:
        return _result_of_other(task, publish, other, args, kwargs)
    if app.conf.task_always_eager:
        outbox.sent(key.stored, call_id)  # an eager call is not published again
    try:
        result = publish(args, kwargs, task_id=task_id, **given)
    except BaseException:
        with suppress(StoreUnavailable):  # the relay publishes the message, as after a crash
            outbox.withdraw(key.stored, call_id, options.retention)
        raise
    with suppress(StoreUnavailable):  # the relay publishes it once more, which does no harm
        outbox.sent(key.stored, call_id)
    return result


def _result_of_other(
    task: Any,
    publish: Callable[..., AsyncResult],
    other: Record,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> AsyncResult:
    """What the caller of a call that is not published gets: the result of the *other* call that the
    key belongs to, or :class:`AlreadyQueued`.
    """
    call_id = _queued_call(other)
    if task.lease_options.on_busy == "raise":
        where = f"{printable(other.key)} is {other.state.value}, and belongs to call {call_id}"
        message = f"{where}; nothing was published"
        raise AlreadyQueued(message, other.key, call_id, other.state.value)
    if task.app.conf.task_always_eager and other.state is not State.RUNNING:
        # No backend has the result of an eager call, so this call is run to get it.
        return publish(args, kwargs)
    return AsyncResult(call_id, app=task.app)


def _write_queued(process: Process, call: NewCall, *, each_runs: bool) -> Record | None:
    """Write the record of *call*, in one statement if the key has no record; return the record of
    another call if the key belongs to one, and nothing was written.
    """
    key, outbox, rows = call.key, _outbox(process), _Autocommit(process.records)
    while not rows.write(outbox.enqueue_writes(call), key.key):
        record = _existing_record(rows, key)
        queued = _has_message_of_another(record) and not _has_expired(record)
        over = record.state in (State.DONE, State.FAILED)
        new_generation = each_runs and over and not queued
        if record.expired:
            writes = outbox.replace_writes(record, call)
        elif new_generation or (_has_no_open_call(record) and not record.waits):
            writes = outbox.reassign_writes(record, call, new_generation=each_runs)
        else:
            if not record.failure_delivered and record.state not in (State.FAILED, State.UNCERTAIN):
                _check_same(record, key)
            return record
        if rows.write(writes, key.key):
            _revoke_if_unpublished(process.app, record)
            break
        # Another caller has changed the record since it was read, so it is read again.
    return None


def _outbox(process: Process) -> Outbox:
    from celery_leases.stores.sql.outbox import Outbox

    return Outbox(process.records)


def _message(
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call_id: str,
    options: Mapping[str, Any],
    what: str = "delay_in()",
) -> str:
    """The stored message of a new call; *what* names the caller in errors."""
    if unknown := options.keys() - STORED_OPTIONS:
        raise LeaseConfigurationError(
            f"task {task.name}: apply_async_in() does not take {min(unknown)}=; a record stores "
            + ", ".join(sorted(STORED_OPTIONS))
        )
    serializer = options.get("serializer") or task.serializer or task.app.conf.task_serializer
    try:
        delivered = as_delivered(args, kwargs, serializer)
        return stored_form(
            task.signature(
                *delivered,
                task_id=call_id,
                **_times(task.app, {"expires": task.expires, **options}),
            )
        )
    except NotStorable as error:
        raise LeaseConfigurationError(
            f"task {task.name}: {what} does not take these arguments: {error}"
        ) from None


def _times(app: Celery, options: Mapping[str, Any]) -> dict[str, Any]:
    """*options* with ``countdown`` and ``expires`` as absolute times, because the call is published
    later, perhaps more than once.
    """
    times = {
        name: value for name, value in options.items() if name != "countdown" and value is not None
    }
    if options.get("countdown") is not None:
        times["eta"] = options["countdown"]
    for name in times.keys() & {"eta", "expires"}:
        if isinstance(times[name], Real):
            now = datetime.fromtimestamp(processes.process_of(app).wall_time(), UTC)
            times[name] = now + timedelta(seconds=float(times[name]))
        if isinstance(times[name], datetime):
            times[name] = maybe_make_aware(times[name], app.timezone).isoformat()
    return times


def relay(app: Celery, limit: int = RELAY_AT_ONCE) -> RelayResult:
    """Publish the enqueued messages that are due, because the process that enqueued them did not
    publish them after its commit.

    Raises :class:`~celery_leases.errors.StoreUnavailable`. A message that the broker does not
    confirm is due again later.
    """
    process = processes.process_of(app)
    outbox, done = _outbox(process), RelayResult()
    for stored_key in outbox.due(limit):
        _publish_if_due(process, outbox, stored_key, done)
    return done


def stranded(
    app: Celery, *, older: float = RESCUE_AFTER, limit: int = RELAY_AT_ONCE
) -> list[Record]:
    """The records whose message :func:`rescue` would publish now."""
    return stranded_in(processes.process_of(app), older=older, limit=limit)


def stranded_in(process: Process, *, older: float, limit: int) -> list[Record]:
    """The same for the stores of *process*."""
    return _stranded(process, _outbox(process), older, limit)


def rescue(app: Celery, *, older: float = RESCUE_AFTER, limit: int = RELAY_AT_ONCE) -> RelayResult:
    """Publish the stored messages of calls that no worker and no queue seems to have.

    These are calls whose record did not change for *older* seconds, and that run without a live
    lease, are pending, or should have run again after their cooldown; and the messages that are
    due, as for :func:`relay`. Only enqueued calls, and those of tasks with
    ``lease_outbox="store"``, have a stored message. An extra copy does no harm, but after each
    publish of a message it is not published again for *older* seconds.

    Raises :class:`~celery_leases.errors.StoreUnavailable`. A message that the broker does not
    confirm is due again later.
    """
    process = processes.process_of(app)
    outbox, done = _outbox(process), RelayResult()
    for stored_key in outbox.due(limit):
        due = process.records.read(stored_key, lenient=True)
        if due is not None and not _can_be_published(due):
            _publish_if_due(process, outbox, stored_key, done)  # drops it
    for record in _stranded(process, outbox, older, limit):
        if _unless_locked(lambda: outbox.publish_again(record)):  # noqa: B023 - called at once
            _publish_if_due(process, outbox, record.stored_key, done)
    return done


def publish_stored(app: Celery, stored_key: str) -> bool | None:
    """Publish the stored message of the record *stored_key*, even if a worker has the call; return
    whether the broker has confirmed it.

    ``None``: there is no message, it has expired, or a transaction has locked the row. Raises
    :class:`~celery_leases.errors.StoreUnavailable`.
    """
    process = processes.process_of(app)
    outbox, done = _outbox(process), RelayResult()
    record = process.records.read(stored_key, lenient=True)
    if record is None or record.message is None or not _can_be_published(record):
        return None
    if not _unless_locked(lambda: outbox.publish_again(record)):
        return None
    _publish_if_due(process, outbox, stored_key, done)
    return bool(done.published)


def _publish_if_due(process: Process, outbox: Outbox, stored_key: str, done: RelayResult) -> None:
    """Publish the message of one key if it is still due; drop it if it has expired."""
    record = _unless_locked(lambda: outbox.take(stored_key, due=True))
    if record is None:
        return
    try:
        if _has_expired(record):
            logger.info("%s is not published, because its message has expired", record.key)
            _revoke(process.app, record)
            outbox.drop(record)
        else:
            (done.published if _publish(process, outbox, record) else done.refused).append(record)
    except RecordUnreadable as error:
        logger.error("not published: %s", error, code="stored-message-unreadable")
        done.refused.append(record)


def _revoke_if_unpublished(app: Celery, replaced: Record) -> None:
    """Answer the callers of a call whose message has expired before it was published, and that a
    new call has replaced.
    """
    if replaced.publish_at is not None and not replaced.expired:
        _revoke(app, replaced)


def _revoke(app: Celery, record: Record) -> None:
    """Store that the call of the stored message is revoked, as a worker does that discards an
    expired message: this one comes to no worker.
    """
    task, task_id = app.tasks.get(record.task), _message_of(record)["options"].get("task_id")
    if task is None or (task.ignore_result and not task.store_errors_even_if_ignored):
        return
    try:
        task.backend.mark_as_revoked(task_id, "expired")
    except Exception as error:  # noqa: BLE001 - each backend has its own
        logger.warning(
            "%s[%s] has expired, but the result backend did not store it: %s",
            record.task,
            task_id,
            error,
            code="revoke-not-stored",
        )


def _stranded(process: Process, outbox: Outbox, older: float, limit: int) -> list[Record]:
    """The oldest records whose call no worker and no queue seems to have.

    Pages are read until enough are found, because any number of records with live calls may be
    older.
    """
    found: list[Record] = []
    last: Record | None = None
    shut: dict[str, bool] = {}
    while len(found) < limit:
        page = outbox.stranded(older, READ_AT_ONCE, last)
        found += [
            record
            for record in page
            if _can_be_published(record)
            and not (
                _call_is_over(process, record)
                or _is_live(process, record)
                or _waits(process, record, shut)
            )
        ]
        if len(page) < READ_AT_ONCE:
            break
        last = page[-1]
    return found[:limit]


def _waits(process: Process, record: Record, shut: dict[str, bool]) -> bool:
    """Whether the call of *record* waits for its closed group; *shut* remembers each group."""
    group = record.failure.group if record.failure is not None else None
    if group is None or record.publish_at is not None or record.state is State.RUNNING:
        return False
    if group not in shut:
        closed_group = process.leases.groups.get(group)
        shut[group] = closed_group is not None and closed_group.blocked_for > 0
    return shut[group]


def _can_be_published(record: Record) -> bool:
    try:
        return not _has_expired(record)
    except RecordUnreadable as error:
        logger.error("not published: %s", error, code="stored-message-unreadable")
        return False


def _call_is_over(process: Process, record: Record) -> bool:
    """Whether the call of the stored message has ended, or gets the result of another call."""
    if record.publish_at is not None:
        return False
    if record.state in (State.DONE, State.FAILED):
        task = process.app.tasks.get(record.task)
        reruns = task is not None and task.lease_options.reruns
        return not (reruns and _has_message_of_another(record))
    return call_has_ended(record) and not _has_message_of_another(record)


def _has_message_of_another(record: Record) -> bool:
    """Whether the stored message belongs to another call than the last attempt, and was published:
    that call is queued, and has not begun.
    """
    if record.published_at is None:
        return False
    task_id = _message_of(record).get("options", {}).get("task_id")
    return task_id is not None and not (_is_of(record, task_id) or task_id in record.finished_calls)


def _is_of(record: Record, task_id: Any) -> bool:
    """Whether the record belongs to the call with that Celery id, or to one that replaced it."""
    return bool(celery_id_of(call_id_of(task_id, None)) == celery_id_of(record.call_id))


def _is_live(process: Process, record: Record) -> bool:
    return record.state is State.RUNNING and process.leases.holder(record.stored_key) is not None


def _unless_locked(step: Callable[[], T]) -> T | None:
    """The result of *step*; ``None`` if a transaction has locked the row, whose owner then takes
    care of the message.
    """
    try:
        return step()
    except StoreUnavailable as error:
        if error.executed is not False:
            raise
        logger.info("a record is locked, the next relay or rescue tries again: %s", error)
        return None


def _has_no_open_call(record: Record) -> bool:
    """Whether no call of the key runs or waits, so that a new call may use the record."""
    expired = _has_expired(record)
    if record.publish_at is not None and not expired:
        return False
    ended = call_has_ended(record) and (expired or not _has_message_of_another(record))
    forgotten = not record.call_id and record.message is None
    return ended or (
        record.state is State.PENDING and (record.ended is Ended.RELEASED or forgotten or expired)
    )


def _has_expired(record: Record) -> bool:
    """Whether the stored message has expired, so that a worker would discard it. The message of a
    call that has begun does not expire.
    """
    options = _message_of(record).get("options", {})
    expired = has_expired(options.get("expires"), datetime.fromtimestamp(record.now / 1e6, UTC))
    return expired and not _has_begun(record, options)


def _message_of(record: Record) -> dict[str, Any]:
    """The stored message; raises :class:`RecordUnreadable` if it is not one, because it was changed
    by hand.
    """
    found = decode_stored(record.message, record.key, "message", record.task)
    if not isinstance(found, dict | None) or not isinstance((found or {}).get("options", {}), dict):
        wrong = TypeError("not a message")
        text = unreadable(record.key, record.task, "message", record.message, wrong)
        raise RecordUnreadable(text, False, record.key, "message")
    return found or {}


def _has_begun(record: Record, options: Mapping[str, Any]) -> bool:
    return record.attempt > 0 and _is_of(record, options.get("task_id"))


def _queued_call(record: Record) -> str:
    """Celery's id of the call that a record belongs to: the call of the stored message if that is
    due or queued, otherwise the call of the last attempt.
    """
    queued = record.publish_at is not None or (
        _has_message_of_another(record) and not _has_expired(record)
    )
    message = _message_of(record) if queued else {}
    return str(message.get("options", {}).get("task_id") or celery_id_of(record.call_id))


def _existing_record(rows: _RowAccess, key: CallKey) -> Record:
    """The existing record of a key that a new record could not be inserted for."""
    record = rows.read(key.stored, key.key, newest=True)
    if record is None:
        raise StoreUnavailable(
            f"{key.key}: another transaction is enqueuing the key now; try again", False
        )
    return record


def _check_arguments(record: Record, key: CallKey) -> None:
    """Raise what a delivery of the call would raise if the record has failed or has other
    arguments.
    """
    if record.state in (State.FAILED, State.UNCERTAIN):
        raise permanent_failure(record)
    if not (record.ended is Ended.FAILED and not record.resumes):
        _check_same(record, key)


def _check_same(other: CallKey | Record, key: CallKey) -> None:
    if not same_arguments(other.fingerprint, key.fingerprint):
        raise key_reused(key.key, key.digests, other.digests)


def _publish_after_commit(app: Celery, stored_key: str, rows: _RowAccess | None = None) -> None:
    """Publish the message that a transaction of the user's own has committed. If that fails, the
    next relay or rescue publishes it.

    The record is read and written through *rows*, by default over a connection of the records. An
    eager call is run; if Celery propagates the error of its body, it is raised here.
    """
    process = processes.process_of(app)
    outbox = _outbox(process)
    if app.conf.task_always_eager:
        if (record := _take(outbox, stored_key, rows)) is not None:
            _run_eagerly(process, outbox, record, rows)
        return
    try:
        record = _take(outbox, stored_key, rows)
        if record is not None:
            _publish(process, outbox, record, rows)
    except Exception as error:  # noqa: BLE001 - the user's commit has succeeded, and must not seem to have failed
        logger.warning(
            "%s is enqueued, but could not be published; the next relay or rescue will: %s",
            stored_key,
            error,
            code="not-published",
        )


def _take(outbox: Outbox, stored_key: str, rows: _RowAccess | None) -> Record | None:
    """Claim the message of one key for a publish; ``None`` if it is not due any more."""
    if rows is None:
        return outbox.take(stored_key)
    record = rows.read(stored_key, stored_key)
    if record is None or record.publish_at is None:
        return None
    writes, taken = outbox.take_writes(record)
    return taken if rows.write(writes, stored_key) else None


def _mark_published(outbox: Outbox, record: Record, rows: _RowAccess | None) -> None:
    if rows is None:
        outbox.published(record)
    else:
        rows.write(outbox.published_writes(record), record.stored_key)


def _current_message(record: Record) -> dict[str, Any]:
    """The stored message as it must be published now.

    It gets the number of retries that Celery has made since, because otherwise it would count as a
    copy of an earlier attempt. The message of a call that has begun does not expire.
    """
    message = _message_of(record)
    options = message.setdefault("options", {})
    if call_id_of(options.get("task_id"), None) == record.call_id and record.retries:
        options["retries"] = record.retries
    if _has_begun(record, options):
        options["expires"] = None
    return message


def _publish(
    process: Process,
    outbox: Outbox,
    record: Record,
    rows: _RowAccess | None = None,
) -> bool:
    if process.app.conf.task_always_eager:
        _run_eagerly(process, outbox, record, rows)
        return True
    try:
        message = _current_message(record)
        with _publishing_stored_message(message):
            process.publisher.publish(message)
    except Exception as error:  # noqa: BLE001 - whatever the broker said, the record still has the message
        logger.warning(
            "%s could not be published, the next relay or rescue tries again: %s",
            record.key,
            error,
            code="not-published",
        )
        return False
    with suppress(StoreUnavailable):  # the relay publishes it once more, which does no harm
        _mark_published(outbox, record, rows)
    return True


def _run_eagerly(
    process: Process,
    outbox: Outbox,
    record: Record,
    rows: _RowAccess | None,
) -> None:
    """Run an eager call. It is marked as published first, because an eager call is not published
    again.
    """
    _mark_published(outbox, record, rows)
    message = _current_message(record)
    with _publishing_stored_message(message):
        Signature.from_dict(message, app=process.app).apply_async()


@contextmanager
def _publishing_stored_message(message: Mapping[str, Any]) -> Iterator[None]:
    """Enclose the publish of a stored *message*."""
    named = (message.get("task"), message.get("options", {}).get("task_id"))
    before = _publishing_stored.set(named)
    try:
        yield
    finally:
        _publishing_stored.reset(before)
