"""Wherever a process dies: one charge, one invoice and one done record.

By default a process is killed once at each step for each kind of provider, and at two random times.
``EFFECT_SEEDS=50`` repeats that fifty times.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_leases.testing.waits import wait_until
from tests.crash.crash_deployments import Scene
from tests.crash.invoices import (
    IN_DOUBT,
    INSIDE,
    INVOICING,
    STEPS,
    WAYS,
    Case,
    Verdict,
    Wave,
    at_each_step,
    at_random,
)
from tests.integration.deployments import spelled
from tests.integration.payments import Provider

SEEDS = int(os.environ.get("EFFECT_SEEDS", "0"))
RANDOM_EACH = 2
COMBINATIONS = (
    ("redis", "redis", "postgres"),
    ("rabbit", "database", "postgres"),
    ("redis", "database", "mariadb"),
    ("redis", "database", "sqlite"),
)
CHILDREN = 6


def scene_of(
    request: pytest.FixtureRequest,
    directory: Path,
    provider: Provider,
    combination: tuple[str, ...],
    **options: Any,
) -> Scene:
    """A scene of invoices, not started."""
    urls = {"redis": request.getfixturevalue("leases_redis").url}
    if "rabbit" in combination:
        urls["rabbit"] = request.getfixturevalue("leases_rabbit").url
    for server in {"postgres", "mariadb"} & {*combination}:
        urls[server] = request.getfixturevalue(f"leases_{server}").new_database()
    env = {
        "PROVIDER": provider.url,
        "FAILPOINTS": str(directory / "failpoints"),
        "VERIFY_AFTER": "0.5",
    }
    chosen: dict[str, Any] = {
        "home": INVOICING,
        "env": env,
        "ttl": 2,
        "visibility": 30,
        "concurrency": CHILDREN,
    } | options
    return Scene(combination, urls, directory, **chosen)


@pytest.fixture(scope="module", params=COMBINATIONS, ids=spelled)
def wave(
    request: pytest.FixtureRequest, provider: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Wave]:
    """All cases of one combination, launched at once."""
    made = Wave(
        scene_of(request, tmp_path_factory.mktemp("wave"), provider, request.param), provider
    )
    try:
        made.scene.start()
        made.launch(at_each_step())
        made.launch([case for seed in range(RANDOM_EACH) for case in at_random(seed)])
        yield made
        made.scene.wait_until_drained()
    finally:
        made.close()


def case_of(wave: Wave, way: str, step: str) -> Case:
    """The case that was launched for them."""
    (case,) = [
        case
        for case in wave.cases[: len(WAYS) * len(STEPS)]
        if (case.way, case.step) == (way, step)
    ]
    return case


@pytest.mark.both_lease_stores
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", ["dedupe", "verify"])
def test_a_process_killed_at_any_step_charges_once(wave: Wave, way: str, step: str) -> None:
    case = case_of(wave, way, step)
    verdict = wave.assert_sound(case)
    wave.wait_until_killed(case)
    assert (verdict.state, verdict.charges, verdict.invoices) == ("done", 1, 1)
    found = {INSIDE: verdict.reference, "after reply": verdict.reference, "after intent": None}
    expected = {found[step]} if way == "verify" and step in found else set()
    assert set(wave.provider.looks(case.name)) == expected


@pytest.mark.both_lease_stores
@pytest.mark.parametrize("step", STEPS)
def test_an_unknown_outcome_is_never_charged_twice(wave: Wave, step: str) -> None:
    case = case_of(wave, "stop", step)
    verdict = wave.assert_sound(case)
    wave.wait_until_killed(case)
    if step not in IN_DOUBT:
        assert (verdict.state, verdict.charges) == ("done", 1)
        return
    assert (verdict.state, verdict.charges) == ("uncertain", 0 if step == "after intent" else 1)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(RANDOM_EACH * len(WAYS)))
def test_a_process_killed_at_any_moment_charges_once(wave: Wave, number: int) -> None:
    case = wave.cases[len(WAYS) * len(STEPS) + number]
    print(case, wave.assert_sound(case))


@pytest.mark.parametrize("combination", COMBINATIONS[:2], ids=spelled)
def test_a_worker_killed_with_all_its_bodies_charges_once(
    request: pytest.FixtureRequest, tmp_path: Path, provider: Provider, combination: tuple[str, ...]
) -> None:
    wave = Wave(scene_of(request, tmp_path, provider, combination, visibility=2), provider)
    try:
        cases = [Case(way, pause=0.02 * number) for number in range(4) for way in WAYS]
        wave.scene.start()
        wave.launch(cases)
        wave.scene.wait_for("charge", 2)
        wave.scene.kill_worker()
        wave.publish_again(cases)
        wave.scene.another()
        seen = Counter(replace(wave.assert_sound(case), reference=None) for case in cases)
        print(seen)
    finally:
        wave.close()


@pytest.mark.skipif(not SEEDS, reason="a soak: set EFFECT_SEEDS to the number of rounds")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=spelled)
def test_soak(
    request: pytest.FixtureRequest, tmp_path: Path, provider: Provider, combination: tuple[str, ...]
) -> None:
    """Each step and as many random moments; every fifth round a whole worker dies too."""
    wave = Wave(
        scene_of(request, tmp_path, provider, combination, visibility=4, concurrency=10), provider
    )
    seen: Counter[tuple[str, Verdict]] = Counter()
    began, kills, worker = time.monotonic(), 0, wave.scene.start()
    try:
        for seed in range(SEEDS):
            cases = at_each_step() + [
                case for each in range(9) for case in at_random(1000 * seed + each)
            ]
            wave.launch(cases)
            if seed % 5 == 4:
                done = len(wave.scene.events("end"))
                wait_until(
                    lambda done=done: len(wave.scene.events("end")) > done,  # type: ignore[misc]
                    60,
                    "a body to end",
                )
                worker.kill()
                worker.wait(20)
                wave.publish_again(cases)
                worker, kills = wave.scene.another(), kills + 1
            for case in cases:
                seen[case.way, replace(wave.assert_sound(case), reference=None)] += 1
            kills += sum(wave.killed(case) for case in cases if case.step) + sum(
                not case.step for case in cases
            )
    finally:
        print(
            f"{spelled(combination)}: {sum(seen.values())} invoices, {kills} kills, {time.monotonic() - began:.0f} s"
        )
        for (way, verdict), number in sorted(seen.items(), key=str):
            print(
                f"  {way}: {number} x {verdict.state}, {verdict.charges} charged, {verdict.invoices} invoiced"
            )
        wave.close()
