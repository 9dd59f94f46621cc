"""One external action inside an attempt: the intent first, then the call, then its reply."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

from celery_leases.core import outcomes
from celery_leases.core.durations import seconds
from celery_leases.core.effects import (
    Begun,
    CallAgain,
    ComeBack,
    Effect,
    Found,
    OnUncertain,
    Park,
    UseSaved,
    Verify,
    idempotency_key,
    on_found,
    was_executed,
)
from celery_leases.core.errors import EffectMisused, LeaseLost, ResultMissing, Snooze, StoreUnavailable, Uncertain
from celery_leases.core.ports import Clock, EffectStore
from celery_leases.core.records import Record
from celery_leases.core.results import decode, encode
from celery_leases.core.rulings import Judgement
from celery_leases.renewal import Tenure

NAME_MAX: Final = 255
MOVED_ON: Final = "the record has moved on"


@dataclass(frozen=True, slots=True)
class EffectReply:
    """What an effect has come to: the reply as JSON gives it back, and the other side's own name for it.

    ``saved``: it was made by an earlier attempt, and no call was made now.
    """

    value: Any
    reference: str | None
    idempotency_key: str
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """What the user gives for one effect."""

    call: Callable[[str], Any]
    reference: Callable[[Any], Any] | None
    verify: Callable[[str], Any] | None
    verify_after: float
    uncertain: OnUncertain


@dataclass
class Effects:
    """Performs the effects of one attempt. ``judge`` says what the rules make of an error, ``closed`` keeps signals
    away from a step, ``prefix`` is the one of all keys, ``patience`` how long to try to note a reply, in seconds.
    """

    tenure: Tenure
    record: Record
    store: EffectStore
    clock: Clock
    judge: Callable[[BaseException], Judgement]
    closed: Callable[[], AbstractContextManager[None]]
    prefix: str
    patience: float
    result_max: int

    def __post_init__(self) -> None:
        self._names: set[str] = set()

    def perform(self, name: str, calls: Calls) -> EffectReply:
        """Make the effect *name* happen once; see :meth:`celery_leases.handle.Lease.effect`."""
        self._check_name(name)
        key = idempotency_key(self.prefix, self.record.stored_key, name, self.record.generation)
        begun = self._begin(name, key)
        if isinstance(begun, Found):
            answer = self._settle_found(begun.effect, calls)
            if isinstance(answer, EffectReply):
                return answer
            begun = answer
        return self._call(begun.effect, calls)

    def is_over(self) -> bool:
        """Whether the record is not running under this attempt any more."""
        return not self.store.is_running(self.record)

    def _check_name(self, name: str) -> None:
        given: object = name
        if not isinstance(given, str) or not given.strip() or len(given) > NAME_MAX or "\x00" in given:
            raise EffectMisused(f"effect({name!r}): name it by a text of 1 to {NAME_MAX} characters", self.record.key)
        if name in self._names:
            message = f"{self.record.key}: effect {name!r} twice in one attempt; give each its own name"
            raise EffectMisused(message, self.record.key, name)
        self._names.add(name)

    def _begin(self, name: str, key: str, taken: int | None = None) -> Begun | Found:
        self.tenure.check()
        with self.closed():
            begun = self.store.begin(self.record, name, key, taken)
        if begun is None:
            raise LeaseLost(f"{self.record.key}: the lease is lost: {MOVED_ON}", self.record.key, MOVED_ON)
        return begun

    def _take_over(self, effect: Effect) -> Begun:
        begun = self._begin(effect.name, effect.idempotency_key, effect.fence)
        if isinstance(begun, Found):  # it was noted at the last moment by the attempt that made it
            message = f"{self.record.key}: effect {effect.name!r} has changed meanwhile"
            raise Snooze(1.0, message)
        return begun

    def _settle_found(self, effect: Effect, calls: Calls) -> EffectReply | Begun:
        what = on_found(
            effect,
            verifies=calls.verify is not None,
            verify_after=calls.verify_after,
            uncertain=calls.uncertain,
        )
        match what:
            case UseSaved():
                return self._saved(effect)
            case ComeBack(delay):
                raise Snooze(delay, f"effect {effect.name!r} is in doubt, and too young to be looked up")
            case Verify():
                return self._verify(effect, calls)
            case CallAgain():
                return self._take_over(effect)
            case Park():
                raise self._uncertain(effect, "no verify was given")
            case _ as never:
                assert_never(never)

    def _saved(self, effect: Effect) -> EffectReply:
        if effect.result is None:
            message = f"{self.record.key}: effect {effect.name!r} is done, but its reply was not kept"
            raise ResultMissing(message, self.record.key, "effect")
        return EffectReply(decode(effect.result), effect.reference, effect.idempotency_key, saved=True)

    def _verify(self, effect: Effect, calls: Calls) -> EffectReply | Begun:
        assert calls.verify is not None
        try:
            found = calls.verify(effect.idempotency_key)
        except Uncertain as error:
            raise self._uncertain(effect, str(error)) from error
        begun = self._take_over(effect)
        if found is None:
            return begun
        reply = self._note(begun.effect, found, calls)
        return replace(reply, saved=True)

    def _uncertain(self, effect: Effect, why: str) -> Uncertain:
        message = (
            f"{self.record.key}: whether effect {effect.name!r} was carried out is not known ({why}); look for "
            f"idempotency key {effect.idempotency_key} there, then: leases resolve"
        )
        return Uncertain(message, self.record.key, effect.name, effect.idempotency_key)

    def _call(self, effect: Effect, calls: Calls) -> EffectReply:
        try:
            self.tenure.check()  # the intent may have taken long to commit
        except LeaseLost:
            self._withdraw(effect)
            raise
        try:
            reply = calls.call(effect.idempotency_key)
        except Exception as error:
            if was_executed(self.judge(error)) is False:
                self._withdraw(effect)
            raise
        return self._note(effect, reply, calls)

    def _withdraw(self, effect: Effect) -> None:
        with suppress(StoreUnavailable), self.closed():  # it stays in doubt, and is looked up later
            self.store.withdraw(effect)

    def _note(self, effect: Effect, reply: Any, calls: Calls) -> EffectReply:
        """Write the reply down: it is a fact about the world, and counts whether the lease does or not."""
        text, missing = encode(reply, self.result_max)
        reference, trouble = None, None
        if calls.reference is not None:
            try:
                found = calls.reference(reply)
                reference = str(found) if found is not None else None
            except Exception as error:  # noqa: BLE001 - the effect has happened, and that comes first
                trouble = error
        with self.closed():
            accepted = self._finish(effect, text, reference)
            if accepted and self.record.crashes and not self.tenure.work.progressed:
                with suppress(StoreUnavailable):  # then the next effect says so
                    self.store.clear_crashes(self.record)
        if not accepted:
            message = f"{self.record.key}: a later attempt has taken effect {effect.name!r} over"
            raise LeaseLost(message, self.record.key, MOVED_ON)
        self.tenure.work.progressed = True
        if missing is not None:
            message = (
                f"{self.record.key}: effect {effect.name!r} has happened, but its reply is not kept ({missing}); let "
                "the callable return plain values of moderate size, or pass reference="
            )
            raise EffectMisused(message, self.record.key, effect.name)
        if trouble is not None:
            raise trouble
        self.tenure.check()
        return EffectReply(decode(text), reference, effect.idempotency_key)

    def _finish(self, effect: Effect, text: str | None, reference: str | None) -> bool:
        until = self.clock.now() + self.patience
        tries = 0
        while True:
            try:
                return self.store.finish(effect, text, reference)
            except StoreUnavailable:
                pause = outcomes.settle_pause(tries)
                tries += 1
                if self.clock.now() + pause > until:
                    raise
                self.clock.sleep(pause)


def calls_of(
    call: Callable[[str], Any],
    reference: Callable[[Any], Any] | None,
    verify: Callable[[str], Any] | None,
    verify_after: float,
    uncertain: object,
) -> Calls:
    """What the user gave for one effect, checked; raises TypeError or ValueError."""
    for name, given in (("call", call), ("reference", reference), ("verify", verify)):
        optional = name != "call" and given is None
        if not (optional or callable(given)):
            raise TypeError(f"effect({name}={given!r}): give a callable")
    if uncertain not in ("stop", "rerun"):
        raise ValueError(f"effect(uncertain={uncertain!r}): write 'stop' or 'rerun'")
    after = seconds(verify_after, "effect: verify_after", zero=True)
    return Calls(call, reference, verify, after, "rerun" if uncertain == "rerun" else "stop")


def unleased(key: str, calls: Calls) -> EffectReply:
    """An effect in a body that runs without a lease: the call, and nothing around it."""
    reply = calls.call(key)
    reference = calls.reference(reply) if calls.reference is not None else None
    return EffectReply(reply, str(reference) if reference is not None else None, key)
