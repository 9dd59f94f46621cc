"""``python -m tests.soak --minutes 10``: three workers of three pools run 200 keys at a time while
processes are killed and paused, connections cut, refused and held back, and servers killed and
paused.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

from tests.reliability.runs import record, recorded
from tests.soak.deployment import deployed
from tests.soak.faults import Faults
from tests.soak.judging import judged
from tests.soak.load import Load


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1, help="of the faults and the calls")
    parser.add_argument("--leases", choices=("redis", "database"), default="redis")
    parser.add_argument("--per-second", type=float, default=5.0, help="how many calls")
    parser.add_argument("--record", action="store_true", help="write it to tests/reliability")
    given = parser.parse_args()
    with deployed(given.leases) as deployment:
        load = Load(deployment, given.seed, given.per_second)
        faults = Faults(deployment, given.seed)
        load.start()
        faults.start()
        time.sleep(given.minutes * 60)
        load.stop()
        if not load.published:
            raise RuntimeError(f"nothing was published: {load.refused}")
        faults.stop()
        for worker in deployment.workers.values():
            worker.start(120)
        found = judged(deployment, load.published)
        for worker in deployment.workers.values():
            if found.violations:
                print(f"-- log of {worker.name}", *worker.full_log().splitlines()[-40:], sep="\n")
    number = sum(faults.counts.values())
    print(f"seed {given.seed}, leases in {given.leases}: {found.keys} keys, {found.runs} runs,")
    print(f"{sum(load.published.values())} calls, {number} faults: {dict(faults.counts)}")
    print(f"errors of publishers: {dict(load.refused)}")
    print(f"longest overlap {found.longest_overlap:.2f} s, of {found.overlaps};", end=" ")
    print(f"longest pause {faults.longest_pause:.1f} s; drained in {found.drained_in:.0f} s")
    print(f"{len(found.violations)} violations", *found.violations[:20], sep="\n")
    if given.record:
        runs = recorded("soak").get("runs", [])
        runs = [
            each for each in runs if (each["seed"], each["leases"]) != (given.seed, given.leases)
        ]
        this = asdict(found) | {
            "seed": given.seed,
            "leases": given.leases,
            "minutes": given.minutes,
            "calls": sum(load.published.values()),
            "faults": dict(sorted(faults.counts.items())),
            "longest_pause": round(faults.longest_pause, 1),
        }
        this["longest_overlap"] = round(found.longest_overlap, 2)
        this["drained_in"] = round(found.drained_in)
        print(record("soak", {"runs": [*runs, this]}))
    return bool(found.violations)


if __name__ == "__main__":
    sys.exit(main())
