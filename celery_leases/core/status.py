"""Where a key or a cooldown group stands, in words for programs and for the person who waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from celery_leases.core import progress as saved
from celery_leases.core.durations import in_words
from celery_leases.core.effects import Effect
from celery_leases.core.gates import Gate
from celery_leases.core.ports import Holder
from celery_leases.core.records import Attempt, Failure, Record, State
from celery_leases.core.results import decode

ABSENT: Final = "absent"
ABANDONED: Final = "abandoned"
WORKER_LOST: Final = "worker_lost"
LEASE_STORE_UNAVAILABLE: Final = "lease_store_unavailable"


@dataclass(frozen=True, slots=True)
class EffectStatus:
    """One effect of a key: ``state`` is ``sent`` or ``done``; the times are aware datetimes in UTC."""

    name: str
    state: str
    reference: str | None
    idempotency_key: str
    sent_at: datetime | None
    done_at: datetime | None


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """Where a key stands.

    ``state`` is a record's state, or ``absent`` (no record), or ``abandoned`` (running, but nobody holds the lease).
    ``retry_after`` and ``lease_remaining`` are seconds, the ``*_at`` are aware datetimes in UTC.
    ``reason`` is a stable code: one of :class:`~celery_leases.core.rulings.Reason` for failures, else how the last
    attempt ended (:class:`~celery_leases.core.records.Ended`), why a result is missing, ``worker_lost`` or
    ``lease_store_unavailable``; ``detail`` is more about it in free words. ``rule`` is the name of the rule that
    decided, ``scope`` whose wait it is: ``"key"``, or ``"group"`` with the name of the ``group``.
    ``resumes``: the call comes back by itself. ``holder`` is ``hostname/pid``. ``progress`` is what the body saved.
    ``effects`` (of ``status()``, not of ``list()``) stand in the order they were sent; ``reference`` is that of the
    last one which has one.
    """

    key: str
    task: str | None
    state: str
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    call_id: str | None = None
    fence: int = 0
    retry_at: datetime | None = None
    retry_after: float | None = None
    scope: str | None = None
    group: str | None = None
    reason: str | None = None
    detail: str | None = None
    rule: str | None = None
    resumes: bool = False
    holder: str | None = None
    lease_remaining: float | None = None
    result: Any = None
    reference: str | None = None
    progress: Any = None
    effects: tuple[EffectStatus, ...] = ()
    error: Failure | None = None
    previous: Attempt | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    def message(self) -> str:
        """One sentence for the person who waits; times are rounded up."""
        if self.retry_after and self.state in (ABSENT, State.PENDING, State.COOLING):
            return f"Retry available in {in_words(self.retry_after)}"
        match self.state:
            case "absent":
                return "Not started yet"
            case "done":
                return "Done"
            case "failed":
                return f"Failed for good: {self.error.message}" if self.error else "Failed for good"
            case "running":
                return f"Running (attempt {self.attempt})"
            case "abandoned":
                return "Its process died; it runs again when the broker delivers it"
            case "cooling":
                return "Runs again any moment" if self.resumes else "Retry available now"
            case "uncertain":
                return f"An operator must look: {self.error.message}" if self.error else "An operator must look"
            case "pending" if self.error:
                return f"The last attempt failed: {self.error.message}"
            case "pending":
                return "Not running: it runs when it is delivered, or called again"
            case state:
                return state.capitalize()

    def as_json(self) -> dict[str, Any]:
        """Plain values, datetimes in ISO 8601."""
        return _plain(asdict(self))


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """Where the gate of a cooldown group stands.

    ``state``: ``closed`` for ``retry_after`` seconds, until ``retry_at`` (aware, UTC); ``half_open``: the next call
    probes; ``probing``: one is at it. ``trips``: how often it closed in a row. ``reason``, ``rule`` and ``error`` say
    what closed it.
    """

    group: str
    state: str
    trips: int
    reason: str
    rule: str | None = None
    error: str = ""
    retry_at: datetime | None = None
    retry_after: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, datetimes in ISO 8601."""
        return _plain(asdict(self))


def status_of(
    key: str,
    task: str | None,
    record: Record | None,
    holder: Holder | None,
    *,
    gate: Gate | None = None,
    effects: Sequence[Effect] = (),
    trouble: str | None = None,
    today: float,
) -> LeaseStatus:
    """Put together what is known; *trouble*: why the lease store did not answer, *today*: seconds since the epoch."""
    waits, scope = _waits(record, holder, gate)
    reason, detail = _why(record, holder, gate if scope == "group" else None, trouble)
    shared: dict[str, Any] = {
        "retry_at": _time((today + waits) * 1e6) if waits else None,
        "retry_after": waits or None,
        "scope": scope,
        "group": gate.group if gate is not None and scope == "group" else None,
        "reason": reason,
        "detail": detail,
        **_held(holder),
    }
    if record is None:
        rule = gate.rule if gate is not None else None
        return LeaseStatus(key, task, ABSENT if holder is None else State.RUNNING.value, rule=rule, **shared)
    abandoned = record.state is State.RUNNING and holder is None and trouble is None
    rule = gate.rule if gate is not None and scope == "group" else record.failure.rule if record.failure else None
    return LeaseStatus(
        key=record.key,
        task=record.task,
        state=ABANDONED if abandoned else record.state.value,
        attempt=record.attempt,
        failures=record.failures,
        crashes=record.crashes,
        fence=record.fence,
        rule=rule,
        resumes=record.resumes and record.state in (State.PENDING, State.COOLING),
        result=decode(record.result) if record.state is State.DONE else None,
        reference=next((effect.reference for effect in reversed(effects) if effect.reference is not None), None),
        progress=decode(saved.load(record.progress, record.generation).value),
        effects=tuple(map(_effect, effects)),
        error=record.failure,
        previous=record.previous,
        created_at=_time(record.created_at),
        started_at=_time(record.started_at),
        finished_at=_time(record.finished_at),
        **{"call_id": record.call_id, **shared},
    )


def status_of_group(gate: Gate, today: float) -> GroupStatus:
    """Put together what is known of a gate that is not open; *today*: seconds since the epoch."""
    state = "closed" if not gate.half_open else "probing" if gate.probe_for > 0 else "half_open"
    until = (today + gate.closed_for) * 1e6 if gate.closed_for else None
    known = (gate.group, state, gate.trips, gate.reason, gate.rule, gate.message)
    return GroupStatus(*known, _time(until), gate.closed_for or None)


def _effect(effect: Effect) -> EffectStatus:
    known = (effect.name, effect.state.value, effect.reference, effect.idempotency_key)
    return EffectStatus(*known, _time(effect.sent_at), _time(effect.done_at))


def _waits(record: Record | None, holder: Holder | None, gate: Gate | None) -> tuple[float, str | None]:
    """How long nobody may begin, and whose wait that is."""
    waiting = record.state in (State.PENDING, State.COOLING) if record is not None else holder is None
    if not waiting:
        return 0.0, None
    own = record.waits if record is not None else 0.0
    shut = gate.shut_for if gate is not None else 0.0
    if gate is not None and shut >= own:
        return shut, "group"
    of_group = record is not None and record.failure is not None and record.failure.group is not None
    return own, ("group" if of_group else "key") if own else None


def _why(
    record: Record | None, holder: Holder | None, gate: Gate | None, trouble: str | None
) -> tuple[str | None, str | None]:
    if trouble is not None:
        return LEASE_STORE_UNAVAILABLE, trouble
    if gate is not None:
        return gate.reason, gate.message or None
    if record is None:
        return None, None
    if record.state is State.RUNNING:
        return (None if holder else WORKER_LOST), None
    if record.failure is not None and record.failure.reason is not None:
        return record.failure.reason, None
    if record.state is State.DONE:
        return record.reason, None
    return (record.ended.value if record.ended else record.reason), record.reason


def _held(holder: Holder | None) -> Mapping[str, Any]:
    if holder is None:
        return {}
    return {"holder": holder.host, "call_id": holder.call_id, "lease_remaining": holder.remaining}


def _time(microseconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(microseconds / 1e6, UTC) if microseconds is not None else None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plainly(value) for name, value in values.items()}


def _plainly(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return [_plain(item) if isinstance(item, dict) else item for item in value]
    return value
