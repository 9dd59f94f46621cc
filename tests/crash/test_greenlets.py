"""Lost leases under gevent and eventlet, in a process of their own: who is thrown into, and who is
not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.crash.module_output import reported

AT_ONCE = 5.0
"""By when a body that waits must know, in seconds, on a busy machine; measured at milliseconds."""

Report = Callable[..., dict[str, Any]]


@pytest.fixture(params=["gevent", "eventlet"])
def report(request: pytest.FixtureRequest) -> Report:
    """What :mod:`tests.apps.greenlet_runs` reports under either library."""
    pytest.importorskip(request.param)
    return partial(reported, "tests.apps.greenlet_runs", request.param)


def test_a_loss_at_the_moment_a_greenlets_body_ends_strays_nowhere(report: Report) -> None:
    """600 races in 20 greenlets: each run is done or lost."""
    ended = report("race")
    print(ended)
    assert set(ended) == {"done", "lost"}, ended
    assert sum(ended.values()) == 600
    assert min(ended.values()) >= 20  # else the race was none


def test_a_body_that_waits_for_the_hub_is_interrupted_at_once(report: Report) -> None:
    seconds = report("reach")
    print(seconds)
    assert set(seconds) == {"sleep", "recv", "event", "lock", "select", "subprocess", "join"}
    assert max(seconds.values()) < AT_ONCE


def test_an_interrupted_body_may_clean_up_for_a_short_time(report: Report) -> None:
    """A long one is interrupted again: the first exception may have been swallowed."""
    short, long = report("cleaning", "0.3"), report("cleaning", "2")
    assert (short["ended"], short["seen"]) == (["lost"], {"told": 1, "cleaned": 1})
    assert (long["ended"], long["seen"]) == (["lost"], {"told": 1, "told while cleaning": 1})


def test_a_body_that_has_checked_is_not_interrupted_while_it_cleans_up(report: Report) -> None:
    told = report("asking", "0.2")
    assert (told["ended"], told["seen"]) == (["lost"], {"told": 1, "cleaned": 1})


def test_a_body_that_wants_a_mere_flag_is_not_thrown_into(report: Report) -> None:
    told = report("flagged")
    assert (told["ended"], told["seen"]) == (["done"], {"slept on": 1})


def test_a_call_inside_a_body_is_not_thrown_into_for_the_outer_lease(report: Report) -> None:
    told = report("outer", "1")
    assert (told["ended"], told["states"]) == (["lost"], {"lost": "pending", "inside": "done"})


def test_a_killed_greenlet_gives_its_attempt_back(report: Report) -> None:
    assert report("killed") == {"ended": [], "state": "pending", "crashes": 0}
