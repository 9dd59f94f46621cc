"""Runs seeds, finds the first that breaks a promise, and makes its run as short as possible."""

from __future__ import annotations

import gc
import logging
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.simulation.checker import Violation, violations
from tests.simulation.history import Note
from tests.simulation.world import World


@dataclass(frozen=True)
class Failure:
    """A seed that breaks a promise, without the calls and accidents that do not matter."""

    seed: int
    without: frozenset[str]
    notes: Sequence[Note]
    violation: Violation
    #: The cluster was observed for a day.
    day: bool = False

    @property
    def command(self) -> str:
        """What repeats the run."""
        left_out = "".join(f' --without "{name}"' for name in sorted(self.without))
        return f"python -m tests.simulation --seed {self.seed}{' --days' * self.day}{left_out}"


def run(
    seed: int,
    without: frozenset[str] = frozenset(),
    total: Counter[str] | None = None,
    *,
    day: bool = False,
) -> Failure | None:
    """Run one seed; *total* counts the steps and the simulated seconds."""
    logging.disable(logging.CRITICAL)
    world = World(seed, without=without, day=day)
    try:
        notes = world.run()
    except Exception as error:  # noqa: BLE001 - an error in the main process of a worker, or of the simulator
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        wrong = Violation("no unexpected error", None, why)
        return Failure(seed, without, world.history, wrong, day)
    finally:
        logging.disable(logging.NOTSET)
        if total is not None:
            total["steps"] += world.scheduler.steps
            total["seconds"] += round(world.shape.span)
    found = violations(notes)
    return Failure(seed, without, notes, found[0], day) if found else None


def collect_seldom() -> None:
    """Let Python look for garbage less often, and not in what the first run has made: a tenth of
    the time of all runs is saved.
    """
    run(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def first_failure(seeds: Iterable[int]) -> Failure | None:
    """The first seed that fails."""
    return next((found for seed in seeds if (found := run(seed)) is not None), None)


def shrunk(failure: Failure) -> Failure:
    """The same violation with fewer calls and accidents: each is left out if it still fails."""
    shape = World(failure.seed, day=failure.day).shape
    parts = [f"accident {number}" for number in range(1, shape.accidents + 1)]
    parts += [f"call {number}" for number in range(1, shape.calls + 1)]
    for part in parts:
        found = run(failure.seed, failure.without | {part}, day=failure.day)
        if found is not None and found.violation.promise == failure.violation.promise:
            failure = found
    return failure
