"""Signals that arrive between two steps, or at the moment a body ends, in a process of their
own.
"""

from functools import partial

import pytest

from tests.crash.module_output import reported

interrupted = partial(reported, "tests.apps.interrupted_runs")


def test_a_loss_at_the_moment_the_body_ends_strays_nowhere() -> None:
    """300 races: each run is done or lost."""
    ended = interrupted("race")
    print(ended)
    assert set(ended) == {"done", "lost"}, ended
    assert sum(ended.values()) == 300
    assert min(ended.values()) >= 10  # else the race was none


def test_a_soft_limit_during_the_claim_keeps_the_body_from_beginning() -> None:
    found = interrupted("step", "SIGUSR1", "insert_or_read")
    assert found == {
        "outcome": "lost",
        "exits": None,
        "sent": True,
        "ran": False,
        "state": "pending",
        "crashes": 0,
    }


def test_a_soft_limit_during_the_settle_is_dropped() -> None:
    found = interrupted("step", "SIGUSR1", "settle")
    assert found == {
        "outcome": "done",
        "exits": None,
        "sent": True,
        "ran": True,
        "state": "done",
        "crashes": 0,
    }


@pytest.mark.parametrize(
    ("step", "state", "ran"), [("insert_or_read", "pending", False), ("settle", "done", True)]
)
def test_sigterm_waits_for_the_statement(step: str, state: str, ran: bool) -> None:
    found = interrupted("step", "SIGTERM", step)
    assert found == {
        "outcome": None,
        "exits": -241,
        "sent": True,
        "ran": ran,
        "state": state,
        "crashes": 0,
    }
