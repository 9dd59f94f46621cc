"""Test tools: leases in memory, calls that crash, and contract suites for stores.

The functions use the kit that was started last: by ``with leases(app):``, or by the pytest fixture
``leases`` of :mod:`celery_leases.testing.pytest_plugin`. Celery is imported when one of them is
called for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import EagerResult

    from celery_leases.failures.actions import RuleMatch
    from celery_leases.status import LeaseStatus
    from celery_leases.testing.kit import CrashedCall, LeaseKit, QueuedCall
    from celery_leases.text.durations import Duration

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
    """A kit for *app*, by default the current app. Start it as a context manager.

    In ``unittest``: ``self.kit = self.enterContext(leases(app))`` in ``setUp()``. See
    :class:`~celery_leases.testing.kit.LeaseKit` for *eager* and *stores*.
    """
    from celery_leases.testing.kit import LeaseKit

    return LeaseKit(app, eager=eager, stores=stores)


def hold(
    what: Any, *args: Any, task: str | None = None, **kwargs: Any
) -> AbstractContextManager[None]:
    """A context manager during which another call runs a key.

    *what* is a task, with the arguments of the call; or a key, with the name of its *task* if the
    app has several leased tasks. Raises AssertionError if the key is done or cools down.
    """
    return _kit().hold(what, *args, task=task, **kwargs)


def lose(what: Any, *args: Any, task: str | None = None, **kwargs: Any) -> None:
    """Let another attempt take the lease of the body that runs a key; *what* is as for
    :func:`hold`.

    Raises AssertionError if no body in this process runs the key.
    """
    _kit().lose(what, *args, task=task, **kwargs)


def crash(task: Any, *args: Any, at: str, **kwargs: Any) -> CrashedCall:
    """Call *task*, and let its process die at a point such as ``at="after:charge"``.

    ``resume()`` of the returned object delivers the call again until it has ended. Raises
    AssertionError, which lists the points, if the call ends without reaching the point.
    """
    return _kit().crash(task, *args, at=at, **kwargs)


def tick(span: Duration) -> None:
    """Let *span* (seconds, ``"5m"``, a timedelta) pass. Leases of running bodies are renewed."""
    _kit().tick(span)


def status(what: Any, *args: Any, task: str | None = None, **kwargs: Any) -> LeaseStatus:
    """The status of a key; *what* is as for :func:`hold`."""
    return _kit().status(what, *args, task=task, **kwargs)


def watch(target: str, *, by: str | None = None) -> None:
    """Treat calls of the function *target*, such as ``"shop.gateway.charge"``, as external calls.

    The function is named as for ``mock.patch()``. *by* is the name of the parameter, such as an
    idempotency key, by which the external service recognises a repeated call.
    """
    _kit().watch(target, by=by)


def external(function: Callable[..., Any], *, by: str | None = None) -> Callable[..., Any]:
    """*function*, whose calls count as external calls. For functions that :func:`watch` cannot
    name.
    """
    return _kit().external(function, by=by)


def run_queued() -> list[EagerResult]:
    """Run the calls that ``leases(app, eager=False)`` has queued, in order; returns their
    results.
    """
    return _kit().run_queued()


def reset() -> None:
    """Forget all keys, calls and events, and call the functions given to :func:`on_reset`."""
    _kit().reset()


def on_reset(function: Callable[[], None]) -> Callable[[], None]:
    """Call *function* at each :func:`reset`, so that it resets your own state."""
    return _kit().on_reset(function)


def assert_queued(task: Any, *args: Any, **kwargs: Any) -> QueuedCall:
    """The last published call of *task* with these arguments.

    Raises AssertionError, which lists the published calls, if there was none.
    """
    return _kit().assert_queued(task, *args, **kwargs)


def assert_ran_once(task: Any, *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError unless the body of that key has begun exactly once."""
    _kit().assert_ran_once(task, *args, **kwargs)


def assert_replayed(task: Any, *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError unless a call of that key got the saved result of an earlier call."""
    _kit().assert_replayed(task, *args, **kwargs)


def assert_survives_crashes(task: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Run *task* once for each point at which it can die, and resume it; returns the points.

    Raises AssertionError if after a crash an external call is made more often than without one, or
    is lost; if the task does not end; or if a run does not reach its point. The message lists the
    lines of the calls. External calls are the effects of the lease, and the functions given to
    :func:`watch` and :func:`external`. Also give these the function inside an effect with
    ``uncertain="rerun"``. The memory is reset before each run; reset your own state in
    :func:`on_reset`.
    """
    return _kit().assert_survives_crashes(task, *args, **kwargs)


def classify(error: BaseException, task: Any = None) -> RuleMatch:
    """How the rules of *task*, by default the default rules, classify *error*."""
    return _kit().classify(error, task)
