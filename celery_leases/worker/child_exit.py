"""In the worker's main process: closes the attempts and the calls that Celery has ended.

A pool child that dies is noticed at once, and its key released. A call that gets its final state
outside of the lease, for example by the hard time limit or by an error of ``before_start``, must
not seem to wait in its record. These steps compare owner token and fence, as in the child. So they
change nothing if the child has done them already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from celery_leases import events
from celery_leases.attempt.process import Process
from celery_leases.attempt.run import retrying
from celery_leases.call import Call
from celery_leases.concurrency import greenlets, os_threads
from celery_leases.decide import after_run
from celery_leases.decide.after_run import child_exited, closed_for_celery
from celery_leases.decide.answers import Holder
from celery_leases.decide.endings import ExitCause
from celery_leases.errors import StoreUnavailable
from celery_leases.record import Ended, Failure, Outcome, Record, State
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.text.notices import logger
from celery_leases.worker import processes
from celery_leases.worker.headers import Header, group_of, key_of, order_of

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
class EndedDelivery:
    """A delivery that Celery has ended because of *cause*, and the process *pid* that had it; 0: no
    process had it. *args* and *kwargs* are as Celery delivered them.

    *final*: Celery has a final state for the call. *failure* is the error that the callers get.
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
    final: bool
    failure: Failure | None = None
    #: Those of the message.
    headers: Mapping[str, Any] | None = None

    def call(self) -> Call:
        """The call of the delivery; raises what the task's own ``lease_key`` raises."""
        args, kwargs = self.args or (), self.kwargs or {}
        key = key_of(self.task, self.header, self.call_id, args, kwargs, self.retries, self.headers)
        group = group_of(self.task, self.header, args, kwargs, self.retries)
        return Call(
            self.task.name,
            self.call_id,
            key,
            self.task.lease_options,
            token=self.token,
            group=group,
            order=order_of(self.headers or {}, self.call_id),
            arrived=self.header.arrived if self.header is not None else 0,
        )


class ChildExit:
    """Handles one exit in a thread of its own, so that a task's ``lease_key`` that hangs does not
    delay other exits.
    """

    def __init__(self, dead: EndedDelivery) -> None:
        self.dead = dead
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
        task, call_id = self.dead.task.name, self.dead.call_id
        try:
            until = os_threads.boot_clock() + EXIT_TIMEOUT
            while _exists(self.dead.pid) and os_threads.boot_clock() < until:
                os_threads.Wakeup().wait(POLL_INTERVAL)
            call = self.dead.call()
            self.uses_stores = True
            with _stores_lock:
                held_for = _close(self.dead, call)
            if held_for:
                close_ended(replace(self.dead, pid=0))
        except BaseException as error:  # noqa: BLE001 - the lease expires, and the next claim counts the crash
            logger.warning(
                "the process of %s[%s] died, but its key could not be released: %r",
                task,
                call_id,
                error,
                code="key-not-released",
            )
        finally:
            self.ended, self.uses_stores = True, False
            self._wakeup.notify()


def close_dead(dead: EndedDelivery) -> None:
    """Close the attempt of a child that has exited or is about to.

    Waits until this is done if the child died by itself, so that the next child finds the key free.
    It does not wait after Celery has killed the child, or while the stores have not answered for an
    earlier exit.
    """
    killed = dead.cause is ExitCause.KILLED
    if dead.pid == os.getpid() or (killed and _exists(dead.pid)):
        return  # the process is alive: a pool of threads, or billiard gave the delivery to another child
    child_exit = ChildExit(dead)
    _unfinished[:] = [unfinished for unfinished in _unfinished if not unfinished.ended]
    timeout = 0.0 if any(unfinished.uses_stores for unfinished in _unfinished) else CLOSE_TIMEOUT
    if killed and not child_exit.wait(timeout):
        _unfinished.append(child_exit)
        logger.warning(
            "the process of %s[%s] died, and its key is not released yet",
            dead.task.name,
            dead.call_id,
            code="key-not-released",
        )


def close_ended(ended: EndedDelivery) -> None:
    """Close a call that Celery has ended while no process ran its body, or in a process that goes
    on; in a thread, because the worker's loop must not wait.
    """
    greenlets.start(partial(_close_ended, ended))


def close_at_exit() -> None:
    """Close the attempts whose bodies are cut off by the end of this process: in a pool of threads,
    by a further signal after that of a cold shutdown.

    After an error, which may be a further Ctrl-C, the leases of the others expire.
    """
    for process in processes.made_here():
        for held_lease in process.renewer.held_leases:
            call = held_lease.call
            ended = EndedDelivery(
                *(process.app.tasks[call.task], call.call_id, call.token, None, (), {}),
                *(call.retries, os.getpid(), ExitCause.STOPPED, False),
            )
            try:
                _close_in_stores(ended, call)
            except BaseException as error:  # noqa: BLE001 - see above
                logger.warning(
                    "a key could not be released at the end: %r", error, code="key-not-released"
                )
                return


def _close_ended(ended: EndedDelivery) -> None:
    try:
        call = ended.call()
        while (seconds := _alone(partial(_close_in_stores, ended, call))) > 0:
            ended = replace(ended, pid=0)
            os_threads.Wakeup().wait(seconds)
    except BaseException as error:  # noqa: BLE001 - a task's own lease_key may raise anything
        logger.warning(
            "%s[%s] has ended (%s), but its record could not be updated: %r",
            ended.task.name,
            ended.call_id,
            ended.cause.value,
            error,
            code="record-not-updated",
        )


def _alone(step: Callable[[], T]) -> T:
    with nullcontext() if os_threads.uses_greenlets() else _stores_lock:
        return step()


def watch(pid: int) -> None:
    """Make the pool reap child *pid* as soon as it has exited.

    Celery itself looks for exited children when the pipe of a child closes, which is slightly too
    early, and then every five seconds.
    """
    global _readers  # noqa: PLW0603 - Celery replaces the readers with its loop
    if _watched.get(pid) in _readers:
        return
    worker = processes.current_worker()
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


def _close(dead: EndedDelivery, call: Call) -> float:
    if _exists(dead.pid):
        raise TimeoutError(f"process {dead.pid} is still there")
    return _close_in_stores(dead, call)


def _close_in_stores(ended: EndedDelivery, call: Call) -> float:
    """Returns the seconds after which it must be called again, without the process: another
    delivery of a call that has a final state may hold the lease. ``0.0``: it is closed.
    """
    process = processes.process_of(ended.task.app, eager=False)
    unsettled: StoreUnavailable | None = None
    held_for = 0.0
    try:
        held_for = _settle(process, call, ended)
        if call.options.latest_runs and ended.cause is ExitCause.REVOKED:
            _end_burst(process, call)
    except StoreUnavailable as error:
        unsettled = error
    if ended.pid:
        process.leases.end(call.key.stored, ended.token)
        if call.group is not None:
            process.leases.groups.release_slot(call.group, ended.token)
    if unsettled is not None:
        raise unsettled
    return held_for


def _settle(process: Process, call: Call, ended: EndedDelivery) -> float:
    """Close the attempt if its row still runs, or the call if it still waits. If another delivery
    of a call with a final state has died, no message is left that would close its row.
    """
    records = process.records
    retry = partial(_with_retries, process, ended)
    record = retry(lambda: records.read(call.key.stored))
    if record is None:
        return 0.0
    if not record.is_attempt(State.RUNNING, ended.token):
        if ended.pid:
            _note_end(process, call, ended, retry)
        if not (ended.final and record.state is State.RUNNING and record.call_id == call.call_id):
            _close_waiting(process, call, ended, retry)
            return 0.0
        if (held_for := _held_for(process, record, retry)) > 0:
            return held_for
    outcome = child_exited(call, record, ended.cause, final=ended.final)
    if not retry(lambda: records.settle(record, outcome)):  # the child's statement was faster
        _close_waiting(process, call, ended, retry)
        return 0.0
    if _counts_a_crash(record, outcome):
        process.observer.observe(
            events.CrashSeen(**call.subject, crashes=outcome.crashes, host=record.holder)
        )
    took = (record.now - record.started_at) / 1e6
    process.observer.observe(events.AttemptSettled.by(call.subject, record, outcome, took, took))
    return 0.0


def _held_for(process: Process, record: Record, retry: Callable[[Callable[[], Any]], Any]) -> float:
    """Seconds for which the attempt of *record* may hold its lease."""
    key = record.stored_key
    holder: Holder | None = retry(lambda: process.leases.holder(key))
    if holder is not None:
        return max(holder.remaining, POLL_INTERVAL)
    # As before a claim: the holder may write a lease again that the store has lost.
    age: float = retry(lambda: process.leases.age(key))
    return max(0.0, record.lease_ttl - age)


def _counts_a_crash(row: Record, outcome: Outcome) -> bool:
    return (row.crashes, row.crashed_call) != (outcome.crashes, outcome.crashed_call)


def _end_burst(process: Process, call: Call) -> None:
    """End the burst whose newest call was revoked: the time of its first call no longer counts."""
    order, key = call.order or call.arrived, call.key.stored
    if process.leases.burst(key).newest <= order:
        process.leases.end_burst(key, order)


def _note_end(
    process: Process,
    call: Call,
    ended: EndedDelivery,
    retry: Callable[[Callable[[], Any]], Any],
) -> None:
    """Write how the attempt has ended, if another attempt has taken over its row, for which it was
    only a suspected crash.
    """
    crashed = ended.cause in (ExitCause.KILLED, ExitCause.TIME_LIMIT)
    how = Ended.CRASHED if crashed else Ended.INTERRUPTED
    known = retry(
        lambda: process.records.note_end(call.key.stored, ended.token, how, call.counted_for)
    )
    if known is not None and crashed:
        host = f"{process.host.rpartition('/')[0]}/{ended.pid}"
        process.observer.observe(events.CrashSeen(**call.subject, crashes=known.crashes, host=host))


def _close_waiting(
    process: Process,
    call: Call,
    ended: EndedDelivery,
    retry: Callable[[Callable[[], Any]], Any],
) -> None:
    def close(row: Record) -> Outcome | None:
        return closed_for_celery(
            call, row, ended.token, ended.cause, final=ended.final, failure=ended.failure
        )

    closed = retry(lambda: process.records.close_waiting(call.key.stored, close))
    if closed is None:
        if ended.final and call.options.queues_once:
            outbox = Outbox(process.records)
            retry(lambda: outbox.forget_message(call.key.stored, call.call_id))
        return
    row, outcome = closed
    observe = process.observer.observe
    if _counts_a_crash(row, outcome):
        observe(events.CrashSeen(**call.subject, crashes=outcome.crashes, host=row.holder))
    elif ended.cause is ExitCause.REVOKED:
        reason = events.Dropped.REVOKED
        observe(events.CallDropped(**call.subject, reason=reason, why=reason.words))
    else:
        error = ended.failure.text if ended.failure is not None else ended.cause.value
        observe(events.CallRefused(**call.subject, error=error))


def _with_retries(process: Process, ended: EndedDelivery, step: Callable[[], T]) -> T:
    """Call *step*, which uses the database, and repeat it if it fails: a few times, or if no
    delivery of the call will come that closes its row, as long as an outcome is written.
    """
    until = process.clock.now() + after_run.SETTLE_TIMEOUT
    return retrying(
        step,
        lambda: until,
        process.clock,
        repeatable=lambda _, tries: ended.final or tries < MAX_REPEATS,
    )


def _exists(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
