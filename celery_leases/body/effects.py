"""One external action inside an attempt: the intent first, then the call, then its reply."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never

from celery_leases.body.effect_calls import Calls, EffectReply
from celery_leases.core import outcomes
from celery_leases.core.classifier.rules import Rules
from celery_leases.core.effects import (
    NAME_MAX,
    Begun,
    CallAgain,
    ComeBack,
    Effect,
    Found,
    Park,
    Scope,
    UseSaved,
    Verify,
    idempotency_key,
    in_doubt,
    on_found,
    reference_of,
    unkept,
    usable_name,
    was_executed,
)
from celery_leases.core.errors import (
    Cooldown,
    EffectMisused,
    LeaseLost,
    PermanentFailure,
    RetryLater,
    Snooze,
    StoreUnavailable,
    Uncertain,
)
from celery_leases.core.ports import Clock, EffectStore
from celery_leases.core.records import Record
from celery_leases.core.results import decode, encode
from celery_leases.core.rulings import Classification
from celery_leases.tenure import Tenure

MOVED_ON: Final = "the record has moved on"
KNOWN: Final = Rules.default()


@dataclass
class Effects:
    """Performs the effects of one attempt. ``judge`` says what the rules make of an error, ``closed`` keeps signals
    away from a step, ``prefix`` is the one of all keys, ``scope`` that of the attempt's effects, ``patience`` how long
    to try to note a reply, in seconds.
    """

    tenure: Tenure
    record: Record
    store: EffectStore
    clock: Clock
    judge: Callable[[BaseException], Classification]
    closed: Callable[[], AbstractContextManager[None]]
    prefix: str
    scope: Scope
    patience: float
    result_max: int
    _names: set[str] = field(default_factory=set, init=False)

    def perform(self, name: str, calls: Calls) -> EffectReply:
        """Make the effect *name* happen once; see :meth:`celery_leases.handle.Lease.effect`."""
        self._check_name(name)
        key = idempotency_key(self.prefix, self.record.stored_key, name, self.scope.name)
        begun = self._begin(name, key)
        if isinstance(begun, Found):
            return self._settle_found(begun.effect, calls)
        return self._call(begun.effect, calls)

    def _check_name(self, name: str) -> None:
        if not usable_name(name):
            raise EffectMisused(f"effect({name!r}): name it by a text of 1 to {NAME_MAX} characters", self.record.key)
        if name in self._names:
            message = f"{self.record.key}: effect {name!r} twice in one attempt; give each its own name"
            raise EffectMisused(message, self.record.key, name)
        self._names.add(name)

    def _begin(self, name: str, key: str, taken: int | None = None) -> Begun | Found:
        """Commit the intent, again while that is unknown: repeating it is harmless, leaving one in doubt is not."""
        until = self.clock.now() + self.patience
        tries = 0
        while True:
            try:
                self.tenure.check()
                return self._begin_once(name, key, taken)
            except StoreUnavailable as error:
                pause = outcomes.settle_pause(tries)
                tries += 1
                if error.executed is False or self.clock.now() + pause > until:
                    raise
                self.clock.sleep(pause)

    def _begin_once(self, name: str, key: str, taken: int | None) -> Begun | Found:
        begun: Begun | Found | None = None
        try:
            with self.closed():
                begun = self.store.begin(self.record, name, key, self.scope, taken)
        except BaseException:  # what came meanwhile ends the body, so that no call is made
            if isinstance(begun, Begun) and taken is None:
                self._withdraw(begun.effect)
            raise
        if begun is None:
            raise LeaseLost(f"{self.record.key}: the lease is lost: {MOVED_ON}", self.record.key, MOVED_ON)
        return begun

    def _take_over(self, effect: Effect) -> Effect:
        begun = self._begin(effect.name, effect.idempotency_key, effect.fence)
        if isinstance(begun, Found):  # it was noted at the last moment by the attempt that made it
            message = f"{self.record.key}: effect {effect.name!r} has changed meanwhile"
            raise Snooze(1.0, message)
        return begun.effect

    def _settle_found(self, effect: Effect, calls: Calls) -> EffectReply:
        what = on_found(
            effect,
            verifies=calls.verify is not None,
            verify_after=calls.verify_after,
            uncertain=calls.uncertain,
        )
        match what:
            case UseSaved():
                return self._saved(effect, calls)
            case ComeBack(delay):
                raise Snooze(delay, f"effect {effect.name!r} is in doubt, and too young to be looked up")
            case Verify():
                return self._verify(effect, calls)
            case CallAgain():
                return self._call(self._take_over(effect), calls, doubted=True)
            case Park():
                raise in_doubt(self.record.key, effect, "no verify was given")
            case _ as never:
                assert_never(never)

    def _saved(self, effect: Effect, calls: Calls) -> EffectReply:
        if effect.result is None and effect.reference is None:
            return self._found_again(effect, calls)
        value, reference = decode(effect.result), effect.reference
        if reference is None and calls.reference is not None:  # it raised when the reply came
            reference = reference_of(calls.reference, value)
        return EffectReply(value, reference, effect.idempotency_key, saved=True)

    def _found_again(self, effect: Effect, calls: Calls) -> EffectReply:
        """The reply of an effect that is done without one kept, as ``verify`` finds it; nothing is written."""
        if calls.verify is None:
            raise unkept(self.record.key, effect, "no verify was given to ask for it")
        try:
            found = self._looked_up(effect, calls)
        except Uncertain as error:
            raise unkept(self.record.key, effect, str(error)) from error
        if found is None:
            raise unkept(self.record.key, effect, "verify did not find it")
        self.tenure.check()
        text, missing = encode(found, self.result_max)
        reference = reference_of(calls.reference, found) if calls.reference is not None else None
        if missing is not None and reference is None:
            raise unkept(self.record.key, effect, missing)
        return EffectReply(decode(text), reference, effect.idempotency_key, saved=True)

    def _verify(self, effect: Effect, calls: Calls) -> EffectReply:
        try:
            found = self._looked_up(effect, calls)
        except Uncertain as error:
            raise in_doubt(self.record.key, effect, str(error)) from error
        ours = self._take_over(effect)
        if found is None:
            return self._call(ours, calls)
        return replace(self._note(ours, found, calls), saved=True)

    def _looked_up(self, effect: Effect, calls: Calls) -> Any:
        """What ``verify`` says; what would be taken for a reply and is none is refused, and the effect as it was."""
        assert calls.verify is not None
        found = calls.verify(effect.idempotency_key)
        if found is False or _has_not_run(found):
            raise EffectMisused(
                f"{self.record.key}: effect {effect.name!r}: verify returned {found!r}; return the reply as the call "
                "would have, or None when the other side has none",
                self.record.key,
                effect.name,
            )
        return found

    def _call(self, effect: Effect, calls: Calls, *, doubted: bool = False) -> EffectReply:
        """Make the call; *doubted*: an earlier one may have been carried out, whatever becomes of this one."""
        outside = sys.exc_info()[1]
        try:
            self.tenure.check()  # the intent may have taken long to commit
        except (LeaseLost, StoreUnavailable):
            if not doubted:
                self._withdraw(effect)
            raise
        try:
            reply = calls.call(effect.idempotency_key)
        except (Exception, Snooze) as error:
            with self.closed():  # what an attribute of the error raises is no interrupt then
                if not doubted and self._was_executed(error, outside) is False:
                    self._withdraw(effect)
            raise
        if _has_not_run(reply):
            if not doubted:
                self._withdraw(effect)
            raise EffectMisused(
                f"{self.record.key}: effect {effect.name!r}: the callable returned a {type(reply).__name__}, so that "
                "nothing was called yet; let it run to its end, as by asyncio.run(), and return the reply",
                self.record.key,
                effect.name,
            )
        return self._note(effect, reply, calls)

    def _was_executed(self, error: BaseException, outside: BaseException | None) -> bool | None:
        """What is known of a call that raised; an error that was there *outside* the call says nothing of it.

        What the task asks for stands for the error in whose place it was raised, if there is one.
        """
        while isinstance(error, Cooldown | RetryLater | Snooze | PermanentFailure):
            cause = error.__cause__ or error.__context__
            if cause is None or cause is outside:
                return None  # it may have looked before it called, or at a reply that said nothing
            error = cause
        return was_executed(KNOWN.judge(error, 0.0, self.clock.now), self.judge(error))

    def _withdraw(self, effect: Effect) -> None:
        with suppress(StoreUnavailable), self.closed():  # it stays in doubt, and is looked up later
            self.store.withdraw(effect)

    def _note(self, effect: Effect, reply: Any, calls: Calls) -> EffectReply:
        """Write the reply down: it is a fact about the world, and counts whether the lease does or not."""
        with self.closed():
            text, missing = encode(reply, self.result_max)
            reference, trouble = None, None
            if calls.reference is not None:
                try:
                    reference = reference_of(calls.reference, reply)
                except Exception as error:  # noqa: BLE001 - the effect has happened, and that comes first
                    trouble = error
            accepted = self._finish(effect, text, reference)
            if accepted and self.record.crashes and not self.tenure.work.progressed:
                with suppress(StoreUnavailable):  # then the next effect says so
                    self.store.clear_crashes(self.record)
            self.tenure.work.progressed |= accepted
        if not accepted:
            message = f"{self.record.key}: a later attempt has taken effect {effect.name!r} over"
            raise LeaseLost(message, self.record.key, MOVED_ON)
        if trouble is not None:
            raise trouble
        if missing is not None and reference is None:
            raise unkept(self.record.key, effect, missing)
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


def _has_not_run(given: object) -> bool:
    """Whether it is the beginning of a call and not what one has come to."""
    return inspect.isawaitable(given) or inspect.isgenerator(given) or inspect.isasyncgen(given)
