"""``python -m tests.simulation``: run seeds and report what breaks a promise."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.reliability.runs import record, recorded
from tests.simulation.search import Failure, collect_seldom, run, shrunk
from tests.simulation.story import story, told
from tests.simulation.world import DAY, World


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="1-300", help="from-to, for example 1-300")
    parser.add_argument("--minutes", type=float, help="run seeds for so long")
    parser.add_argument("--seed", type=int, help="run one seed, and tell what happens")
    parser.add_argument("--days", action="store_true", help="a day of each seed's cluster")
    parser.add_argument("--without", action="append", default=[], help='such as "call 3"')
    parser.add_argument(
        "--record",
        action="store_true",
        help="write it to tests/reliability, after earlier seeds",
    )
    given = parser.parse_args()
    if given.seed is not None:
        return _tell(given.seed, frozenset(given.without), day=given.days)
    collect_seldom()
    began, done = time.process_time(), 0
    failed: list[int] = []
    total: Counter[str] = Counter()
    for seed in _seeds(given.seeds, given.minutes):
        failure = run(seed, total=total, day=given.days)
        done += 1
        if failure is not None:
            failed.append(seed)
            print(f"== seed {seed}\n{story(shrunk(failure))}\n", flush=True)
    spent, days = time.process_time() - began, total["seconds"] / DAY
    told = f"{done} seeds, {days:.1f} days, in {spent:.1f} s of CPU"
    print(f"{told}: {len(failed)} break a promise")
    if given.record:
        found = {"first": int(given.seeds.partition("-")[0]), "seeds": done, "failed": failed}
        found |= {"days": round(days, 2), "steps": total["steps"], "cpu_seconds": round(spent)}
        print(_kept("days" if given.days else "simulation", found))
    return bool(failed)


def _kept(name: str, found: dict[str, Any]) -> Path:
    """Record a run beside the others of other seeds; a run from seed 1 begins anew."""
    others = recorded(name).get("runs", []) if found["first"] > 1 else []
    kept = [run for run in others if run["first"] != found["first"]]
    return record(name, {"runs": sorted([*kept, found], key=lambda run: run["first"])})


def _seeds(given: str, minutes: float | None) -> Iterator[int]:
    first, _, last = given.partition("-")
    if minutes is None:
        yield from range(int(first), int(last or first) + 1)
        return
    until = time.monotonic() + minutes * 60
    for seed in count(int(first)):
        if time.monotonic() > until:
            return
        yield seed


def _tell(seed: int, without: frozenset[str], *, day: bool) -> int:
    failure: Failure | None = run(seed, without, day=day)
    if failure is not None:
        print(story(failure))
        return 1
    print(*told(World(seed, without=without, day=day).run()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
