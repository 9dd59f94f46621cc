"""Groups with a limit or a rate, over workers that are killed. ``make test-all`` also measures long
runs; ``-s`` shows their numbers.
"""

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene, kill
from tests.integration.deployments import BOTH_WAYS, spelled

HOME = "tests.apps.grouped"
LIMIT = 3
measurement = pytest.mark.skipif(
    "not config.getoption('--all-combinations')", reason="a measurement of a minute"
)
pytestmark = pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)


def most_at_once(events: Sequence[Mapping[str, Any]], killed: Mapping[int, float]) -> int:
    """How many bodies ran at the same time, at most; *killed* has the times at which processes
    died.
    """
    steps: list[tuple[float, int]] = []
    running: dict[tuple[int, str], float] = {}
    for event in events:
        if event["what"] not in ("begin", "end"):
            continue
        at = event["pid"], event["id"]
        if event["what"] == "begin":
            running[at] = event["t"]
            steps.append((event["t"], 1))
        elif running.pop(at, None) is not None:
            steps.append((event["t"], -1))
    for pid, _ in running:
        assert pid in killed, f"the body in {pid} has no end"
        steps.append((killed[pid], -1))
    now = most = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def run_limited(scene: Scene, calls: int, seconds: float, ideal: float, *, kills: bool) -> float:
    """Run *calls* calls of the group with two workers; *kills*: two children and then a worker are
    killed. Returns the time that it took in ideal times.
    """
    second = scene.another()
    killed: dict[int, float] = {}
    began = time.monotonic()
    results = [scene.send("limited", f"{number}", seconds) for number in range(calls)]
    for done in (calls // 8, calls // 4) if kills else ():
        scene.wait_for("end", done)
        at_work = set(scene.worker.children()) | set(second.children())
        victim = next(
            event["pid"]
            for event in reversed(scene.events("begin"))
            if event["pid"] in at_work and event["pid"] not in killed
        )
        killed[victim] = kill(victim)
    if kills:
        scene.wait_for("end", calls // 2)
        scene.stop_consuming(scene.worker)
        children = scene.worker.children()
        scene.kill_worker()
        killed |= dict.fromkeys(children, time.monotonic())
    for result in results:
        result.get(timeout=120)
    took = time.monotonic() - began
    most = most_at_once(scene.events(), killed)
    print(
        f"{scene.broker}-{scene.lease_store}: {calls} calls of {seconds} s took {took:.1f} s (ideal {ideal:.1f} s), "
        f"at most {most} at a time, {len(scene.events('begin'))} begins, "
        f"{scene.logs().count('rescheduled in')} reschedules"
    )
    assert most <= LIMIT
    assert len({event["name"] for event in scene.events("end")}) == calls
    return took / ideal


def test_r2_never_more_than_the_limit_run(scene_factory: MakeScene) -> None:
    """Although a child and a worker are killed, and all calls are done."""
    scene = scene_factory(home=HOME, concurrency=4, visibility=60, env={"LIMIT": str(LIMIT)})
    run_limited(scene, 16, 0.3, 1.6, kills=True)


def test_r2_the_smallest_limit_counts(scene_factory: MakeScene) -> None:
    """Two workers give one group different limits: a body of the limit 1 runs alone."""
    scene = scene_factory(home=HOME, concurrency=3, visibility=60, env={"LIMIT": "3"})
    alone = scene.another(env={"LIMIT": "1"})
    results = [scene.send("limited", f"{number}", 0.2) for number in range(24)]
    for result in results:
        result.get(timeout=60)
    of_one, bodies = set(alone.children()), {}
    for event in scene.events():
        if event["what"] in ("begin", "end"):
            bodies.setdefault((event["pid"], event["name"]), []).append(event["t"])
    strict = [times for (pid, _), times in bodies.items() if pid in of_one]
    assert strict
    assert len(strict) < len(bodies)
    for begin, end in strict:
        assert sum(first < end and begin < last for first, last in bodies.values()) == 1


@measurement
@pytest.mark.parametrize("kills", [False, True])
def test_forty_keys(scene_factory: MakeScene, kills: bool) -> None:
    """Two children and a worker are killed: never more than the limit, and within one and a half
    times the ideal.
    """
    scene = scene_factory(
        home=HOME, concurrency=8, ttl=5, visibility=60, env={"LIMIT": str(LIMIT), "PREFETCH": "4"}
    )
    assert run_limited(scene, 40, 2.0, 40 / LIMIT * 2.0, kills=kills) <= 1.5


@measurement
def test_calls_that_came_much_later_overtake_few(scene_factory: MakeScene) -> None:
    """Of a group that gets more calls than it can run, over three workers."""
    env = {"LIMIT": "2", "PREFETCH": "4"}
    scene = scene_factory(home=HOME, concurrency=2, visibility=60, env=env)
    for _ in range(2):
        scene.another()
    came, results = {}, []
    for number in range(200):
        came[f"{number}"] = time.monotonic()
        results.append(scene.send("limited", f"{number}", 0.2))
        time.sleep(0.05)
    for result in results:
        result.get(timeout=60)
    began = {event["name"]: event["t"] for event in scene.events("begin")}
    overtaken = [
        sum(came[other] > came[name] + 2.0 and began[other] < began[name] for other in came)
        for name in came
    ]
    print(
        f"{scene.broker}-{scene.lease_store}: a call waited at most "
        f"{max(began[name] - came[name] for name in came):.1f} s, and was overtaken by at most {max(overtaken)} calls "
        f"that came more than 2 s later; {sum(map(bool, overtaken))} of 200 were"
    )
    assert max(overtaken) <= 20


@measurement
def test_a_thousand_calls_at_twenty_a_second(scene_factory: MakeScene) -> None:
    """Over three workers: at most 20 begin in any second + 1, within 1.2 times the ideal."""
    scene = scene_factory(home=HOME, concurrency=4, ttl=15, visibility=60, env={"PREFETCH": "4"})
    for _ in range(2):
        scene.another()
    began = time.monotonic()
    results = [scene.send("rated", f"{number}") for number in range(1000)]
    for result in results:
        result.get(timeout=120)
    took = time.monotonic() - began
    times = sorted(event["t"] for event in scene.events("begin"))
    most = max(bisect_right(times, time + 1.0) - place for place, time in enumerate(times))
    print(
        f"{scene.broker}-{scene.lease_store}: 1,000 calls took {took:.1f} s, at most {most} began in a second, "
        f"{scene.logs().count('rescheduled in')} reschedules"
    )
    assert most <= 21
    assert took <= 1.2 * 50


@measurement
def test_waiting_calls_delay_no_other_task(scene_factory: MakeScene) -> None:
    """5,000 calls of a full group wait."""
    env = {"PREFETCH": "4", "LIMIT": "1"}
    scene = scene_factory(home=HOME, concurrency=4, ttl=15, visibility=600, env=env)
    scene.send("limited", "first", 600.0)
    scene.wait_for("begin", 1)
    began = time.monotonic()
    for number in range(5000):
        scene.send("limited", f"{number}", 0.0)
    scene.send("free", "last").get(timeout=300)  # the queue is first in, first out
    received = time.monotonic() - began
    took = []
    for number in range(20):
        began = time.monotonic()
        scene.send("free", f"{number}").get(timeout=60)
        took.append(time.monotonic() - began)
        time.sleep(0.3)
    where = f"{scene.broker}-{scene.lease_store}"
    print(f"{where}: 5,000 calls received in {received:.1f} s; then another took {max(took):.2f} s")
    assert max(took) < 3.0
