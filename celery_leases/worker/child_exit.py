"""What the worker's main process does after a pool child died: notice at once, close its attempt,
free its key.

It does what the child would have done, by owner token and fence, so it changes nothing if the child
has done it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from celery_leases.attempt.context import Context
from celery_leases.attempt.store_retries import retrying
from celery_leases.concurrency import greenlets, os_threads
from celery_leases.errors import StoreUnavailable
from celery_leases.protocol import events
from celery_leases.protocol.records import State
from celery_leases.protocol.settlement import ExitCause, child_exited
from celery_leases.protocol.verdicts import Call
from celery_leases.signals import logger
from celery_leases.worker import app_components
from celery_leases.worker.headers import Header, group_of, key_of

PATIENCE: Final = 1.0
"""The most seconds for which the main process delays the return of the message: the next child that
gets the message must find the key free, or the call waits until the lease expires.
"""

GONE_WITHIN: Final = 10.0
"""Seconds after which a killed process that still exists is left alone with its lease."""

LOOK_AGAIN: Final = 0.02
REPEATED: Final = 5
"""How often a step that the database did not answer is repeated."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeadChild:
    """One delivery that a pool child died with; *args* and *kwargs* are as Celery delivered
    them.
    """

    task: Any
    call_id: str
    token: str
    header: Header | None
    args: Any
    kwargs: Any
    retries: int
    pid: int
    cause: ExitCause

    def call(self) -> Call:
        """The call; raises the errors of the task's own ``lease_key``."""
        args, kwargs = self.args or (), self.kwargs or {}
        key = key_of(self.task, self.header, self.call_id, args, kwargs, self.retries)
        group = group_of(self.task, self.header, args, kwargs, self.retries)
        return Call(
            self.task.name,
            self.call_id,
            key,
            self.task.lease_options,
            token=self.token,
            group=group,
        )


class ChildExit:
    """One exit, handled in a thread of its own: a task's ``lease_key`` that hangs does not delay
    others.
    """

    def __init__(self, dead_child: DeadChild) -> None:
        self.dead_child = dead_child
        self.over = False
        #: The stores have been called, and have not answered yet.
        self.at_stores = False
        self._bell = os_threads.Wakeup()
        os_threads.start_thread(self._see_to)

    def wait(self, patience: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        self._bell.wait(patience)
        return self.over

    def _see_to(self) -> None:
        task, call_id = self.dead_child.task.name, self.dead_child.call_id
        try:
            until = os_threads.boot_clock() + GONE_WITHIN
            while _is_there(self.dead_child.pid) and os_threads.boot_clock() < until:
                os_threads.Wakeup().wait(LOOK_AGAIN)
            call = self.dead_child.call()
            self.at_stores = True
            with _stores:
                _close(self.dead_child, call)
        except BaseException as error:  # noqa: BLE001 - the lease ends with its ttl then, and the next claim counts
            logger.warning(
                "the process of %s[%s] died, but its key could not be freed: %r",
                task,
                call_id,
                error,
            )
        finally:
            self.over, self.at_stores = True, False
            self._bell.ring()


def close_dead(dead_child: DeadChild) -> None:
    """Close the attempt of a child that is gone or about to go. A child killed by Celery itself is
    not waited for.

    Nor is a child waited for while the stores have not answered for an earlier one: the main
    process has other work.
    """
    killed = dead_child.cause is ExitCause.KILLED
    if dead_child.pid == os.getpid() or (killed and _is_there(dead_child.pid)):
        return  # a pool of threads, or another child to which billiard has given the delivery: it is alive
    child_exit = ChildExit(dead_child)
    _late[:] = [late for late in _late if not late.over]
    patience = 0.0 if any(late.at_stores for late in _late) else PATIENCE
    if killed and not child_exit.wait(patience):
        _late.append(child_exit)
        logger.warning(
            "the process of %s[%s] died, and its key is not free yet",
            dead_child.task.name,
            dead_child.call_id,
        )


def call_off(revoked: DeadChild) -> None:
    """Write into its record that a call was revoked while it waited; in a thread, because the
    worker's loop must not wait.

    No child had ``revoked``, so only its call matters. If the stores do not answer, the record
    still says that the call runs again; nothing else depends on it.
    """
    if os_threads.green():
        greenlets.spawn(partial(_call_off, revoked))
    else:
        os_threads.start_thread(partial(_call_off, revoked))


def _call_off(revoked: DeadChild) -> None:
    try:
        call, parts = revoked.call(), app_components.parts_of(revoked.task.app, eager=False)
        with nullcontext() if os_threads.green() else _stores:
            if _written_off(parts, call):
                event = events.CallDropped(**call.subject, reason="it was revoked while it waited")
                parts.context.observer.observe(event)
    except Exception as error:  # noqa: BLE001 - as said above
        logger.warning(
            "%s[%s] was revoked, but its record could not be updated: %r",
            revoked.task.name,
            revoked.call_id,
            error,
        )


def _written_off(parts: app_components.AppParts, call: Call) -> bool:
    """Write that *call* was revoked, unless it runs, has finished, or the key is another call's."""
    record = _patiently(parts.context, lambda: parts.records.read(call.key.stored))
    if (
        record is None
        or record.call_id != call.call_id
        or record.state not in (State.PENDING, State.COOLING)
    ):
        return False
    return _patiently(parts.context, lambda: parts.records.call_off(record))


def watch(pid: int) -> None:
    """Make the pool reap child *pid* as soon as it is dead.

    Celery itself looks when the child's pipe closes, which is slightly too early, and then every
    five seconds.
    """
    global _readers  # noqa: PLW0603 - the loop of this process, as it was when last asked
    if _watched.get(pid) in _readers:
        return
    worker = app_components.worker_here()
    hub, pool = getattr(worker, "hub", None), getattr(worker, "pool", None)
    reap = getattr(pool, "maintain_pool", None)
    if hub is None or reap is None or pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    _readers = hub.readers
    if _watched.get(pid) in _readers:
        return
    with suppress(
        OSError
    ):  # it is gone already, or the kernel has no such handle: then the five seconds apply
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
    """Watch all children again: Celery's loop forgets every handle when it loses the broker's
    connection.
    """
    for pid in list(_watched):
        watch(pid)


# One thread at a time calls the stores, however many children have died.
_stores = os_threads.allocate_lock()
_late: list[ChildExit] = []
_watched: dict[int, int] = {}
_readers: Mapping[int, Any] = {}
"""What Celery's loop in this process reads, as far as it was asked."""


def _after_fork() -> None:
    global _stores  # noqa: PLW0603 - a lock held while forking stays locked in the child for ever
    _stores = os_threads.allocate_lock()
    _late.clear()  # they are the parent's
    for handle in _watched.values():
        os.close(handle)
    _watched.clear()


os.register_at_fork(after_in_child=_after_fork)


def _close(dead_child: DeadChild, call: Call) -> None:
    if _is_there(dead_child.pid):
        raise TimeoutError(f"process {dead_child.pid} is still there")
    parts = app_components.parts_of(dead_child.task.app, eager=False)
    context = parts.context
    settled: Exception | None = None
    try:
        _settle(context, call, dead_child)
        if dead_child.cause is ExitCause.REVOKED:  # a child that a signal ended cannot tell why
            _written_off(parts, call)
    except StoreUnavailable as error:
        settled = error
    if not context.leases.in_records:
        context.leases.release(call.key.stored, dead_child.token)
    if call.group is not None:
        context.gates.release_probe(call.group, dead_child.token)
    if settled is not None:
        raise settled


def _settle(context: Context, call: Call, dead_child: DeadChild) -> None:
    record = _patiently(context, lambda: context.records.read(call.key.stored))
    if record is None or not record.is_attempt(State.RUNNING, dead_child.token):
        return
    outcome = child_exited(call, record, dead_child.cause)
    if not _patiently(context, lambda: context.records.settle(record, outcome)):
        return
    if outcome.crashes > record.crashes:
        context.observer.observe(
            events.CrashSeen(**call.subject, crashes=outcome.crashes, host=record.holder)
        )
    took = (record.now - record.started_at) / 1e6
    context.observer.observe(events.AttemptSettled.by(call.subject, record, outcome, took, took))


def _patiently(context: Context, step: Callable[[], T]) -> T:
    """Take a step in the database, and repeat it for a short time."""
    return retrying(
        step, lambda: math.inf, context.clock, repeatable=lambda _, tries: tries < REPEATED
    )


def _is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
