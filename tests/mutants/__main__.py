"""``python -m tests.mutants``: change the library by one token at a time, and list what no test
notices.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter

import pytest

from tests.mutants.mutations import ROOT, mutations
from tests.mutants.runner import Mutants, Outcome
from tests.reliability.runs import record, recorded

KILLERS = (
    "attempt_history",
    "bare_leases",
    "call_group",
    "calls_without_a_run",
    "claim_rules",
    "claimed_rows",
    "closed_groups",
    "copies",
    "deadlines",
    "decisions",
    "eager_stores",
    "execution",
    "failures",
    "guarded_leases",
    "kills_between_steps",
    "lapsed_leases",
    "latest",
    "limited_runs",
    "outcome_fields",
    "outcomes",
    "probes",
    "process",
    "rabbitmq_consumer_timeout",
    "renewal",
    "rerun",
    "retrying",
    "rows",
    "slots",
    "unstored_outcomes",
    "waiting",
)
"""The tests of attempts and decisions, which need no server: ``tests/unit/test_….py``."""


def modules() -> list[str]:
    """What is mutated: attempts, decisions, deadlines, and the statements of a claim."""
    package = ROOT / "celery_leases"
    files = [
        *sorted((package / "attempt").glob("[!_]*.py")),
        *sorted((package / "decide").glob("[!_]*.py")),
        package / "deadlines.py",
        package / "stores" / "sql" / "record_statements.py",
        package / "stores" / "sql" / "rows.py",
    ]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a part of a mutation's name")
    parser.add_argument("--minutes", type=float, help="as many, in random order, as fit in so long")
    parser.add_argument("--record", action="store_true", help="write it to tests/reliability")
    parser.add_argument("--survivors", action="store_true", help="those of the recorded run only")
    parser.add_argument("--seeds", type=int, default=10, help="of the simulator (default: 10)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tests", action="append", help="default: those of attempts and decisions")
    parser.add_argument("--list", action="store_true", help="show the mutations, run nothing")
    given = parser.parse_args()
    chosen = [each for module in modules() for each in mutations(module)]
    if given.only:
        chosen = [each for each in chosen if any(part in each.name for part in given.only)]
    if given.survivors:
        known = {*recorded("mutants")["survivors"]}
        chosen = [each for each in chosen if each.name in known]
    if given.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    began = time.monotonic()
    until = math.inf
    if given.minutes is not None:
        random.Random(1).shuffle(chosen)
        until = began + given.minutes * 60

    def note() -> None:
        if given.record:
            _record(plugin, given, time.monotonic() - began)

    plugin = Mutants(chosen, modules(), given.seeds, given.processes, until, note)
    killers = [f"tests/unit/test_{name}.py" for name in KILLERS]
    arguments = ["-q", "--no-header", "-p", "no:randomly", *(given.tests or killers)]
    pytest.main([*arguments, "-W", "ignore"], plugins=[plugin])
    seconds = time.monotonic() - began
    _tell(plugin, seconds)
    note()
    return any(not each.how for each in plugin.outcomes)


def _tell(plugin: Mutants, seconds: float) -> None:
    ways = Counter(_way(each) for each in plugin.outcomes)
    told = ", ".join(f"{number} {way}" for way, number in ways.most_common())
    of = f"{len(plugin.outcomes)} of {len(plugin.chosen)} mutations"
    print(f"{of}, {plugin.tests} tests, {seconds:.0f} s: {told}")
    for each in plugin.outcomes:
        if not each.how:
            print(f"survives ({each.tests} tests): {each.name}")


def _record(plugin: Mutants, given: argparse.Namespace, seconds: float) -> None:
    if given.survivors:  # the others stay as they were
        found = recorded("mutants")
        gone = {each.name for each in plugin.outcomes if each.how}
        left = {each.name for each in plugin.outcomes if not each.how}
        found["survivors"] = sorted({*found["survivors"]} - (gone - left))
        record("mutants", found)
        return
    by_module: dict[str, Counter[str]] = {}
    for one in plugin.chosen:
        by_module.setdefault(one.module, Counter())["mutations"] += 1
    for each in plugin.outcomes:
        by_module[each.module]["run"] += 1
        by_module[each.module][_way(each)] += 1
    found = {
        "tests": plugin.tests,
        "seeds": given.seeds,
        "minutes": round(seconds / 60, 1),
        "modules": {module: dict(counts) for module, counts in sorted(by_module.items())},
        "survivors": sorted({each.name for each in plugin.outcomes if not each.how}),
    }
    record("mutants", found)


def _way(outcome: Outcome) -> str:
    if not outcome.how:
        return "survive"
    first = outcome.how.partition(" ")[0]
    return {"seed": "by the simulator", "its": "do not end", "crash": "crash"}.get(
        first, "by a test" if "::" in outcome.how else "do not compile"
    )


if __name__ == "__main__":
    sys.exit(main())
