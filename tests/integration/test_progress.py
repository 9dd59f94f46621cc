"""Saved progress and loops under real workers: where they go on after kills, failures,
interruptions and losses.
"""

import random
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from celery_leases.lease import SAVE_EVERY
from celery_leases.testing.waits import wait_until
from tests.apps.failpoints import armed
from tests.integration.conftest import MakeStage
from tests.integration.deployments import BOTH_WAYS, PATIENCE, Stage, got, spelled, until

PROGRESSING = "tests.apps.progress_tasks"
MANY = 10_000
DEATHS = sorted(random.Random(1842).sample(range(MANY), 3))
LATE_DEATHS = sorted(random.Random(2026).sample(range(MANY // 4, MANY), 2))


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=spelled)
def module_stage(
    request: pytest.FixtureRequest,
    stage_factory: MakeStage,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """A worker that loops; at its end nothing may be left in the queue."""
    failpoints = tmp_path_factory.mktemp("failpoints")
    made = stage_factory(request.param, home=PROGRESSING, env={"FAILPOINTS": str(failpoints)})
    wanted = {
        item.originalname
        for item in request.session.items
        if isinstance(item, pytest.Function) and spelled(request.param) in item.name
    }
    # These take long for the time until a death is noticed: they go on beside the other tests.
    if test_of_ten_thousand_items_none_is_skipped.__name__ in wanted:
        for item in DEATHS:
            arm(made, f"item {item}", "every-1")
        made.tasks.loops.delay("every-1", MANY, every=1)
    if test_by_default_at_most_a_seconds_items_repeat.__name__ in wanted:
        for item in LATE_DEATHS:
            arm(made, f"item {item}", "by-default")
        made.tasks.loops.delay("by-default", MANY, pace=0.0002)
    if test_a_task_that_gets_on_each_time_is_never_given_up.__name__ in wanted:
        made.tasks.pages.delay("gets-on", 3)
    yield made
    try:
        if not request.session.testsfailed:
            made.wait_until_drained(3 * PATIENCE)  # as long as the test of the loops waits for them
    finally:
        made.close()


def arm(stage: Stage, step: str, name: str) -> None:
    armed(Path(stage.env["FAILPOINTS"]), step, name).touch()


class Worked:
    """The items that were worked on, by the runs of the body."""

    def __init__(self, stage: Stage, name: str) -> None:
        lines = (stage.directory / f"items.{name}").read_text().splitlines()
        self.lines = [(int(pid), int(item), float(t)) for pid, item, t in map(str.split, lines)]

    @property
    def items(self) -> list[int]:
        return [item for _, item, _ in self.lines]

    def turns(self) -> list[tuple[int, int]]:
        """The places at which another run went on."""
        return [(one, two) for one, two in pairwise(self.items) if two != one + 1]

    def assert_nothing_skipped(self, count: int) -> None:
        """All of them were worked on, and no run has left one out."""
        assert sorted(set(self.items)) == list(range(count))
        assert all(two <= one + 1 for one, two in pairwise(self.items))


@pytest.mark.parametrize("every", [None, 7])
def test_a_failure_loses_nothing(stage: Stage, name: str, every: int | None) -> None:
    result = stage.tasks.loops.delay(name, 100, every=every, fails_at=[10, 33, 80])
    got(result)
    assert Worked(stage, name).items == list(range(100))
    assert len(stage.events("begin", name=name)) == 4


def test_a_lost_lease_stops_the_loop_between_two_items(stage: Stage, name: str) -> None:
    gate = stage.gate()
    result = stage.tasks.loops.delay(name, 20, every=1, waits_at=5, gate=str(gate))
    (waits,) = stage.wait_for("waits", name=name)
    before = stage.client.status(f"loops:{name}", task=f"{PROGRESSING}.loops")
    after = stage.client.release(f"loops:{name}", task=f"{PROGRESSING}.loops")
    assert after.fence > before.fence
    gate.touch()
    (told,) = stage.wait_for("raised", name=name)
    assert (told["error"], told["pid"]) == ("LeaseLost", waits["pid"])
    assert got(result) == {"name": name, "count": 20}
    worked = Worked(stage, name)
    worked.assert_nothing_skipped(20)
    # The item in which the lease was lost is not saved any more, as the fence has moved on.
    assert worked.turns() == [(5, 5)]


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGTERM], ids=["cold", "soft"])
def test_a_shutdown_loses_nothing(stage_factory: MakeStage, name: str, how: signal.Signals) -> None:
    stage = stage_factory(
        BOTH_WAYS[0], home=PROGRESSING, env={"SOFT_SHUTDOWN": "0.5", "VISIBILITY": "4"}
    )
    result = stage.tasks.loops.delay(name, 60, pace=0.05)
    until((stage.directory / f"items.{name}").exists, "the loop to begin")
    until(lambda: len(Worked(stage, name).lines) > 10, "some items")
    if (
        how == signal.SIGTERM
    ):  # a warm shutdown waits for the body, a second signal ends its patience
        stage.worker.kill(how)
        wait_until(lambda: "Warm shutdown" in stage.worker.full_log(), 20, "the shutdown")
        stage.worker.kill(signal.SIGQUIT)
    else:
        stage.worker.kill(how)
    stage.worker.wait(30)
    stopped = len(Worked(stage, name).lines)
    assert stopped < 60
    stage.worker.start()
    got(result)
    worked = Worked(stage, name)
    worked.assert_nothing_skipped(60)
    # The item in whose middle it was interrupted, and no other, was worked on twice.
    assert len(worked.items) - 60 <= 1
    assert worked.turns() in ([], [(stopped - 1, stopped - 1)])


def test_a_task_that_gets_on_each_time_is_never_given_up(stage: Stage) -> None:
    stage.wait_for_state("pages", "pages:gets-on", "done", 3 * PATIENCE)
    begun = stage.events("begin", name="gets-on")
    assert [(event["page"], event["crashes"]) for event in begun] == [
        (0, 0),
        (1, 1),
        (2, 1),
        (3, 1),
    ]
    found = stage.client.status("pages:gets-on", task=f"{PROGRESSING}.pages")
    assert (found.state, found.crashes, found.progress) == ("done", 0, {"page": 3})
    assert found.result == {"name": "gets-on", "pages": 3}


@pytest.mark.nightly
def test_of_ten_thousand_items_none_is_skipped(stage: Stage) -> None:
    stage.wait_for_state("loops", "loops:every-1", "done", 3 * PATIENCE)
    assert len(stage.events("failpoint", name="every-1")) == len(DEATHS)
    assert Worked(stage, "every-1").items == list(range(MANY))
    # It got on each time, so that no crash follows another.
    assert [begun["crashes"] for begun in stage.events("begin", name="every-1")] == [0, 1, 1, 1]


def test_by_default_at_most_a_seconds_items_repeat(stage: Stage) -> None:
    """What is worked on again was worked on just before the death."""
    stage.wait_for_state("loops", "loops:by-default", "done", 3 * PATIENCE)
    worked = Worked(stage, "by-default")
    worked.assert_nothing_skipped(MANY)
    assert len(stage.events("failpoint", name="by-default")) == len(LATE_DEATHS)
    last: dict[int, float] = {}
    for (_, one, died), (_, two, _) in pairwise(worked.lines):
        last[one] = died
        if two != one + 1:
            assert one + 1 in LATE_DEATHS
            # In the run that died, it was not longer ago than this.
            assert died - last[two] < SAVE_EVERY + 1.0
    print(f"{len(worked.items) - MANY} of {MANY} items repeated")
