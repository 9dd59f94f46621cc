"""The lease store of a ``leases_url``: Redis, or one that another distribution provides.

A distribution registers its store under the URL's scheme in the entry point group
``celery_leases.stores``. The entry point names a callable that takes one
:class:`~celery_leases.stores.interfaces.LeaseStoreSettings` and returns a
:class:`~celery_leases.stores.interfaces.LeaseStore`. The store must neither connect nor start a
thread before its first call: a prefork worker opens one before it forks its pool.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, cast

from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.stores.interfaces import (
    LeaseStore,
    LeaseStoreSettings,
)
from celery_leases.stores.redis import url
from celery_leases.text.redaction import message_of

GROUP: Final = "celery_leases.stores"
"""The entry point group of lease stores; the name of an entry point is the scheme of its URLs."""
LONGEST_NAME: Final = 255
"""The maximum length of a store's name, which is stored in each record."""
_SHOWN: Final = 300


def open_lease_store(settings: LeaseStoreSettings) -> LeaseStore:
    """The lease store of ``settings.url``. It connects at its first call.

    Raises :class:`LeaseConfigurationError` if no installed distribution, or more than one, has
    registered the scheme; if the entry point cannot be loaded or called; and if it returns an
    object that is not a lease store.
    """
    scheme = settings.url.partition("://")[0].lower() if "://" in settings.url else ""
    if scheme in url.SCHEMES:
        return _open_redis(settings)
    entry_point = _registered(scheme, settings.url)
    try:
        opened = _loaded(entry_point, settings.url)(settings)
    except (LeaseConfigurationError, StoreUnavailable):
        raise
    except Exception as error:  # the code of another distribution may raise anything
        why = f"{type(error).__name__}: {message_of(error, _SHOWN)}"
        raise _url_error(
            settings.url, f"{_description(entry_point)} did not open it ({why})"
        ) from error
    if (defect := _defect(opened)) is not None:
        what = f"an object of type {type(opened).__name__} {defect}"
        raise _url_error(settings.url, f"{_description(entry_point)} returned {what}")
    return cast("LeaseStore", opened)


def _open_redis(settings: LeaseStoreSettings) -> LeaseStore:
    from celery_leases.stores.redis.leases import RedisLeaseStore

    return RedisLeaseStore.from_url(
        settings.url,
        prefix=settings.prefix,
        timeout=settings.timeout,
        options=settings.options,
        connections=settings.connections,
        longest_wait=settings.longest_wait,
    )


def _registered(scheme: str, address: str) -> EntryPoint:
    """The entry point of *scheme*."""
    known = entry_points(group=GROUP)
    found = {(one.value, one.dist and one.dist.name): one for one in known if one.name == scheme}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        several = " and ".join(sorted(_description(one) for one in found.values()))
        raise _url_error(address, f"is claimed by {several}: uninstall all but one")
    others = ", ".join(sorted({f"{one.name}://" for one in known}))
    more = f" (installed: {others})" if others else ""
    raise LeaseConfigurationError(
        f'leases_url={url.without_password(address)!r}: write "database", a URL such as '
        '"redis://localhost:6379/1", or install the distribution that has the URL\'s scheme as an '
        f'entry point in the group "{GROUP}"{more}'
    )


def _loaded(entry_point: EntryPoint, address: str) -> Callable[[LeaseStoreSettings], object]:
    try:
        factory: Any = entry_point.load()
    except Exception as error:  # an import may raise anything
        why = f"{type(error).__name__}: {message_of(error, _SHOWN)}"
        raise _url_error(
            address, f"{_description(entry_point)} cannot be loaded ({why})"
        ) from error
    if not callable(factory):
        what = f"is of type {type(factory).__name__}, which cannot be called"
        raise _url_error(address, f"{_description(entry_point)} {what}")
    return cast("Callable[[LeaseStoreSettings], object]", factory)


def _defect(opened: object) -> str | None:
    """Why *opened* is not a separate lease store; ``None`` if it is one."""
    if not isinstance(opened, LeaseStore):
        return "which is not a LeaseStore"
    name = getattr(opened, "name", None)
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        return f"whose name is not a text of 1 to {LONGEST_NAME} characters"
    return None


def _description(entry_point: EntryPoint) -> str:
    distribution = f" of {entry_point.dist.name}" if entry_point.dist is not None else ""
    return f"the entry point {entry_point.name} = {entry_point.value}{distribution}"


def _url_error(address: str, why: str) -> LeaseConfigurationError:
    return LeaseConfigurationError(f"leases_url={url.without_password(address)!r}: {why}")
