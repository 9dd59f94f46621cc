"""Receivers of Celery's signals, and of errbacks, in a process with leased tasks.

Every such process imports this module, even if it only publishes. So the module imports nothing
else of celery_leases before a worker starts.
"""

from __future__ import annotations

import atexit
import gc
import sys
from contextlib import suppress
from typing import Any

from celery import signals
from celery.app import backends
from celery.backends.base import Backend


def _before_work(sender: Any, **_: Any) -> None:
    """Check the worker's settings, and import all modules that run tasks, so that the pool children
    that are forked later share them.
    """
    from celery_leases.concurrency import os_threads
    from celery_leases.worker import child_exit, processes
    from celery_leases.worker.checks import startup
    from celery_leases.worker.waiting_calls import waiting_calls

    processes.set_current_worker(sender)
    waiting_calls.clear()
    startup.check_before_work(sender)
    if not os_threads.uses_greenlets():
        atexit.register(child_exit.close_at_exit)


signals.worker_init.connect(_before_work, weak=False)


def _before_pool(instance: Any, **_: Any) -> None:
    """Import what receives and runs tasks, and freeze all objects: the garbage collector would
    write into each of them, so that no process of prefork could share its memory. In a process that
    runs many bodies it would look at all of them again and again.

    Python's cache of attributes refers to their names, so each process would write into those that
    it replaces there.
    """
    from celery_leases.worker.app_settings import leased_tasks

    if not leased_tasks(instance.app):
        return
    from celery_leases.worker import delivery, errbacks, fetching, request, requeue  # noqa: F401

    with suppress(Exception):  # Celery reports it when it uses the backend
        backends.by_url(instance.app.backend_cls or instance.app.conf.result_backend)
    gc.collect()
    # Its name since Python 3.13, and the one before.
    (getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache)()  # noqa: SLF001
    gc.freeze()


signals.celeryd_after_setup.connect(_before_pool, weak=False)


def _when_ready(sender: Any, **_: Any) -> None:
    from celery_leases.worker import takeover
    from celery_leases.worker.checks import relay

    relay.watch(getattr(sender, "controller", sender))
    takeover.start(sender)


def _at_shutdown(sender: Any, **_: Any) -> None:
    from celery_leases.worker import takeover
    from celery_leases.worker.checks import relay

    relay.stop(sender)
    takeover.stop()


_call_errbacks: Any = Backend._call_task_errbacks  # noqa: SLF001 - there is no signal


def _call_or_publish_errbacks(self: Any, request: Any, exc: Any, traceback: Any) -> None:
    """Publish leased errbacks that Celery would call in this process, without their leases."""
    from celery_leases.worker import errbacks

    given = request.errbacks
    try:
        if others := errbacks.publish_leased(self, request, exc, traceback):
            request.errbacks = others
            _call_errbacks(self, request, exc, traceback)
    finally:
        request.errbacks = given


Backend._call_task_errbacks = _call_or_publish_errbacks  # noqa: SLF001


def _internal_error(
    sender: Any, request: Any, exception: Exception, traceback: Any, **_: Any
) -> None:
    if hasattr(sender, "lease_options"):
        from celery_leases.worker.requeue import return_unstored

        return_unstored(sender, request, exception, traceback)


signals.task_internal_error.connect(_internal_error, weak=False)
signals.worker_ready.connect(_when_ready, weak=False)
signals.worker_shutdown.connect(_at_shutdown, weak=False)
