"""``python -m tests.faults``: cut the connection at each request of a delivery to real servers,
before and after it, and list what breaks a promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

from tests.faults.playing import COMBINATIONS, Trial, bench
from tests.faults.scenarios import SCENARIOS
from tests.reliability.runs import record, recorded


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--on", action="append", choices=COMBINATIONS, help="default: all")
    parser.add_argument("--only", action="append", default=[], help="a scenario (default: all)")
    parser.add_argument("--every", type=int, default=1, help="play each n-th cut (default: all)")
    parser.add_argument("--record", action="store_true", help="write it to tests/reliability")
    given = parser.parse_args()
    broken = [play(each, given) for each in given.on or COMBINATIONS]
    return sum(broken) > 0


def play(combination: str, given: argparse.Namespace) -> int:
    """Play the scenarios on a combination; returns how many violations there were."""
    began, trials = time.monotonic(), []
    with bench(combination) as made:
        for scenario in SCENARIOS:
            if given.only and scenario.name not in given.only:
                continue
            points = made.points(scenario)
            told = ", ".join(str(each).removeprefix("after ") for each in points)
            print(f"{combination}: {scenario.name}: {told}", flush=True)
            cuts = [replace(each, before=before) for each in points for before in (True, False)]
            trials += [made.play(scenario, point) for point in cuts[:: given.every]]
        left = made.left_over()
    rows = summed(trials)
    for name, row in rows.items():
        print(f"{combination}: {name}: " + ", ".join(f"{row[each]} {each}" for each in row))
    print(f"{combination}: left at the end: {'; '.join(left) or 'nothing'}", flush=True)
    if given.record:
        known = recorded("faults")
        before = known.get(combination, {}) if given.only else {}
        known[combination] = {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "every": given.every,
            "scenarios": before.get("scenarios", {}) | rows,
            "left": [*before.get("left", []), *left],
        }
        print(record("faults", known))
    return len(left) + sum(bool(trial.wrong) for trial in trials)


def summed(trials: list[Trial]) -> dict[str, dict[str, Any]]:
    """A row for each scenario."""
    rows: dict[str, dict[str, Any]] = {}
    for trial in trials:
        row = rows.setdefault(
            trial.scenario,
            dict.fromkeys(("trials", "cut", "lost by kombu", "violations"), 0)
            | {"longest overlap": 0.0, "longest": 0.0},
        )
        row["trials"] += 1
        row["cut"] += trial.was_cut
        row["lost by kombu"] += trial.lost
        row["violations"] += bool(trial.wrong)
        row["longest overlap"] = round(max(row["longest overlap"], trial.overlap), 2)
        row["longest"] = round(max(row["longest"], trial.seconds), 1)
    return rows


if __name__ == "__main__":
    sys.exit(main())
