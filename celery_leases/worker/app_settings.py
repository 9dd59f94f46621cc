"""The ``leases_*`` settings of a Celery app, and its leased tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import ismodule
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery

from celery_leases.errors import LeaseConfigurationError
from celery_leases.settings import Settings, is_setting, read_settings
from celery_leases.worker.rabbitmq_consumer_timeout import consumer_timeout_of

_completed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
_longest_countdowns: WeakKeyDictionary[Celery, float] = WeakKeyDictionary()


def complete_settings_by(completed: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Let *completed* complete the ``leases_*`` settings of each app in this process.

    It gets the app's own settings and returns those to use. It is called whenever settings are
    read, and may raise :class:`LeaseConfigurationError`.
    """
    global _completed  # noqa: PLW0603 - a process has one web framework
    _completed = completed


def settings_of(app: Celery, *, lenient: bool = False) -> Settings:
    """The ``leases_*`` settings of *app*; *lenient*: ignore a missing database URL, which the
    worker reports.
    """
    app.conf.get("broker_url")  # loads the settings, which Celery does at the first access
    conf = app.conf
    # The attribute, because the item does not respect CELERY_BROKER_URL.
    broker = conf.broker_write_url or "amqp://localhost//"
    given = _given(conf)
    try:
        given = _completed(given)
    except LeaseConfigurationError:
        if not lenient:
            raise
    if lenient and not given.get("leases_database_url"):
        given["leases_database_url"] = "-"
    brokers = [broker] if isinstance(broker, str) else list(broker)
    broker_url = ";".join(brokers) if brokers[0].startswith("sentinel://") else brokers[0]
    options = dict(conf.get("broker_transport_options") or {})
    if timeout := consumer_timeout_of(conf.get("task_queues")):
        options.setdefault("consumer_timeout", timeout)
    if tls := conf.get("broker_use_ssl"):
        options.setdefault("ssl", tls)
    return read_settings(given, broker_url, options)


def longest_countdown(app: Celery) -> float:
    """Of the settings of *app*, which are read once: a worker asks for each message that waits."""
    if app not in _longest_countdowns:
        _longest_countdowns[app] = settings_of(app).longest_countdown
    return _longest_countdowns[app]


def _given(conf: Any) -> dict[str, Any]:
    """The ``leases_*`` settings of a Celery configuration, whose names all begin with its namespace
    if it has one; and other names that begin with ``lease``, which are wrong.
    """
    namespace: str = getattr(conf, "prefix", None) or ""
    given: dict[str, Any] = {}
    for written in map(str, conf):
        name = written.lower()
        if "lease" not in name:  # most names, and this is read for each task
            continue
        name = name.removeprefix(namespace.lower())
        if not name.startswith("lease") or (namespace and name == "leases"):
            continue  # CELERY_LEASES is the dict of a Django project
        try:
            value = conf[name]
            # A module with settings may have imported a function or a module.
            if name.startswith("leases_") or not (callable(value) or ismodule(value)):
                given[name] = value
        except KeyError:  # the name is in capitals, or lacks the namespace
            if not name.startswith("leases_"):
                continue  # it may be a setting of the project
            if not namespace:
                given.setdefault(name, conf[written])
            elif is_setting(name):
                raise LeaseConfigurationError(
                    f"setting {written}: the settings of this app begin with {namespace}; write {namespace}{written}"
                ) from None
    return given


def leased_tasks(app: Celery) -> dict[str, Any]:
    """The registered tasks of *app* that run under leases, by name."""
    return {name: task for name, task in app.tasks.items() if hasattr(task, "lease_options")}
