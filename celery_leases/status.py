"""The status of a key or a cooldown group, for programs and for waiting users."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Self

from celery_leases import progress as saved
from celery_leases.decide import attempt_history
from celery_leases.decide.answers import Holder
from celery_leases.decide.endings import ExitCause
from celery_leases.effect import Effect
from celery_leases.errors import Cooldown, RecordUnreadable, RetryLater
from celery_leases.failures.actions import Reason
from celery_leases.groups.group import ClosedGroup
from celery_leases.groups.history import PastClosing
from celery_leases.groups.slots import NO_SLOTS, Slots
from celery_leases.record import Attempt, Ended, Failure, PastAttempt, Record, State
from celery_leases.results import decode, result_of
from celery_leases.text.durations import in_short, in_words

ABSENT: Final = "absent"
ABANDONED: Final = "abandoned"
UNREADABLE: Final = "unreadable"
RECORD_UNREADABLE: Final = "record_unreadable"
LEASE_ENDED: Final = "lease_ended"
LEASE_STORE_UNAVAILABLE: Final = "lease_store_unavailable"
_WITH_REASON: Final = frozenset(
    f"{kind.__module__}.{kind.__qualname__}" for kind in (Cooldown, RetryLater)
)


LONG_QUEUED: Final = 900.0
"""Seconds after which a queued call that has not begun is worth a look."""
_UNSURE: Final = "It failed and may have been executed."


class MessageCode(StrEnum):
    """The message of a status for the waiting user: a stable code for translation, and its
    ``text``, in which ``{wait}`` is ``retry_after`` in words, and ``{attempt}`` the attempt.
    """

    text: str

    def __new__(cls, code: str, text: str) -> Self:
        """A member whose value is its *code*."""
        member = str.__new__(cls, code)
        member._value_, member.text = code, text
        return member

    NOT_STARTED = "not_started", "Not started yet"
    QUEUED = "queued", "Queued"
    REPLACED = "replaced", "Replaced by a newer call"
    WAITING = "waiting", "Waiting: start it again if it does not begin"
    STARTING = "starting", "Starting"
    RUNNING = "running", "Running (attempt {attempt})"
    ABANDONED = "abandoned", "Interrupted; it starts again by itself"
    DONE = "done", "Done"
    LAST_FAILED = (
        "last_failed",
        "The last attempt failed; start it again if it does not begin",
    )
    REVOKED_IN = "revoked_in", "Cancelled: retry available in {wait}"
    REVOKED = "revoked", "Cancelled: start it again if it is needed"
    RETRY_IN = "retry_in", "Retry available in {wait}"
    RETRY_NOW = "retry_now", "Retry available now"
    RESUMES = "resumes", "Runs again any moment"
    UNSURE_RETRY_IN = "unsure_retry_in", f"{_UNSURE} Retry available in {{wait}}"
    UNSURE_RETRY = "unsure_retry", f"{_UNSURE} Retry available now"
    UNSURE_RESUMES_IN = "unsure_resumes_in", f"{_UNSURE} It runs again in {{wait}}"
    UNSURE_RESUMES = "unsure_resumes", f"{_UNSURE} It runs again any moment"
    UNCERTAIN = "uncertain", "It may have been executed; a person must check"
    UNREADABLE = "unreadable", "Its state cannot be read; a person must check"
    FAILED = "failed", "Failed for good"
    FAILED_UNSURE = "failed_unsure", "Failed for good; it may have been executed"


_CODE_OF_STATE: Final[Mapping[str, MessageCode]] = {
    State.DONE: MessageCode.DONE,
    State.UNCERTAIN: MessageCode.UNCERTAIN,
    ABANDONED: MessageCode.ABANDONED,
    UNREADABLE: MessageCode.UNREADABLE,
}


_RESUMES: Final = "The call runs again by itself."
_NEXT: Final[Mapping[str | tuple[str, str | None], str]] = {
    ABSENT: "The next call of the task runs the body, unless its group is closed.",
    ABANDONED: (
        "The call runs again when the broker delivers its message again: at once on RabbitMQ, on Redis after "
        "the visibility timeout. If no message of it is left, `leases rescue` publishes a stored one; "
        "else call the task again."
    ),
    State.DONE: "A further call gets the saved result; `leases forget` lets the body run again.",
    State.FAILED: "It is not retried until `leases retry`.",
    (State.DONE, "each"): "The next call runs the body.",
    (State.DONE, "latest"): "A newer call runs the body; other calls get the saved result.",
    (
        State.FAILED,
        "latest",
    ): "A newer call runs the body; this one is not retried until `leases retry`.",
    State.UNCERTAIN: "Look in the other system, then write what you found: `leases resolve`.",
    UNREADABLE: "Repair the column that `detail` names, or run `leases forget`.",
}


@dataclass(frozen=True, slots=True)
class EffectStatus:
    """One effect of a key. ``state`` is ``sent``, ``done`` or ``unreadable`` (a column cannot be
    read; ``detail`` says which, and what to do). The times are aware datetimes in UTC.
    """

    name: str
    state: str
    reference: str | None
    idempotency_key: str
    sent_at: datetime | None
    done_at: datetime | None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One attempt of a key: ``ended`` says how it ended, or is ``running``.

    The times are aware datetimes in UTC. ``runtime`` is the seconds from the claim to the outcome,
    or until now. It and ``finished_at`` are ``None`` if the attempt reported no outcome. ``error``
    is the class and the beginning of the message, or why Celery has terminated the attempt.
    ``rule`` is the rule that decided.
    """

    started_at: datetime
    finished_at: datetime | None
    runtime: float | None
    ended: str
    host: str
    error: str | None = None
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """The status of a key. Durations are seconds; the ``*_at`` are aware datetimes in UTC. A field
    without a value is ``None``, empty, or 0.
    """

    key: str
    task: str | None
    #: That of the record (:class:`~celery_leases.record.State`); or ``absent``: there is no record,
    #: ``abandoned``: running without a live lease, ``unreadable``: a column of the record cannot be
    #: read.
    state: str
    #: The number of the latest attempt, from 1.
    attempt: int = 0
    #: Counted failures since the last success.
    failures: int = 0
    #: Crashes in a row.
    crashes: int = 0
    #: Celery's id of the call that had the key last.
    call_id: str | None = None
    #: The fence of the latest attempt.
    fence: int = 0
    #: When the key may run again; ``None``: there is nothing to wait for.
    retry_at: datetime | None = None
    #: In how many seconds that is.
    retry_after: float | None = None
    #: What the key waits for: the ``"key"`` itself, or its ``"group"``.
    scope: str | None = None
    #: The name of that group.
    group: str | None = None
    #: Why, as a stable code (docs/reference/status.md#reasons).
    reason: str | None = None
    #: More about the wait of a group, a ``Snooze``, or a store that does not answer. The text of
    #: the body's exception is in ``error``.
    detail: str | None = None
    #: The name of the rule that decided.
    rule: str | None = None
    #: Whether the call runs again by itself.
    resumes: bool = False
    #: The process that runs the key, as ``hostname/pid``.
    holder: str | None = None
    #: Seconds until its lease ends, unless it is renewed.
    lease_remaining: float | None = None
    #: The saved result.
    result: Any = None
    #: The other system's name for the latest effect.
    reference: str | None = None
    #: The value that the body saved last; if it saved none, how many items its loops have finished,
    #: such as ``{"items": 120}``.
    progress: Any = None
    #: The effects of the key in the order of their intents; only ``status()`` reads them.
    effects: tuple[EffectStatus, ...] = ()
    #: The last failure: ``type``, ``message``, ``rule``, ``reason``, ``group``, ``ambiguous`` (it
    #: may have been executed) and ``operator`` (waiting does not help).
    error: Failure | None = None
    #: How the attempt before the latest ended.
    previous: Attempt | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    #: Seconds since the key entered its state.
    age: float | None = None
    #: Seconds that the latest attempt took, or has taken so far.
    runtime: float | None = None
    #: The last ten attempts, the oldest first: start, end, ``ended``, host, error.
    attempts: tuple[AttemptStatus, ...] = ()
    #: That of the last failure, shortened and without secrets.
    traceback: str | None = None
    #: Identifies the record if several tasks have the key.
    stored_key: str | None = None
    #: When the call was published together with its record; ``None`` once a worker has begun it.
    queued_at: datetime | None = None
    #: Whether the record has the message of the call, so that ``leases retry`` and ``leases
    #: rescue`` can publish it.
    message_stored: bool = False
    #: The ids of calls of the key that wait, as far as the lease store notes them; only
    #: ``status(…, waiting=True)`` reads them.
    waiting: tuple[str, ...] = ()
    #: Whether the call for which ``status(…, call=…)`` was asked did not run, because a newer one
    #: has answered it (``lease_runs="latest"``). Before that its ``state`` is ``pending``, whatever
    #: the run before it has left.
    replaced: bool = False
    #: ``"each"`` or ``"latest"``, if the record shows that its task has that ``lease_runs``.
    runs: str | None = None

    @property
    def message_code(self) -> MessageCode:
        """The code of :meth:`message`, for programs that have texts of their own."""
        if self.replaced:
            return MessageCode.REPLACED
        if self.state in _CODE_OF_STATE:
            return _CODE_OF_STATE[self.state]
        unsure = self.error is not None and self.error.ambiguous
        if self.state == State.FAILED:
            return MessageCode.FAILED_UNSURE if unsure else MessageCode.FAILED
        if self.state == State.RUNNING:
            return MessageCode.RUNNING if self.attempt else MessageCode.STARTING
        return self._code_while_waiting(unsure)

    def _code_while_waiting(self, unsure: bool) -> MessageCode:
        """The code of a key that does not run: absent, pending or cooling."""
        revoked = (self.reason, self.detail, self.resumes) == (
            Ended.TERMINATED,
            ExitCause.REVOKED.value,
            False,
        )
        if revoked and self.state != ABSENT:
            return MessageCode.REVOKED_IN if self.retry_after else MessageCode.REVOKED
        if self.retry_after:
            if not unsure:
                return MessageCode.RETRY_IN
            return MessageCode.UNSURE_RESUMES_IN if self.resumes else MessageCode.UNSURE_RETRY_IN
        if self.state == ABSENT:
            return MessageCode.NOT_STARTED
        if self.queued_at is not None:
            return MessageCode.QUEUED
        if unsure:
            return MessageCode.UNSURE_RESUMES if self.resumes else MessageCode.UNSURE_RETRY
        if self.state == State.COOLING:
            return MessageCode.RESUMES if self.resumes else MessageCode.RETRY_NOW
        limited = (self.reason, self.detail) == (Ended.TERMINATED, ExitCause.TIME_LIMIT.value)
        failed = limited or self.error is not None
        return MessageCode.LAST_FAILED if failed else MessageCode.WAITING

    def message(self) -> str:
        """One line for the waiting user, without the text of any exception. Times are rounded
        up.
        """
        return self.message_code.text.format(
            wait=in_words(self.retry_after or 0.0), attempt=self.attempt
        )

    def what_next(self) -> str:
        """One or two sentences for operators: what happens to the key next, and what they can
        do.
        """
        wait = in_words(self.retry_after) if self.retry_after else None
        waiting = f"{_calls(len(self.waiting))} for it" if self.waiting else ""
        if waiting and self.runs == "latest":
            waiting += ", of which the newest runs and answers the others"
        match self.state:
            case State.RUNNING:
                dies = "If its process dies, the call runs again when the broker delivers its message again."
                return f"{dies} {waiting}, and more may wait in a worker." if waiting else dies
            case _ if self.state == ABSENT and self.scope == "group":
                pass
            case _ if self.state == ABSENT and waiting:
                return (
                    f"{waiting}: until another call releases the key, or until its group is open."
                )
            case _ if self.state in _NEXT:
                return _NEXT.get((self.state, self.runs), _NEXT[self.state])
        if self.scope == "group":
            if self.reason in (Reason.GROUP_FULL, Reason.GROUP_RATE):
                return f"It waits for its turn in its group {self.group}: {self.detail}."
            opens = f"in {wait}" if wait else "when the next probe gets no rate limit"
            shut = f"Its group {self.group} opens {opens}; `leases group open` opens it now."
            return f"{shut} {_RESUMES}" if self.resumes else shut
        if self.resumes:
            return f"{_RESUMES} {f'It runs in {wait}' if wait else 'It is due'}; `leases retry` lets it run now."
        if self.queued_at is not None and (self.age or 0.0) > LONG_QUEUED:
            return (
                f"It has been queued for {in_words(self.age or 0.0)}. If no queue has its message, because no worker "
                "knows the task or could read the message, `leases rescue` publishes it again."
            )
        if wait:
            return f"It does not run by itself: call the task again in {wait}, or now after `leases retry`."
        return (
            "It does not run by itself unless the broker has a message of it: call the task again."
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, with ``message`` and ``message_code``.

        Datetimes are in ISO 8601; numbers that JSON does not have are ``"NaN"`` or ``"Infinity"``.
        """
        return plain(asdict(self)) | {
            "message": self.message(),
            "message_code": self.message_code.value,
        }


@dataclass(frozen=True, slots=True)
class ClosingStatus:
    """A cooldown group was closed at ``closed_at`` for ``seconds``, the ``in_a_row``-th
    time in a row.

    ``opened_at``: when a probe or an operator opened it; ``None`` if neither did, or if that is not
    known. Datetimes are aware, UTC.
    """

    closed_at: datetime
    seconds: float
    in_a_row: int
    reason: str
    rule: str | None = None
    opened_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The status of a group.

    ``state`` is that of its group: ``closed`` (for ``retry_after`` seconds, until ``retry_at``,
    aware, UTC), ``probe_due`` (the next call probes), ``probing`` (a probe runs) or ``open``; or
    ``full`` if the group is open and as many bodies run as the limit allows: ``running`` of
    ``limit``, the smallest of the running bodies. ``in_a_row``: how often the group closed in a
    row. ``reason``, ``rule`` and ``error`` describe the failure that closed it. ``closings``: the
    last twenty closings, the latest first, if its store has them.
    """

    group: str
    state: str
    in_a_row: int
    reason: str
    rule: str | None = None
    error: str = ""
    retry_at: datetime | None = None
    retry_after: float | None = None
    closings: Sequence[ClosingStatus] = ()
    running: int = 0
    limit: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, datetimes in ISO 8601."""
        return plain(asdict(self))


def _calls(count: int) -> str:
    return "1 call waits" if count == 1 else f"{count} calls wait"


def next_try(status: LeaseStatus) -> str:
    """When the call of a key runs again, in few words for a table."""
    if status.state == ABANDONED:
        return "redelivery"
    if status.state not in (State.PENDING, State.COOLING):
        return ""
    wait = f"in {in_short(status.retry_after)}" if status.retry_after else "now"
    return wait if status.resumes else f"when called, {wait}"


def status_of(
    key: str,
    task: str | None,
    record: Record | None,
    holder: Holder | None,
    *,
    closed_group: ClosedGroup | None = None,
    effects: Sequence[Effect] = (),
    trouble: str | None = None,
    wall_time: float,
) -> LeaseStatus:
    """The status of *key*, from its record, holder, group and effects.

    *trouble*: why the lease store did not answer. *wall_time*: seconds since the epoch.
    """
    if record is not None and record.forgotten:
        key, task, record = record.key, record.task, None
    record, result = _result(record)
    wait, scope = _wait(record, holder, closed_group)
    reason, detail = _reason(record, holder, closed_group if scope == "group" else None, trouble)
    shared: dict[str, Any] = {
        "retry_at": _time((wall_time + wait) * 1e6) if wait else None,
        "retry_after": wait or None,
        "scope": scope,
        "group": closed_group.group if closed_group is not None and scope == "group" else None,
        "reason": reason,
        "detail": detail,
        **_holder_fields(holder),
    }
    if record is None:
        rule = closed_group.rule if closed_group is not None else None
        return LeaseStatus(
            key, task, ABSENT if holder is None else State.RUNNING.value, rule=rule, **shared
        )
    abandoned = record.state is State.RUNNING and holder is None and trouble is None
    rule = (
        closed_group.rule
        if closed_group is not None and scope == "group"
        else record.failure.rule
        if record.failure
        else None
    )
    return LeaseStatus(
        key=record.key,
        task=record.task,
        state=UNREADABLE if record.unreadable else ABANDONED if abandoned else record.state.value,
        attempt=record.attempt,
        failures=record.failures,
        crashes=record.crashes,
        fence=record.fence,
        rule=rule,
        resumes=record.resumes and record.state in (State.PENDING, State.COOLING),
        result=result,
        reference=next(
            (effect.reference for effect in reversed(effects) if effect.reference is not None), None
        ),
        progress=_progress(record),
        effects=tuple(map(_effect, effects)),
        error=record.failure,
        previous=record.previous,
        created_at=_time(record.created_at),
        started_at=_time(record.started_at) if not record.queued else None,
        finished_at=_time(record.finished_at),
        age=max(0.0, (record.now - (record.finished_at or record.started_at)) / 1e6),
        runtime=_runtime(record, abandoned=abandoned),
        attempts=_attempts(record, abandoned=abandoned),
        traceback=record.traceback,
        stored_key=record.stored_key,
        queued_at=_time(record.started_at) if record.queued else None,
        message_stored=record.message is not None,
        runs="latest" if record.arrived else "each" if record.finished_calls else None,
        **{"call_id": record.call_id, **shared},
    )


def status_of_group(
    closed_group: ClosedGroup,
    wall_time: float,
    past: Sequence[PastClosing] = (),
    slots: Slots = NO_SLOTS,
) -> GroupStatus:
    """The status of a group that is not open; *wall_time*: seconds since the epoch."""
    state = (
        "closed"
        if not closed_group.probe_due
        else "probing"
        if closed_group.probe_for > 0
        else "probe_due"
    )
    until = (wall_time + closed_group.closed_for) * 1e6 if closed_group.closed_for else None
    known = (
        closed_group.group,
        state,
        closed_group.in_a_row,
        closed_group.reason,
        closed_group.rule,
        closed_group.message,
    )
    closed_for = closed_group.closed_for or None
    return GroupStatus(
        *known, _time(until), closed_for, _closings(past), len(slots.held), slots.limit
    )


def status_of_open_group(
    group: str,
    past: Sequence[PastClosing] = (),
    full: ClosedGroup | None = None,
    slots: Slots = NO_SLOTS,
) -> GroupStatus:
    """The status of a group that is open; *full*: why its calls wait for their turn, if they
    do.
    """
    is_full = full is not None and full.reason == Reason.GROUP_FULL
    reason, error = (full.reason, full.message) if full is not None else ("", "")
    known = (group, "full" if is_full else "open", 0, reason, None, error, None, None)
    return GroupStatus(*known, _closings(past), len(slots.held), slots.limit)


def _closings(past: Sequence[PastClosing]) -> tuple[ClosingStatus, ...]:
    return tuple(
        ClosingStatus(
            _moment(each.closed_at * 1e6),
            max(0.0, each.until - each.closed_at),
            each.in_a_row,
            each.reason,
            each.rule,
            _time(each.opened_at * 1e6) if each.opened_at is not None else None,
        )
        for each in past
    )


def _runtime(record: Record, *, abandoned: bool) -> float | None:
    if record.state is State.RUNNING:
        return None if abandoned else max(0.0, (record.now - record.started_at) / 1e6)
    latest = attempt_history.latest_ended(record)
    return _runtime_of(latest) if latest is not None else None


def _runtime_of(attempt: PastAttempt) -> float | None:
    return (
        (attempt.finished_at - attempt.started_at) / 1e6
        if attempt.finished_at is not None
        else None
    )


def _attempts(record: Record, *, abandoned: bool) -> tuple[AttemptStatus, ...]:
    found = [_attempt(each) for each in attempt_history.timeline(record)]
    if record.state is State.RUNNING:
        runtime = _runtime(record, abandoned=abandoned)
        ended = Ended.ABANDONED.value if abandoned else State.RUNNING.value
        found.append(AttemptStatus(_moment(record.started_at), None, runtime, ended, record.holder))
    return tuple(found)


def _attempt(attempt: PastAttempt) -> AttemptStatus:
    finished = _time(attempt.finished_at)
    known = (attempt.ended.value, attempt.host, attempt.error, attempt.rule)
    return AttemptStatus(_moment(attempt.started_at), finished, _runtime_of(attempt), *known)


def _progress(record: Record) -> Any:
    progress = saved.load(record.progress, record.generation)
    return (
        decode(progress.value) if progress.value is not None else dict(progress.positions) or None
    )


def _result(record: Record | None) -> tuple[Record | None, Any]:
    """The record and its stored result; a result that cannot be read makes the record
    unreadable.
    """
    if record is None or record.state is not State.DONE:
        return record, None
    try:
        return record, result_of(record)
    except RecordUnreadable as error:
        return replace(record, unreadable=record.unreadable or str(error)), None


def _effect(effect: Effect) -> EffectStatus:
    state = effect.state.value if effect.unreadable is None else UNREADABLE
    known = (effect.name, state, effect.reference, effect.idempotency_key)
    return EffectStatus(*known, _time(effect.sent_at), _time(effect.done_at), effect.unreadable)


def _wait(
    record: Record | None, holder: Holder | None, closed_group: ClosedGroup | None
) -> tuple[float, str | None]:
    """Seconds until the key may run, and whether it waits for itself or for its group."""
    waiting = (
        record.state in (State.PENDING, State.COOLING) if record is not None else holder is None
    )
    if not waiting:
        return 0.0, None
    own = record.waits if record is not None else 0.0
    blocked_for = closed_group.blocked_for if closed_group is not None else 0.0
    if closed_group is not None and blocked_for >= own:
        return blocked_for, "group"
    of_group = (
        record is not None and record.failure is not None and record.failure.group is not None
    )
    return own, ("group" if of_group else "key") if own else None


def _reason(
    record: Record | None,
    holder: Holder | None,
    closed_group: ClosedGroup | None,
    trouble: str | None,
) -> tuple[str | None, str | None]:
    """The ``reason`` and the ``detail`` of a status."""
    if record is not None and record.unreadable is not None:
        return RECORD_UNREADABLE, record.unreadable
    if trouble is not None:
        return LEASE_STORE_UNAVAILABLE, trouble
    if closed_group is not None:
        return closed_group.reason, closed_group.message or None
    if record is None:
        return None, None
    if record.state is State.RUNNING:
        return (None if holder else LEASE_ENDED), None
    terminated = record.ended is Ended.TERMINATED and record.state in (State.PENDING, State.COOLING)
    if record.failure is not None and record.failure.reason is not None and not terminated:
        return record.failure.reason, _reason_in_body(record.failure)
    if record.state is State.DONE:
        return record.reason, None
    return (record.ended.value if record.ended else record.reason), record.reason


def _reason_in_body(failure: Failure) -> str | None:
    """The ``reason`` with which the body raised ``Cooldown`` or ``RetryLater``: the end of its
    message.
    """
    return failure.message.partition(": ")[2] or None if failure.type in _WITH_REASON else None


def _holder_fields(holder: Holder | None) -> Mapping[str, Any]:
    if holder is None:
        return {}
    return {"holder": holder.host, "call_id": holder.call_id, "lease_remaining": holder.remaining}


def _time(microseconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(microseconds / 1e6, UTC) if microseconds is not None else None


def _moment(microseconds: float) -> datetime:
    return datetime.fromtimestamp(microseconds / 1e6, UTC)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """*values* for JSON: datetimes in ISO 8601, and texts for numbers that JSON does not have."""
    return {name: _plainly(value) for name, value in values.items()}


def _plainly(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return plain(value)
        case list() | tuple():
            return [_plainly(item) for item in value]
    return value
