"""In the worker's main process: notices at once that a pool child died, closes its attempt and
releases its key.

These steps compare owner token and fence, as in the child. So they change nothing if the child has
done them already.
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

CLOSE_TIMEOUT: Final = 1.0
"""The most seconds for which the main process delays the return of the message to the broker. The
child that gets the message next must find the key free, or the call waits until the lease expires.
"""

EXIT_TIMEOUT: Final = 10.0
"""Seconds to wait for the end of a killed process. If it still exists then, its lease is not
released.
"""

POLL_INTERVAL: Final = 0.02
MAX_REPEATS: Final = 5
"""How often a step is repeated if the database does not answer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeadChild:
    """One delivery and the pool child that died with it; *args* and *kwargs* are as Celery
    delivered them.
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
        """The call of the delivery; raises what the task's own ``lease_key`` raises."""
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
    """Handles one exit in a thread of its own, so that a task's ``lease_key`` that hangs does not
    delay other exits.
    """

    def __init__(self, dead_child: DeadChild) -> None:
        self.dead_child = dead_child
        self.ended = False
        #: The stores are called, or waited for.
        self.uses_stores = False
        self._wakeup = os_threads.Wakeup()
        os_threads.start_thread(self._run)

    def wait(self, timeout: float) -> bool:
        """Wait until the exit is handled; return whether it is."""
        self._wakeup.wait(timeout)
        return self.ended

    def _run(self) -> None:
        task, call_id = self.dead_child.task.name, self.dead_child.call_id
        try:
            until = os_threads.boot_clock() + EXIT_TIMEOUT
            while _exists(self.dead_child.pid) and os_threads.boot_clock() < until:
                os_threads.Wakeup().wait(POLL_INTERVAL)
            call = self.dead_child.call()
            self.uses_stores = True
            with _stores_lock:
                _close(self.dead_child, call)
        except BaseException as error:  # noqa: BLE001 - the lease expires, and the next claim counts the crash
            logger.warning(
                "the process of %s[%s] died, but its key could not be released: %r",
                task,
                call_id,
                error,
            )
        finally:
            self.ended, self.uses_stores = True, False
            self._wakeup.notify()


def close_dead(dead_child: DeadChild) -> None:
    """Close the attempt of a child that has exited or is about to.

    Waits until this is done if the child died by itself, so that the next child finds the key free.
    It does not wait after Celery has killed the child, or while the stores have not answered for an
    earlier exit.
    """
    killed = dead_child.cause is ExitCause.KILLED
    if dead_child.pid == os.getpid() or (killed and _exists(dead_child.pid)):
        return  # the process is alive: a pool of threads, or billiard gave the delivery to another child
    child_exit = ChildExit(dead_child)
    _unfinished[:] = [unfinished for unfinished in _unfinished if not unfinished.ended]
    timeout = 0.0 if any(unfinished.uses_stores for unfinished in _unfinished) else CLOSE_TIMEOUT
    if killed and not child_exit.wait(timeout):
        _unfinished.append(child_exit)
        logger.warning(
            "the process of %s[%s] died, and its key is not released yet",
            dead_child.task.name,
            dead_child.call_id,
        )


def record_revoke(revoked: DeadChild) -> None:
    """Write into its record that a call was revoked while it waited; in a thread, because the
    worker's loop must not wait.

    *revoked* is a delivery that no child had. If the stores do not answer, the record still says
    that the call runs again; nothing else depends on that.
    """
    if os_threads.uses_greenlets():
        greenlets.spawn(partial(_record_revoke, revoked))
    else:
        os_threads.start_thread(partial(_record_revoke, revoked))


def _record_revoke(revoked: DeadChild) -> None:
    try:
        call, components = (
            revoked.call(),
            app_components.components_of(revoked.task.app, eager=False),
        )
        with nullcontext() if os_threads.uses_greenlets() else _stores_lock:
            if _stop_waiting(components, call):
                event = events.CallDropped(**call.subject, reason="it was revoked while it waited")
                components.context.observer.observe(event)
    except Exception as error:  # noqa: BLE001 - see record_revoke
        logger.warning(
            "%s[%s] was revoked, but its record could not be updated: %r",
            revoked.task.name,
            revoked.call_id,
            error,
        )


def _stop_waiting(components: app_components.AppComponents, call: Call) -> bool:
    """Write into its record that *call* does not run again; return whether it was written.

    Nothing is written if the call runs or has finished, or the record belongs to another call.
    """
    record = _with_retries(components.context, lambda: components.records.read(call.key.stored))
    if (
        record is None
        or record.call_id != call.call_id
        or record.state not in (State.PENDING, State.COOLING)
    ):
        return False
    return _with_retries(components.context, lambda: components.records.call_off(record))


def watch(pid: int) -> None:
    """Make the pool reap child *pid* as soon as it has exited.

    Celery itself looks for exited children when the pipe of a child closes, which is slightly too
    early, and then every five seconds.
    """
    global _readers  # noqa: PLW0603 - Celery replaces the readers with its loop
    if _watched.get(pid) in _readers:
        return
    worker = app_components.current_worker()
    hub, pool = getattr(worker, "hub", None), getattr(worker, "pool", None)
    reap = getattr(pool, "maintain_pool", None)
    if hub is None or reap is None or pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    _readers = hub.readers
    if _watched.get(pid) in _readers:
        return
    # If the child is gone already, or the kernel has no such handles, Celery notices within five
    # seconds.
    with suppress(OSError):
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
    """Watch all children again, because Celery's loop forgets all handles when the connection to
    the broker is lost.
    """
    for pid in list(_watched):
        watch(pid)


# So that only one thread calls the stores, however many children have died.
_stores_lock = os_threads.allocate_lock()
_unfinished: list[ChildExit] = []
_watched: dict[int, int] = {}
_readers: Mapping[int, Any] = {}
"""The descriptors that Celery's loop read when :func:`watch` last looked."""


def _after_fork() -> None:
    global _stores_lock  # noqa: PLW0603 - a lock held while forking stays locked in the child for ever
    _stores_lock = os_threads.allocate_lock()
    _unfinished.clear()  # they belong to the parent
    for handle in _watched.values():
        os.close(handle)
    _watched.clear()


os.register_at_fork(after_in_child=_after_fork)


def _close(dead_child: DeadChild, call: Call) -> None:
    if _exists(dead_child.pid):
        raise TimeoutError(f"process {dead_child.pid} is still there")
    components = app_components.components_of(dead_child.task.app, eager=False)
    context = components.context
    settled: Exception | None = None
    try:
        _settle(context, call, dead_child)
        if dead_child.cause is ExitCause.REVOKED:  # a child that a signal ended cannot tell why
            _stop_waiting(components, call)
    except StoreUnavailable as error:
        settled = error
    if not context.leases.in_records:
        context.leases.release(call.key.stored, dead_child.token)
    if call.group is not None:
        context.gates.release_probe(call.group, dead_child.token)
    if settled is not None:
        raise settled


def _settle(context: Context, call: Call, dead_child: DeadChild) -> None:
    record = _with_retries(context, lambda: context.records.read(call.key.stored))
    if record is None or not record.is_attempt(State.RUNNING, dead_child.token):
        return
    outcome = child_exited(call, record, dead_child.cause)
    if not _with_retries(context, lambda: context.records.settle(record, outcome)):
        return
    if outcome.crashes > record.crashes:
        context.observer.observe(
            events.CrashSeen(**call.subject, crashes=outcome.crashes, host=record.holder)
        )
    took = (record.now - record.started_at) / 1e6
    context.observer.observe(events.AttemptSettled.by(call.subject, record, outcome, took, took))


def _with_retries(context: Context, step: Callable[[], T]) -> T:
    """Call *step*, which uses the database, and repeat it a few times if it fails."""
    return retrying(
        step, lambda: math.inf, context.clock, repeatable=lambda _, tries: tries < MAX_REPEATS
    )


def _exists(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
