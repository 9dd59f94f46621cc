"""Test tools: leases in memory and calls that crash, as plain functions; contracts for stores.

The functions speak to the kit that was started last: in a ``with leases(app):`` block, or by the
pytest fixture ``leases`` of :mod:`celery_leases.testing.pytest_plugin`. Celery is imported when
the first of them is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import EagerResult

    from celery_leases.common.durations import Duration
    from celery_leases.failures.actions import Classification
    from celery_leases.protocol.status import LeaseStatus
    from celery_leases.testing.kit import CrashedCall, LeaseKit, QueuedCall

__all__ = [
    "assert_queued",
    "assert_ran_once",
    "assert_replayed",
    "assert_survives_crashes",
    "classify",
    "crash",
    "external",
    "hold",
    "leases",
    "lose",
    "on_reset",
    "reset",
    "run_queued",
    "status",
    "tick",
    "watch",
]


def _kit() -> LeaseKit:
    from celery_leases.testing.kit import current_kit

    return current_kit()


def leases(
    app: Celery | None = None,
    *,
    eager: bool = True,
    stores: Literal["memory", "configured"] = "memory",
) -> LeaseKit:
    """A kit for *app*, by default the current one: start it as a context manager.

    In ``unittest``: ``self.kit = self.enterContext(leases(app))`` in ``setUp()``. See
    :class:`~celery_leases.testing.kit.LeaseKit` for *eager* and *stores*.
    """
    from celery_leases.testing.kit import LeaseKit

    return LeaseKit(app, eager=eager, stores=stores)


def hold(
    what: Any, *args: Any, task: str | None = None, **kwargs: Any
) -> AbstractContextManager[None]:
    """Have another call run a key until the end of the block.

    *what* is a task with the arguments of the call, or a key, with *task* where the app has
    several leased tasks. Raises AssertionError for a key that is done or cools down.
    """
    return _kit().hold(what, *args, task=task, **kwargs)


def lose(what: Any, *args: Any, task: str | None = None, **kwargs: Any) -> None:
    """Take the key away from the body that runs it; *what* is as for :func:`hold`.

    Raises AssertionError where no body of this process runs it.
    """
    _kit().lose(what, *args, task=task, **kwargs)


def crash(task: Any, *args: Any, at: str, **kwargs: Any) -> CrashedCall:
    """Call *task* and have its process die at a point, such as ``at="after:charge"``.

    ``resume()`` of what is returned delivers the call again until it has ended. Raises
    AssertionError, with the points that there are, where the call ends without reaching it.
    """
    return _kit().crash(task, *args, at=at, **kwargs)


def tick(span: Duration) -> None:
    """Let *span* (seconds, ``"5m"``, a timedelta) pass; leases of bodies that run are renewed."""
    _kit().tick(span)


def status(what: Any, *args: Any, task: str | None = None, **kwargs: Any) -> LeaseStatus:
    """Where a key stands; *what* is as for :func:`hold`."""
    return _kit().status(what, *args, task=task, **kwargs)


def watch(target: str, *, by: str | None = None) -> None:
    """Take the function *target*, ``"shop.gateway.charge"``, for a call to the outside.

    It is named as for ``mock.patch()``. *by* names its parameter by which the other side
    recognises a repetition.
    """
    _kit().watch(target, by=by)


def external(function: Callable[..., Any], *, by: str | None = None) -> Callable[..., Any]:
    """*function* as a call to the outside, where it cannot be named for :func:`watch`."""
    return _kit().external(function, by=by)


def run_queued() -> list[EagerResult]:
    """Run the calls that ``leases(app, eager=False)`` has kept, in their order; their results."""
    return _kit().run_queued()


def reset() -> None:
    """Forget all keys, calls and events, and call what :func:`on_reset` was given."""
    _kit().reset()


def on_reset(function: Callable[[], None]) -> Callable[[], None]:
    """Have *function* called by each :func:`reset`: it puts your own state back."""
    return _kit().on_reset(function)


def assert_queued(task: Any, *args: Any, **kwargs: Any) -> QueuedCall:
    """The last call of *task* with these arguments that was published.

    Raises AssertionError, with what was published, where there was none.
    """
    return _kit().assert_queued(task, *args, **kwargs)


def assert_ran_once(task: Any, *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError unless the body of that key has begun exactly once."""
    _kit().assert_ran_once(task, *args, **kwargs)


def assert_replayed(task: Any, *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError unless a call of that key got the saved result of an earlier one."""
    _kit().assert_replayed(task, *args, **kwargs)


def assert_survives_crashes(task: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Run *task* once for each point where it can die, and resume it; the points.

    Raises AssertionError with each call to the outside that is made more often than without a
    crash, by its lines, or that is lost, and with each crash after which the task does not end.
    Known are effects of the lease, and what :func:`watch` and :func:`external` were given; give
    them the function inside an effect with ``uncertain="rerun"`` too. The memory is reset before
    each run: put your own state back by :func:`on_reset`. A point that a run does not reach is an
    error.
    """
    return _kit().assert_survives_crashes(task, *args, **kwargs)


def classify(error: BaseException, task: Any = None) -> Classification:
    """What the rules of *task*, by default the default rules, make of *error*."""
    return _kit().classify(error, task)
