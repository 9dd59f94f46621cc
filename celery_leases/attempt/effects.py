"""One external action inside an attempt: the intent first, then the call, then its reply."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never

from celery_leases.attempt.effect_arguments import Calls, EffectReply
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.store_retries import retrying
from celery_leases.errors import (
    Cooldown,
    EffectMisused,
    LeaseLost,
    PermanentFailure,
    RetryLater,
    Snooze,
    StoreUnavailable,
    Uncertain,
)
from celery_leases.failures.actions import Classification
from celery_leases.failures.classifier import Rules
from celery_leases.protocol.effects import (
    NAME_MAX,
    AskOperator,
    Begun,
    Effect,
    Found,
    RepeatCall,
    Scope,
    UseSaved,
    Verify,
    VerifyLater,
    idempotency_key,
    is_valid_name,
    on_found,
    outcome_unknown,
    reference_of,
    reply_not_stored,
    was_executed,
)
from celery_leases.protocol.ports import Clock, EffectStore
from celery_leases.protocol.records import Record
from celery_leases.protocol.results import decode, encode

MOVED_ON: Final = "the record has moved on"
KNOWN: Final = Rules.default()


@dataclass
class Effects:
    """Performs the effects of one attempt. ``classify`` classifies an error by the rules,
    ``closed`` defers signals during a step, ``prefix`` is that of all keys, ``scope`` that of the
    attempt's effects, ``patience`` how long to try to write a reply, in seconds.
    """

    held_lease: HeldLease
    record: Record
    store: EffectStore
    clock: Clock
    classify: Callable[[BaseException], Classification]
    closed: Callable[[], AbstractContextManager[None]]
    prefix: str
    scope: Scope
    patience: float
    result_max: int
    _names: set[str] = field(default_factory=set, init=False)

    def perform(self, name: str, calls: Calls) -> EffectReply:
        """Make the effect *name* happen once; see :meth:`celery_leases.lease.Lease.effect`."""
        self._check_name(name)
        key = idempotency_key(self.prefix, self.record.stored_key, name, self.scope.name)
        begun = self._begin(name, key)
        if isinstance(begun, Found):
            return self._settle_found(begun.effect, calls)
        return self._call(begun.effect, calls)

    def _check_name(self, name: str) -> None:
        if not is_valid_name(name):
            raise EffectMisused(
                f"effect({name!r}): give a name of 1 to {NAME_MAX} characters",
                self.record.key,
            )
        if name in self._names:
            message = (
                f"{self.record.key}: effect {name!r} was used twice in one attempt; "
                "give each effect a name of its own"
            )
            raise EffectMisused(message, self.record.key, name)
        self._names.add(name)

    def _begin(self, name: str, key: str, taken: int | None = None) -> Begun | Found:
        """Commit the intent, and repeat while its outcome is unknown: repeating it does no harm,
        but an effect with unknown outcome does.
        """

        def may_be_open(error: StoreUnavailable, _: int) -> bool:
            return error.executed is not False

        until = self.clock.now() + self.patience
        return retrying(
            lambda: self._begin_once(name, key, taken),
            lambda: until,
            self.clock,
            repeatable=may_be_open,
        )

    def _begin_once(self, name: str, key: str, taken: int | None) -> Begun | Found:
        self.held_lease.check()
        begun: Begun | Found | None = None
        try:
            with self.closed():
                begun = self.store.begin(self.record, name, key, self.scope, taken)
        except BaseException:  # an interrupt during the step ends the body, so no call is made
            if isinstance(begun, Begun) and taken is None:
                self._withdraw(begun.effect)
            raise
        if begun is None:
            raise LeaseLost(
                f"{self.record.key}: the lease is lost: {MOVED_ON}", self.record.key, MOVED_ON
            )
        return begun

    def _take_over(self, effect: Effect) -> Effect:
        begun = self._begin(effect.name, effect.idempotency_key, effect.fence)
        if isinstance(begun, Found):  # the attempt that made it has just written its reply
            message = f"{self.record.key}: another attempt has changed effect {effect.name!r}"
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
            case VerifyLater(delay):
                raise Snooze(
                    delay,
                    f"the outcome of effect {effect.name!r} is unknown, and verify_after has not passed yet",
                )
            case Verify():
                return self._verify(effect, calls)
            case RepeatCall():
                return self._call(self._take_over(effect), calls, doubted=True)
            case AskOperator():
                raise outcome_unknown(self.record.key, effect, "no verify was given")
            case _ as never:
                assert_never(never)

    def _saved(self, effect: Effect, calls: Calls) -> EffectReply:
        if effect.result is None and effect.reference is None:
            return self._found_again(effect, calls)
        value, reference = decode(effect.result), effect.reference
        if reference is None and calls.reference is not None:  # reading the reply raised
            reference = reference_of(calls.reference, value)
        return EffectReply(value, reference, effect.idempotency_key, saved=True)

    def _found_again(self, effect: Effect, calls: Calls) -> EffectReply:
        """The reply, from ``verify``, of a done effect without a stored reply; nothing is
        written.
        """
        if calls.verify is None:
            raise reply_not_stored(self.record.key, effect, "no verify was given to look it up")
        try:
            found = self._looked_up(effect, calls)
        except Uncertain as error:
            raise reply_not_stored(self.record.key, effect, str(error)) from error
        if found is None:
            raise reply_not_stored(self.record.key, effect, "verify did not find it")
        self.held_lease.check()
        text, missing = encode(found, self.result_max)
        reference = reference_of(calls.reference, found) if calls.reference is not None else None
        if missing is not None and reference is None:
            raise reply_not_stored(self.record.key, effect, missing)
        return EffectReply(decode(text), reference, effect.idempotency_key, saved=True)

    def _verify(self, effect: Effect, calls: Calls) -> EffectReply:
        try:
            found = self._looked_up(effect, calls)
        except Uncertain as error:
            raise outcome_unknown(self.record.key, effect, str(error)) from error
        ours = self._take_over(effect)
        if found is None:
            return self._call(ours, calls)
        return replace(self._note(ours, found, calls), saved=True)

    def _looked_up(self, effect: Effect, calls: Calls) -> Any:
        """The result of ``verify``; a value that is not a possible reply is refused, and the effect
        stays unchanged.
        """
        assert calls.verify is not None
        found = calls.verify(effect.idempotency_key)
        if found is False or _has_not_run(found):
            raise EffectMisused(
                f"{self.record.key}: effect {effect.name!r}: verify returned {found!r}; return the reply that the "
                "call would have returned, or None if the other system has none",
                self.record.key,
                effect.name,
            )
        return found

    def _call(self, effect: Effect, calls: Calls, *, doubted: bool = False) -> EffectReply:
        """Make the call; *doubted*: an earlier call may have been executed, whatever the outcome of
        this one.
        """
        outside = sys.exc_info()[1]
        try:
            self.held_lease.check()  # committing the intent may have taken long
        except (LeaseLost, StoreUnavailable):
            if not doubted:
                self._withdraw(effect)
            raise
        try:
            reply = calls.call(effect.idempotency_key)
        except (Exception, Snooze) as error:
            with self.closed():  # an exception of the error's attributes is not an interrupt then
                if not doubted and self._was_executed(error, outside) is False:
                    self._withdraw(effect)
            raise
        if _has_not_run(reply):
            if not doubted:
                self._withdraw(effect)
            raise EffectMisused(
                f"{self.record.key}: effect {effect.name!r}: the callable returned a {type(reply).__name__}, so "
                "nothing was called yet; run it to its end, for example with asyncio.run(), and return the reply",
                self.record.key,
                effect.name,
            )
        return self._note(effect, reply, calls)

    def _was_executed(self, error: BaseException, outside: BaseException | None) -> bool | None:
        """Whether a call that raised was executed. An error that existed *outside* the call proves
        nothing about it.

        If the task raised Cooldown, RetryLater or the like, classify the error it was raised from.
        """
        while isinstance(error, Cooldown | RetryLater | Snooze | PermanentFailure):
            cause = error.__cause__ or error.__context__
            if cause is None or cause is outside:
                return None  # it may have looked before it called, or at a reply without an answer
            error = cause
        return was_executed(KNOWN.classify(error, 0.0, self.clock.now), self.classify(error))

    def _withdraw(self, effect: Effect) -> None:
        with (
            suppress(StoreUnavailable),
            self.closed(),
        ):  # its outcome stays unknown, and is looked up later
            self.store.withdraw(effect)

    def _note(self, effect: Effect, reply: Any, calls: Calls) -> EffectReply:
        """Write the reply. It is a fact, and counts whether the lease does or not."""
        with self.closed():
            text, missing = encode(reply, self.result_max)
            reference, trouble = None, None
            if calls.reference is not None:
                try:
                    reference = reference_of(calls.reference, reply)
                except Exception as error:  # noqa: BLE001 - the effect has happened, and that comes first
                    trouble = error
            until = self.clock.now() + self.patience
            accepted = retrying(
                lambda: self.store.finish(effect, text, reference),
                lambda: until,
                self.clock,
            )
            if accepted and self.record.crashes and not self.held_lease.work.progressed:
                with suppress(StoreUnavailable):  # then the next effect raises it
                    self.store.clear_crashes(self.record)
            self.held_lease.work.progressed |= accepted
        if not accepted:
            message = f"{self.record.key}: a later attempt has taken over effect {effect.name!r}"
            raise LeaseLost(message, self.record.key, MOVED_ON)
        if trouble is not None:
            raise trouble
        if missing is not None and reference is None:
            raise reply_not_stored(self.record.key, effect, missing)
        self.held_lease.check()
        return EffectReply(decode(text), reference, effect.idempotency_key)


def _has_not_run(given: object) -> bool:
    """Whether it only prepares a call (a coroutine or generator), and is not its result."""
    return inspect.isawaitable(given) or inspect.isgenerator(given) or inspect.isasyncgen(given)
