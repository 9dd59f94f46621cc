"""Calls that run one after the other: the time of all, and how long the key is free in between."""

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, NotDone, Running
from benchmarks.performance.figures import Figure, figure, quantile
from benchmarks.performance.findings import Finding
from benchmarks.performance.journal import BEGUN, ENDED, PUT_BACK
from celery_leases.testing.waits import wait_until

FULL = (50, 0.2)
QUICK = (15, 0.1)
"""Calls, and seconds of each body."""
PATIENCE = 90.0
KEY = "mutex"


def measure(bench: Bench, quick: bool) -> Finding:
    """Both modes, one after the other."""
    calls, seconds = QUICK if quick else FULL
    head = [
        '`lease_runs="each"`',
        "ran",
        "all done after, s",
        "half of them after, s",
        "free while others wait, s",
    ]
    rows = [[*head, "bodies at once", "rescheduled"]]
    facts: dict[str, Figure] = {}
    for contender in roster.OURS:
        with bench.running([contender], notes=BEGUN + ENDED + PUT_BACK) as (one,):
            start = len(one.journal)
            began = one.caller.publish([KEY] * calls, task="mutex", seconds=seconds)["began"]
            _await(one, start, calls)
            entries = one.journal.entries(start)
        begun = sorted(entry.time for entry in entries if entry.what == BEGUN)
        ended = sorted(entry.time for entry in entries if entry.what == ENDED)
        free = max(
            (later - earlier for earlier, later in zip(ended, begun[1:], strict=False)), default=0.0
        )
        at_once = 1 + max(
            sum(one < two for one in begun) - sum(one < two for one in ended) for two in begun
        )
        total = ended[-1] - began if len(ended) == calls else PATIENCE
        reschedule = sum(entry.what == PUT_BACK for entry in entries)
        shown = f"{total:.1f}" if len(ended) == calls else f"> {PATIENCE:.0f}"
        middle = f"{quantile(ended, 0.5) - began:.1f}"
        rows.append(
            [
                contender.title,
                f"{len(ended)} of {calls}",
                shown,
                middle,
                f"{free:.2f}",
                str(at_once),
                str(reschedule),
            ]
        )
        facts |= {
            f"mutex total {contender.name}": figure([total]),
            f"mutex free {contender.name}": figure([free]),
        }
    text = f"{calls} calls of one key with a body of {seconds:g} s, once; {calls * seconds:g} s is ideal."
    return Finding("mutex", [rows], text, facts)


def _await(one: Running, start: int, calls: int) -> None:
    def done() -> bool:
        return sum(entry.what == ENDED for entry in one.journal.entries(start)) >= calls

    try:
        wait_until(done, PATIENCE, "the end of all calls")
    except (TimeoutError, NotDone):
        return
