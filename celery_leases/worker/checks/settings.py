"""Checks of the settings of an app and of its leased tasks. They ask no server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from celery import Celery

from celery_leases.options import ADVISED_TTL, OPTION_NAMES
from celery_leases.settings import DEFAULT_DATABASE, REDIS_SCHEMES, Settings
from celery_leases.worker.rabbitmq_consumer_timeout import consumer_timeout_warning

TIME_TO_END: Final = 1.0
"""Seconds that a body needs after its soft time limit: to clean up, and for its outcome to be
written.
"""


class Severity(StrEnum):
    """How serious a finding is.

    ``error``: a worker does not start, or the guarantees do not hold. ``warning``: a worker logs it
    each time it starts. ``note``: only ``leases doctor`` shows it.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: ``code`` is its stable name, ``problem`` says what happens, and
    ``advice`` what to write.
    """

    code: str
    severity: Severity
    problem: str
    advice: str

    @property
    def text(self) -> str:
        """Problem, advice and code in one line, as a worker logs them."""
        said = f"{self.problem}; {self.advice}" if self.advice else self.problem
        return f"{said} ({self.code})"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """A worker's time limits for all tasks, in seconds, and the longest known run of each task."""

    soft: float | None = None
    hard: float | None = None
    longest: Mapping[str, float] | None = None

    def soft_of(self, task: Any) -> float | None:
        """The soft limit of *task*."""
        found: float | None = task.soft_time_limit or self.soft
        return found

    def hard_of(self, task: Any) -> float | None:
        """The hard limit of *task*."""
        found: float | None = task.time_limit or self.hard
        return found

    def longest_of(self, name: str, task: Any) -> tuple[float, str] | None:
        """How long a body of *task* may take, in seconds, and a text that says why."""
        limit, ran = self.hard_of(task), (self.longest or {}).get(name)
        if limit:
            return limit, f"{name} has a time_limit of {limit:g} s"
        return (ran, f"{name} ran for {ran:g} s") if ran else None


def setting_findings(
    app: Celery,
    tasks: Mapping[str, Any],
    settings: Settings,
    limits: TimeLimits,
    greenlets: int = 0,
) -> Iterator[Finding]:
    """What there is to say of *app*, of its leased *tasks*, and of its *settings*.

    *greenlets*: as many bodies a worker runs in greenlets, if it does.
    """
    yield from _database_findings(settings)
    yield from _ttl_findings(tasks)
    yield from _group_findings(tasks)
    yield from _time_limit_findings(tasks, limits)
    yield from celery_findings(app, tasks)
    yield from _redelivery_findings(app, tasks, settings, limits)
    yield from _greenlet_findings(app, greenlets)


def greenlets_of(pool: object, concurrency: int | None) -> int:
    """As many bodies run in greenlets at once in a worker of this *pool*; 0 for another pool."""
    name = str(pool)
    return (concurrency or 0) if "gevent" in name or "eventlet" in name else 0


def findings_without_lease(app: Celery) -> Iterator[Finding]:
    """The findings about tasks without a lease that have options of one, which do nothing there."""
    for name, task in sorted(app.tasks.items()):
        options = [
            f"{prefix}_{option}"
            for option in sorted(OPTION_NAMES)
            for prefix in ("lease", "leases")
            if hasattr(task, f"{prefix}_{option}")
        ]
        if options and not hasattr(task, "lease_options"):
            yield _warning(
                "options-without-lease",
                f"task {name} has {', '.join(options)}, but runs without a lease",
                "write base=LeasedTask, or leave them out",
            )


def plain_task_findings(app: Celery, limits: TimeLimits) -> Iterator[Finding]:
    """A warning about tasks without a lease that a Redis broker may deliver again while they run;
    none unless the app has set a ``visibility_timeout``.
    """
    timeout = float((redis_options(app) or {}).get("visibility_timeout") or 0)
    plain = [
        name
        for name, task in sorted(app.tasks.items())
        if task.acks_late
        and not hasattr(task, "lease_options")
        and not name.startswith(("celery.", "celery_leases."))
        and (limits.hard_of(task) or math.inf) > timeout
    ]
    if timeout and plain:
        yield _warning(
            "plain-tasks-run-twice",
            f"the visibility_timeout of the broker is {timeout:g} s, and tasks without a lease that acknowledge late "
            f"may run longer: Redis delivers such a call again while it runs, and it runs twice: {', '.join(plain)}",
            "leave visibility_timeout out, because leased tasks need no short one; or give these tasks "
            "base=LeasedTask, or a shorter time_limit",
        )


def soft_limit_is_tight(task: Any, limits: TimeLimits) -> bool:
    """Whether a pool child may reach its hard limit while it writes the outcome of a body that the
    soft limit has ended.
    """
    soft, hard = limits.soft_of(task), limits.hard_of(task)
    return bool(soft and hard and hard - soft < TIME_TO_END)


def _database_findings(settings: Settings) -> Iterator[Finding]:
    if settings.database_url == DEFAULT_DATABASE:
        where = DEFAULT_DATABASE.removeprefix("sqlite:///")
        yield _warning(
            "default-database",
            f"records are stored in {where} in the working directory",
            "set leases_database_url for more than one machine",
        )


def _ttl_findings(tasks: Mapping[str, Any]) -> Iterator[Finding]:
    short = [
        f"{name} ({task.lease_options.ttl:g} s)"
        for name, task in sorted(tasks.items())
        if task.lease_options.ttl < ADVISED_TTL
    ]
    if short:
        yield _warning(
            "short-ttl",
            f"lease_ttl is below the advised {ADVISED_TTL:g} s, so a process that pauses that long "
            f"loses its lease: {', '.join(short)}",
            f"write lease_ttl={ADVISED_TTL:g} or more",
        )


def _group_findings(tasks: Mapping[str, Any]) -> Iterator[Finding]:
    """Tasks that give one group different limits or rates."""
    given: dict[str, dict[str, list[str]]] = {}
    for name, task in sorted(tasks.items()):
        group = task.lease_options.group
        if group is not None and group.limited and isinstance(group.name, str):
            numbers = f"limit={group.limit}, rate={group.rate!r}"
            given.setdefault(group.name, {}).setdefault(numbers, []).append(name)
    for group_name, found in given.items():
        if len(found) > 1:
            each = "; ".join(f"{numbers} ({', '.join(names)})" for numbers, names in found.items())
            yield _warning(
                "different-limits",
                f"the group {group_name} has different numbers: {each}; the smallest counts",
                "write the same Group in all its tasks",
            )


def _time_limit_findings(tasks: Mapping[str, Any], limits: TimeLimits) -> Iterator[Finding]:
    if tight := sorted(name for name, task in tasks.items() if soft_limit_is_tight(task, limits)):
        yield _warning(
            "tight-soft-limit",
            f"soft_time_limit is not {TIME_TO_END:g} s below time_limit: a caller may get "
            f"FAILURE although the call runs again: {', '.join(tight)}",
            "raise time_limit, or lower soft_time_limit",
        )


def celery_findings(app: Celery, tasks: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings about settings and options of Celery that do harm to leased *tasks*."""
    if app.conf.task_always_eager:
        yield _warning(
            "always-eager",
            "task_always_eager is set: calls run in the process that makes them, and no worker",
            "leave it out, except in tests",
        )
    for name, task in sorted(tasks.items()):
        if getattr(task, "autoretry_for", None):
            yield _warning(
                "autoretry",
                f"task {name} has autoretry_for: Celery retries its errors, and the rules see them only "
                "after the last retry",
                "leave autoretry_for out, and write lease_failures=Failures(rules)",
            )
        if getattr(task, "retry_on_worker_lost", None):
            yield _warning(
                "retry-on-worker-lost",
                f"task {name} has retry_on_worker_lost=True: Celery sends a new message for a process "
                "that was killed, and counts it as a retry",
                "leave it out",
            )


def _redelivery_findings(
    app: Celery, tasks: Mapping[str, Any], settings: Settings, limits: TimeLimits
) -> Iterator[Finding]:
    yield from plain_task_findings(app, limits)
    if (over := consumer_timeout_warning(app, _hard_limits(tasks, limits), settings)) is not None:
        yield _warning("consumer-timeout", *over)
    prefetch = app.conf.worker_prefetch_multiplier
    if prefetch == 0:
        yield _warning(
            "unlimited-prefetch",
            "worker_prefetch_multiplier=0: the first worker takes all messages of a queue, and the "
            "others wait; if the worker dies, its messages are redelivered only after the broker's own time",
            "write app.conf.worker_prefetch_multiplier = 1",
        )
    options = redis_options(app)
    timeout = float((options or {}).get("visibility_timeout") or 0)
    if not timeout:
        return
    known = [limits.longest_of(name, task) for name, task in sorted(tasks.items())]
    longest = max((each for each in known if each is not None), default=None)
    if longest is None:
        return
    if longest[0] > timeout:
        yield _warning(
            "short-visibility-timeout",
            f"{longest[1]}, and the visibility_timeout of the broker is {timeout:g} s: Redis "
            "delivers such a call again and again while it runs, and each copy is rescheduled",
            f"write a visibility_timeout of {1.5 * longest[0]:.0f}, or split the work",
        )
    elif prefetch > 1 and longest[0] * prefetch > timeout:
        yield _warning(
            "prefetch-beyond-visibility-timeout",
            f"{longest[1]}, and a worker takes {prefetch} messages ahead for each process: the "
            f"last of them waits for longer than the visibility_timeout of {timeout:g} s, and is "
            "delivered twice",
            "write app.conf.worker_prefetch_multiplier = 1",
        )


def _greenlet_findings(app: Celery, greenlets: int) -> Iterator[Finding]:
    options = redis_options(app)
    if options is None or not greenlets:
        return
    from kombu.transport.redis import Channel

    most = int(options.get("max_connections") or Channel.max_connections)
    if greenlets > most:
        yield _warning(
            "few-broker-connections",
            f"{greenlets} greenlets share {most} connections to the Redis broker: one that finds "
            "none to acknowledge its call breaks the worker's connection to the broker, and "
            "messages come back only after the visibility timeout",
            f'write app.conf.broker_transport_options["max_connections"] = {2 * greenlets}',
        )


def _hard_limits(tasks: Mapping[str, Any], limits: TimeLimits) -> dict[str, float]:
    found = {name: limits.hard_of(task) for name, task in tasks.items()}
    return {name: limit for name, limit in found.items() if limit}


def redis_options(app: Celery) -> Mapping[str, Any] | None:
    """The transport options of a broker in Redis."""
    connection = app.connection_for_read()
    options: Mapping[str, Any] = connection.transport_options
    return options if connection.transport_cls in REDIS_SCHEMES else None


def _warning(code: str, problem: str, advice: str) -> Finding:
    return Finding(code, Severity.WARNING, problem, advice)
