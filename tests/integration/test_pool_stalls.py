"""Every pool and what the process of a body survives: calls that hold it up, and forks. Nothing is
left behind.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from tests.integration.conftest import MakeStage
from tests.integration.deployments import POOL_STORES, Stage, got, until
from tests.integration.process_resources import resource_counts

TTL = 2
NOTICED = 3.0
"""Seconds within which a body must notice the loss on a busy machine; usually milliseconds."""

GREEN = ("gevent", "eventlet")
"""Where a call may block the hub and let threads run; elsewhere that is any sleep."""


@pytest.fixture(scope="module", params=POOL_STORES)
def module_stage(request: pytest.FixtureRequest, stage_factory: MakeStage) -> Iterator[Stage]:
    """A worker of each pool that outlives what its bodies do."""
    if request.param in GREEN:
        pytest.importorskip(request.param)
    options = {"pool": request.param, "concurrency": 1}
    env = {"TTL": str(TTL), "PREFETCH": "1"}
    made = stage_factory(
        POOL_STORES[request.param], home="tests.apps.blocking_bodies", worker=options, env=env
    )
    yield made
    made.close()


@pytest.fixture
def process(stage: Stage, name: str) -> Iterator[int]:
    """The process of the bodies, which has no more of anything after the test than before."""
    for number in range(2):
        each = f"{name}-{number}"
        result = stage.tasks.checks.delay(each, gate="once")
        warm = stage.wait_for("begin", name=each)[0]
        stage.client.release(f"checks:{each}", task=stage.tasks.checks.name)
        got(result)  # it was rescheduled, which has connected to the broker

    def counted() -> Counter[str]:
        got(stage.tasks.collects.delay())
        return resource_counts(warm["pid"])

    before = counted() | counted()
    yield warm["pid"]
    try:
        until(lambda: not counted() - before, f"{stage.worker} to have no more than {before}")
    except TimeoutError as error:
        raise TimeoutError(f"{error}; there are too many of {counted() - before}") from error


def test_a_body_that_holds_the_gil_beyond_the_ttl_is_interrupted_and_runs_again(
    stage: Stage, name: str, process: int
) -> None:
    once = stage.gate()
    result = stage.tasks.hogs.delay(name, str(once), 1.2 * TTL, stage.worker.pool == "threads")
    held, *_ = stage.wait_for("held", name=name)
    (lost,) = stage.wait_for("lost", timeout=NOTICED, name=name)
    first, second = stage.wait_for("begin", 2, name=name)
    assert got(result)["fence"] == second["fence"] > first["fence"]
    assert (lost["pid"], held["pid"]) == (process, process)
    row = stage.wait_for_state("hogs", f"hogs:{name}", "done")
    assert (row["attempt"], row["crashes"], row["previous_ended"]) == (1, 0, "lost")
    assert len(stage.events("end", name=name)) == 1
    print(f"held for {held['seconds']:.2f} s, told {lost['t'] - held['t']:.3f} s later")


def test_a_body_that_hangs_for_too_long_fails(stage: Stage, name: str, process: int) -> None:
    """Given back, it would only hang again."""
    if stage.worker.pool == "threads":
        pytest.skip("it is told by check() there, which a body that hangs does not call")
    result = stage.tasks.hangs.delay(name)
    row = stage.wait_for_state("hangs", f"hangs:{name}", "failed")
    assert json.loads(row["error"])["rule"] == "time-or-memory-limit"
    with pytest.raises(SoftTimeLimitExceeded, match="held for its time_limit"):
        got(result)
    assert len(stage.events("begin", name=name)) == len(stage.events("lost", name=name)) == 1


def test_a_body_that_blocks_the_hub_has_its_lease(stage: Stage, name: str, process: int) -> None:
    if stage.worker.pool not in GREEN:
        pytest.skip(
            "a call that blocks a thread is any sleep there; see tests/integration/test_pools.py"
        )
    result = stage.tasks.blocks.delay(name, 2.5 * TTL)
    (first,) = stage.wait_for("begin", name=name)
    lapsed = 0
    while not stage.events("end", name=name):
        lapsed += not stage.is_held("blocks", f"blocks:{name}") and not stage.events(
            "end", name=name
        )
    assert got(result)["fence"] == first["fence"]
    (end,) = stage.events("end", name=name)
    row = stage.wait_for_state("blocks", f"blocks:{name}", "done")
    assert (row["attempt"], row["crashes"], end["held"], lapsed) == (1, 0, True, 0)


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_a_process_that_the_body_has_forked_takes_no_step_of_the_protocol(
    stage: Stage, name: str, process: int, how: str, code: int
) -> None:
    result = stage.tasks.forks.delay(name, how)
    answer = got(result)
    (begun,), (end,) = stage.events("begin", name=name), stage.wait_for("end", name=name)
    assert (answer["name"], answer["fence"]) == (name, begun["fence"])
    assert (end["pid"], end["child"], end["held"]) == (process, code, True)
    row = stage.wait_for_state("forks", f"forks:{name}", "done")
    assert (row["attempt"], row["crashes"], row["failures"]) == (1, 0, 0)
    assert len(stage.log(f"key forks:{name}: attempt")) == 1
    assert (
        not Path(f"/proc/{process}").joinpath("task", str(process), "children").read_text().split()
    )
