"""What the worker's main process does for a pool child that has died: notice at once, close its attempt, free its key.

It does by owner token and fence what the child would have done, so it changes nothing where the child has done it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from celery_leases.core import events
from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.outcomes import Death, died, settle_pause
from celery_leases.core.records import State
from celery_leases.core.verdicts import Call
from celery_leases.process import greenlets, native
from celery_leases.seam import apps
from celery_leases.seam.pin import Header, group_of, key_of
from celery_leases.signals import logger

PATIENCE: Final = 1.0
"""Seconds for which the main process waits for a burial before it gives the message back: the next child that takes
it must find the key free, or it would come back only when the lease ends."""

GONE_WITHIN: Final = 10.0
"""Seconds after which a process that was killed, but is still there, is left alone with its lease."""

LOOK_AGAIN: Final = 0.02


@dataclass(frozen=True, slots=True)
class Deceased:
    """One delivery that a pool child died with; *args* and *kwargs* are as Celery delivered them."""

    task: Any
    call_id: str
    token: str
    header: Header | None
    args: Any
    kwargs: Any
    retries: int
    pid: int
    death: Death

    def call(self) -> Call:
        """The call it was; raises what the task's own ``lease_key`` raises."""
        args, kwargs = self.args or (), self.kwargs or {}
        key = key_of(self.task, self.header, self.call_id, args, kwargs, self.retries)
        group = group_of(self.task, self.header, args, kwargs, self.retries)
        return Call(self.task.name, self.call_id, key, self.task.lease_options, token=self.token, group=group)


class Burial:
    """One death that is seen to, in a thread of its own: a task's ``lease_key`` that hangs holds up no other."""

    def __init__(self, deceased: Deceased) -> None:
        self.deceased = deceased
        self.over = False
        #: The stores have been asked, and have not answered yet.
        self.at_stores = False
        self._bell = native.Bell()
        native.start_thread(self._see_to)

    def wait(self, patience: float) -> bool:
        """Wait for its end; whether that has come."""
        self._bell.wait(patience)
        return self.over

    def _see_to(self) -> None:
        task, call_id = self.deceased.task.name, self.deceased.call_id
        try:
            until = native.boot_clock() + GONE_WITHIN
            while _is_there(self.deceased.pid) and native.boot_clock() < until:
                native.Bell().wait(LOOK_AGAIN)
            call = self.deceased.call()
            self.at_stores = True
            with _stores:
                _close(self.deceased, call)
        except BaseException as error:  # noqa: BLE001 - the lease ends with its ttl then, and the next claim counts
            logger.warning("%s[%s] died, but its key is not freed: %r", task, call_id, error)
        finally:
            self.over, self.at_stores = True, False
            self._bell.ring()


def bury(deceased: Deceased) -> None:
    """Close the attempt of a child that is gone or about to go. A child killed by Celery itself is not waited for.

    Nor is any while the stores have not answered for one before it: the main process has more to do.
    """
    killed = deceased.death is Death.KILLED
    if deceased.pid == os.getpid() or (killed and _is_there(deceased.pid)):
        return  # a pool of threads, or another child that billiard has given the delivery to: it lives
    burial = Burial(deceased)
    _late[:] = [late for late in _late if not late.over]
    patience = 0.0 if any(late.at_stores for late in _late) else PATIENCE
    if killed and not burial.wait(patience):
        _late.append(burial)
        logger.warning("%s[%s] died, and its key is not free yet", deceased.task.name, deceased.call_id)


def call_off(revoked: Deceased) -> None:
    """Note in its record that a call was revoked while it waited; in a thread, as the worker's loop must not wait.

    ``revoked`` was with no child, so nothing of it but the call counts. Where the stores do not answer, the record
    goes on saying that the call comes back; nothing else depends on it.
    """
    if native.green():
        greenlets.spawn(partial(_call_off, revoked))
    else:
        native.start_thread(partial(_call_off, revoked))


def _call_off(revoked: Deceased) -> None:
    try:
        call, parts = revoked.call(), apps.parts_of(revoked.task.app)
        with nullcontext() if native.green() else _stores:
            record = _patiently(parts, lambda: parts.records.read(call.key.stored))
            if record is None or record.call_id != call.call_id or record.state not in (State.PENDING, State.COOLING):
                return
            if _patiently(parts, lambda: parts.records.call_off(record)):
                event = events.CallDropped(**call.subject, reason="it was revoked while it waited")
                parts.execution.entry.observer.observe(event)
    except Exception as error:  # noqa: BLE001 - as said above
        logger.warning(
            "%s[%s] was revoked, and its record does not say so: %r", revoked.task.name, revoked.call_id, error
        )


def watch(pid: int) -> None:
    """Have the pool reap child *pid* as soon as it is dead.

    Celery itself looks when the child's pipe closes, which is a moment too early, and then every five seconds.
    """
    global _readers  # noqa: PLW0603 - the loop of this process, as it was when last asked
    if _watched.get(pid) in _readers:
        return
    worker = apps.worker_here()
    hub, pool = getattr(worker, "hub", None), getattr(worker, "pool", None)
    reap = getattr(pool, "maintain_pool", None)
    if hub is None or reap is None or pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    _readers = hub.readers
    if _watched.get(pid) in _readers:
        return
    with suppress(OSError):  # it is gone already, or the kernel knows no such thing: then the five seconds remain
        if pid not in _watched:
            _watched[pid] = os.pidfd_open(pid)
        handle = _watched[pid]

        def gone() -> None:
            hub.remove(handle)
            os.close(handle)
            _watched.pop(pid, None)
            reap()

        hub.add_reader(handle, gone)


def watch_again() -> None:
    """Watch all children again: Celery's loop forgets every handle when it loses the broker's connection."""
    for pid in list(_watched):
        watch(pid)


# One at a time talks to the stores, however many have died.
_stores = native.allocate_lock()
_late: list[Burial] = []
_watched: dict[int, int] = {}
_readers: Mapping[int, Any] = {}
"""What Celery's loop in this process reads, as far as it was asked."""


def _after_fork() -> None:
    global _stores  # noqa: PLW0603 - a lock held while forking stays locked in the child for ever
    _stores = native.allocate_lock()
    _late.clear()  # they are the parent's
    for handle in _watched.values():
        os.close(handle)
    _watched.clear()


os.register_at_fork(after_in_child=_after_fork)


def _close(deceased: Deceased, call: Call) -> None:
    if _is_there(deceased.pid):
        raise TimeoutError(f"process {deceased.pid} is still there")
    parts = apps.parts_of(deceased.task.app)
    leases, stored = parts.parts.leases, call.key.stored
    settled: Exception | None = None
    try:
        _settle(parts, call, deceased)
    except StoreUnavailable as error:
        settled = error
    if not leases.in_records:
        leases.release(stored, deceased.token)
    if call.group is not None:
        leases.give_back_probe(call.group, deceased.token)
    if settled is not None:
        raise settled


def _settle(parts: apps.AppParts, call: Call, deceased: Deceased) -> None:
    record = _patiently(parts, lambda: parts.records.read(call.key.stored))
    if record is None or (record.state, record.owner) != (State.RUNNING, deceased.token):
        return
    outcome = died(call, record, deceased.death)
    if not _patiently(parts, lambda: parts.records.settle(record, outcome)):
        return
    observer = parts.execution.entry.observer
    if outcome.crashes > record.crashes:
        observer.observe(events.CrashSeen(**call.subject, crashes=outcome.crashes, host=record.holder))
    observer.observe(events.AttemptSettled.by(call.subject, outcome, (record.now - record.started_at) / 1e6))


def _patiently(parts: apps.AppParts, step: Any) -> Any:
    """Take a step in the database, again for a little while."""
    for tries in range(5):
        try:
            return step()
        except StoreUnavailable:
            parts.clock.sleep(settle_pause(tries))
    return step()


def _is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
