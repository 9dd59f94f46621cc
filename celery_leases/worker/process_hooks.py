"""What Celery's signals start in a process that has leased tasks.

Every process with leased tasks imports this module, also one that only publishes. So it loads
nothing before a worker starts.
"""

from __future__ import annotations

from typing import Any

from celery import signals


def _before_work(sender: Any, **_: Any) -> None:
    """Check the worker's settings; and load all that runs tasks, which pool children that are
    forked later share.
    """
    from celery_leases.worker import (
        app_components,
        startup_checks,
    )
    from celery_leases.worker.waiting_calls import held_calls

    app_components.note_worker(sender)
    held_calls.forget()
    startup_checks.check_before_work(sender)


signals.worker_init.connect(_before_work, weak=False)


def _when_ready(sender: Any, **_: Any) -> None:
    from celery_leases.worker import relay_check

    relay_check.watch(getattr(sender, "controller", sender))


def _at_shutdown(sender: Any, **_: Any) -> None:
    from celery_leases.worker import relay_check

    relay_check.end(sender)


def _last_counts(**_: Any) -> None:
    from celery_leases.counting import end_all

    end_all()


signals.worker_process_shutdown.connect(_last_counts, weak=False)
signals.worker_shutdown.connect(_last_counts, weak=False)
signals.worker_ready.connect(_when_ready, weak=False)
signals.worker_shutdown.connect(_at_shutdown, weak=False)
