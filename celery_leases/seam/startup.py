"""What a worker checks and warns of before it starts; what stops it names the line to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery import Celery

from celery_leases.core.errors import LeaseConfigurationError, LeasesError, StoreUnavailable
from celery_leases.core.options import ADVISED_TTL, OPTION_NAMES
from celery_leases.seam import apps
from celery_leases.seam.app_settings import leased_tasks
from celery_leases.seam.apps import AppParts
from celery_leases.seam.limits import warn_of_consumer_timeout
from celery_leases.settings import DEFAULT_DATABASE, IN_MEMORY, REDIS_SCHEMES
from celery_leases.signals import logger

TIME_TO_END: Final = 1.0
"""Seconds a body needs that ends at its soft time limit, to clean up and have that written down."""


def check_before_work(sender: Any) -> None:
    """Stop a worker that could not keep its promises, with the line to write; create the tables on SQLite."""
    _warn_of_bare_options(sender.app)
    tasks = leased_tasks(sender.app)
    if not tasks:
        return
    try:
        parts = apps.parts_of(sender.app)
        if parts.settings.database_url == IN_MEMORY and "prefork" in str(sender.pool_cls):
            raise LeaseConfigurationError(
                f"leases_database_url={IN_MEMORY!r} gives each pool child records of its own; name a file or a server"
            )
        if "prefork" not in str(sender.pool_cls):
            _refuse_to_kill(tasks)
        _check_records(parts)
        _check_lease_store(parts)
    except LeasesError as error:
        raise SystemExit(f"celery_leases: {error}") from None
    if parts.settings.database_url == DEFAULT_DATABASE:
        logger.warning(
            "records are kept in %s in the working directory; set leases_database_url for more than one machine",
            DEFAULT_DATABASE.removeprefix("sqlite:///"),
        )
    short = {name: task.lease_options.ttl for name, task in tasks.items() if task.lease_options.ttl < ADVISED_TTL}
    if short:
        logger.warning(
            "lease_ttl is below the advised %g s, so a process that pauses that long loses its lease: %s",
            ADVISED_TTL,
            ", ".join(f"{name} ({ttl:g} s)" for name, ttl in sorted(short.items())),
        )
    if tight := sorted(name for name, task in tasks.items() if _leaves_no_time(task, sender)):
        logger.warning(
            "soft_time_limit is not %g s below time_limit: a caller may be told of a failure whose call comes back: %s",
            TIME_TO_END,
            ", ".join(tight),
        )
    limits = {name: task.time_limit or getattr(sender, "time_limit", None) for name, task in tasks.items()}
    warn_of_consumer_timeout(sender.app, {name: limit for name, limit in limits.items() if limit}, parts.settings)
    _warn_of_slow_redelivery(sender.app)
    apps.forget()


def _check_records(parts: AppParts) -> None:
    from celery_leases.stores.start_checks import check_writes

    try:
        parts.records.check()
        check_writes(parts.records)
        parts.records.identity()  # known to the pool children that are forked later
    except StoreUnavailable as error:
        if parts.settings.database_url.startswith("sqlite") and error.executed is not False:
            raise LeaseConfigurationError(f"the records file cannot be used: {error}") from None
        logger.warning("the records database does not answer yet: %s", error)


def _check_lease_store(parts: AppParts) -> None:
    from celery_leases.stores.start_checks import check_lease_store

    try:
        if warning := check_lease_store(parts.parts.leases):
            logger.warning("%s", warning)
    except StoreUnavailable as error:
        logger.warning("the lease store does not answer yet: %s", error)


def _warn_of_bare_options(app: Celery) -> None:
    """Options on a task without a lease do nothing."""
    for name, task in sorted(app.tasks.items()):
        options = [f"lease_{option}" for option in sorted(OPTION_NAMES) if hasattr(task, f"lease_{option}")]
        if options and not hasattr(task, "lease_options"):
            logger.warning(
                "task %s has %s, but runs without a lease: write base=LeasedTask, or leave them out",
                name,
                ", ".join(options),
            )


def _warn_of_slow_redelivery(app: Celery) -> None:
    """Redis gives the messages of a dead worker back after a visibility timeout, an hour if nobody says otherwise."""
    connection = app.connection_for_read()
    options = connection.transport_options
    if connection.transport_cls not in REDIS_SCHEMES or "visibility_timeout" in options:
        return
    from kombu.transport.redis import Channel

    sweep = options.get("unacked_restore_interval", getattr(Channel, "unacked_restore_interval", 10))
    sweep *= options.get("unacked_restore_throttle", getattr(Channel, "unacked_restore_throttle", 10))
    logger.warning(
        "broker_transport_options has no visibility_timeout: what a killed worker had comes back after %g s, found by "
        "a sweep every %g s; write app.conf.broker_transport_options = "
        '{"visibility_timeout": 90, "unacked_restore_interval": 5, "unacked_restore_throttle": 1}',
        Channel.visibility_timeout,
        sweep,
    )


def _leaves_no_time(task: Any, worker: Any) -> bool:
    """Whether a pool child may be killed while it writes down that the soft limit has ended its body."""
    soft = task.soft_time_limit or getattr(worker, "soft_time_limit", None)
    hard = task.time_limit or getattr(worker, "time_limit", None)
    return bool(soft and hard and hard - soft < TIME_TO_END)


def _refuse_to_kill(tasks: Mapping[str, Any]) -> None:
    """A process that runs other bodies too, or is the worker itself, must not be killed for one of them."""
    killing = sorted(name for name, task in tasks.items() if task.lease_options.on_lost == "kill")
    if killing:
        raise LeaseConfigurationError(
            f"lease_on_lost='kill' ends the whole process, which only prefork has for each body: {', '.join(killing)}; "
            "start the worker with --pool prefork, or write lease_on_lost='interrupt'"
        )
