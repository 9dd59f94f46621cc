"""A check of the tasks that beat calls: whether one of them would run once and then never again."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import import_module
from inspect import Parameter
from itertools import pairwise
from typing import Any, Final

from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab, schedule, solar
from kombu.utils.functional import maybe_list

from celery_leases.keys import names_in
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_words
from celery_leases.text.notices import logger
from celery_leases.worker.checks.settings import Finding, Severity

ADVICE: Final = (
    'write lease_runs="each", or "latest" if only the newest call matters; or let beat pass what differs, '
    'such as "kwargs": {"day": BeatLazyFunc(lambda: date.today().isoformat())}, and write it into the key, '
    'such as lease_key="report:{day}"'
)
_TABLES: Final = "django_celery_beat.models"
_DAY: Final = 86_400.0
_RESULT: Final = BeatLazyFunc(type(None))
"""Stands for the result of another call."""
_STEPS: Final = 8
"""From how many times of a crontab its shortest gap is taken."""


def periodic_findings(tasks: Mapping[str, Any], entries: Iterable[ScheduleEntry]) -> list[Finding]:
    """A warning for each of the leased *tasks* that one of the *entries* calls with the same key
    each time, although the work of a key is done once.

    Nothing is known of a key that a callable makes, and of a schedule that is neither an interval
    nor a crontab nor solar.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        scheduled = {"task": entry.task, "args": entry.args, "kwargs": entry.kwargs}
        names = {
            call["task"]
            for call in _calls(scheduled | {"options": entry.options})
            if call["task"] in tasks and _runs_once(tasks[call["task"]], entry.schedule, call)
        }
        for name in names:
            found[name].append(printable(entry.name or ""))
    return [
        Finding(
            "periodic-once",
            Severity.WARNING,
            f"beat calls {name} with the same key each time (lease_key={options.key!r}; schedule: {', '.join(calls)}), "
            f'and lease_runs="once" does the work of a key once: after its first success nothing runs for '
            f"{in_words(options.retention)} (lease_retention)",
            ADVICE,
        )
        for name, calls in sorted(found.items())
        for options in [tasks[name].lease_options]
    ]


def all_entries(app: Celery) -> Iterator[ScheduleEntry]:
    """The schedule of *app*: that in its settings, and that in the tables of django-celery-beat or
    in the Redis of celery-redbeat, if it uses one of them.
    """
    yield from entries_in_settings(app)
    for read in (entries_in_tables, _entries_in_redbeat):
        try:
            yield from read(app)
        except Exception as error:  # noqa: BLE001 - beat reports it, and its tables may not exist yet
            logger.debug("the schedule of beat cannot be read: %s", error)


def entries_in_settings(app: Celery) -> Iterator[ScheduleEntry]:
    """The entries of ``beat_schedule``. One that beat could not read is left out."""
    for name, entry in dict(app.conf.beat_schedule or {}).items():
        try:
            yield ScheduleEntry(**{**dict(entry), "name": name, "app": app})
        except (TypeError, ValueError):
            logger.debug("the entry %s of beat_schedule cannot be read", name)


def entries_in_tables(app: Celery) -> list[ScheduleEntry]:
    """The entries of django-celery-beat that are enabled and called more than once; raises the
    errors of the database.
    """
    if (models := sys.modules.get(_TABLES)) is None:
        return []
    rows = models.PeriodicTask.objects.filter(enabled=True, one_off=False)
    connection = sys.modules["django.db"].connections[rows.db]
    was_open = connection.connection is not None
    try:
        return [
            ScheduleEntry(
                row.name,
                row.task,
                schedule=row.schedule,
                args=json.loads(row.args or "[]"),
                kwargs=json.loads(row.kwargs or "{}"),
                app=app,
            )
            for row in rows.select_related("interval", "crontab", "solar", "clocked")
        ]
    finally:
        if not was_open:
            connection.close()  # pool processes are forked later


def _entries_in_redbeat(app: Celery) -> list[ScheduleEntry]:
    if "redbeat" not in str(app.conf.beat_scheduler):
        return []
    redbeat = import_module("redbeat.schedulers")
    client = redbeat.get_redis(app)
    client = getattr(client, "wrapped_connection", client)  # the wrapper may try again for ever
    keys = client.zrange(redbeat.ensure_conf(app).schedule_key, 0, -1)
    entries = [redbeat.RedBeatSchedulerEntry.from_key(key, app=app) for key in keys]
    return [entry for entry in entries if entry.enabled]


def _calls(scheduled: Any, *, follows: bool = False) -> Iterator[Mapping[str, Any]]:
    """The calls that one entry makes: its own, those of its chain, group or chord, and links.
    *follows*: the result of another call is the first argument.
    """
    if not isinstance(scheduled, Mapping) or not isinstance(scheduled.get("task"), str):
        return
    kwargs, options = scheduled.get("kwargs") or {}, scheduled.get("options") or {}
    parts: list[tuple[Any, bool]] = [(link, True) for link in maybe_list(options.get("link")) or ()]
    match scheduled["task"]:
        case "celery.chain":
            parts += [
                (step, follows or place > 0) for place, step in enumerate(kwargs.get("tasks") or ())
            ]
        case "celery.group":
            parts += [(member, follows) for member in kwargs.get("tasks") or ()]
        case "celery.chord":
            header = kwargs.get("header") or ()
            members = [header] if isinstance(header, Mapping) else header
            parts += [*((member, follows) for member in members), (kwargs.get("body"), True)]
        case _ if follows and not scheduled.get("immutable"):
            yield {**scheduled, "args": (_RESULT, *(scheduled.get("args") or ()))}
        case _:
            yield scheduled
    for part, after in parts:
        yield from _calls(part, follows=after)


def _runs_once(task: Any, every: Any, call: Mapping[str, Any]) -> bool:
    options = task.lease_options
    return (
        isinstance(options.key, str)
        and options.runs == "once"
        and _shortest_gap(every) <= options.retention
        and names_in(options.key).isdisjoint(_changing(task, call))
    )


def _changing(task: Any, call: Mapping[str, Any]) -> set[str]:
    """The names of the arguments that are made anew for each call."""
    signature = task.lease_signature
    try:
        given = signature.bind_partial(*(call.get("args") or ()), **(call.get("kwargs") or {}))
    except TypeError:  # each call of it is refused
        return set()
    found = set()
    for name, value in given.arguments.items():
        kind = signature.parameters[name].kind
        if kind is Parameter.VAR_KEYWORD:
            found |= {key for key, each in value.items() if isinstance(each, BeatLazyFunc)}
        elif any(
            isinstance(each, BeatLazyFunc)
            for each in (value if kind is Parameter.VAR_POSITIONAL else [value])
        ):
            found.add(name)
    return found


def _shortest_gap(every: Any) -> float:
    """The shortest time between two calls in seconds; infinity if it is not known."""
    if isinstance(every, schedule) and every.run_every is not None:
        return float(every.run_every.total_seconds())
    if isinstance(every, solar):
        return _DAY
    if not isinstance(every, crontab):
        return math.inf
    due = [datetime.now(UTC)]
    try:
        for _ in range(_STEPS):
            last, delta, _ = every.remaining_delta(due[-1])
            due.append(last + delta)
    except (RuntimeError, ValueError):  # a day that does not exist
        return math.inf
    return min((later - earlier).total_seconds() for earlier, later in pairwise(due[1:]))
