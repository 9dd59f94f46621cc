"""Whether a task survives a crash at any of its points: no call to the outside is made twice or
lost, and it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from celery_leases.protocol.records import State
from celery_leases.protocol.status import LeaseStatus
from celery_leases.testing.crash_points import EFFECTS, CrashPlan, ExternalCall

Run = Callable[[int | None], tuple[CrashPlan, Any, LeaseStatus]]
"""Runs a call that dies at the point with a number (``None``: at none), and delivers it again until
it has ended: its plan, its result, and the status of its key.
"""
ENDS: Final = (State.DONE, State.UNCERTAIN)
"""Where a call that crashed may end: with its result, or with an effect that an operator must look
at.
"""


def check_survival(task: Any, reset: Callable[[], None], run: Run) -> list[str]:
    """Run *task* once for each point where it can die; the points. See
    ``assert_survives_crashes``.

    *reset* puts everything back before a run; *run* makes a call die at the point with that number.
    """
    reset()
    whole, result, status = run(None)
    if not result.successful():
        raise AssertionError(f"{task.name} does not even end without a crash: {result.result!r}")
    if status.state != State.DONE:
        raise AssertionError(f"{task.name} ended without a crash, but its key is {status.state}")
    if not whole.calls:
        raise AssertionError(
            f"{task.name} makes no call to the outside that is known; name those it makes, as in "
            'watch("shop.gateway.charge"), or make them effects of its lease'
        )
    troubles: list[str] = []
    for number, point in enumerate(whole.points):
        reset()
        plan, result, status = run(number)
        if plan.crashed != point:
            troubles.append(
                f"  point {point} not reached: the task took another way this time; put your own "
                "state back in on_reset()"
            )
            continue
        troubles += [
            f"  dead {point}: {trouble}"
            for trouble in _troubles(whole, plan, result.result, status)
        ]
    reset()
    if troubles:
        raise AssertionError("\n".join((f"{task.name} does not survive each crash:", *troubles)))
    return whole.points


def _troubles(whole: CrashPlan, plan: CrashPlan, result: Any, status: LeaseStatus) -> list[str]:
    found = []
    for what in dict.fromkeys(call.what for call in (*whole.calls, *plan.calls)):
        expected = [call for call in whole.calls if call.what == what]
        made = [call for call in plan.calls if call.what == what]
        found += _miscounted(what, expected, made, ended=status.state == State.DONE)
    if status.state not in ENDS:
        found.append(f"the key is {status.state} in the end: {result!r}")
    return found


def _miscounted(
    what: str, expected: Sequence[ExternalCall], made: Sequence[ExternalCall], *, ended: bool
) -> list[str]:
    """The calls of that name that were made too often and, if the task has *ended*, too seldom.

    A call with arguments that the run without a crash did not have, such as a time, stands for
    one that is missing.
    """
    wanted = Counter(map(_sameness, _distinct(expected)))
    counts = Counter(map(_sameness, _distinct(made)))
    if counts.total() > wanted.total():
        name = "effects under new names or keys" if what == EFFECTS else what
        return [_counted(name, counts.total(), wanted.total(), made)]
    new = (counts - Counter(dict.fromkeys(wanted, counts.total()))).total()
    missing = (wanted - counts).total()
    found = []
    for one, times in wanted.items():
        doubled, lost = counts[one] > times, ended and not new and counts[one] < times
        if doubled or lost:
            same = [call for call in made if _sameness(call) == one]
            shown = next(call.arguments for call in expected if _sameness(call) == one)
            found.append(_counted(f"{what}{shown}", counts[one], times, same))
    if ended and new and missing > new and not found:
        found.append(_counted(what, counts.total(), wanted.total(), made))
    return found


def _sameness(call: ExternalCall) -> str:
    return call.identity if call.identity is not None else call.arguments


def _distinct(calls: Sequence[ExternalCall]) -> list[ExternalCall]:
    """The calls without those that the other side recognises as a repetition."""
    seen: set[tuple[str, str]] = set()
    found = []
    for call in calls:
        if call.identity is not None:
            if (call.what, call.identity) in seen:
                continue
            seen.add((call.what, call.identity))
        found.append(call)
    return found


def _counted(name: str, times: int, expected: int, calls: Sequence[ExternalCall]) -> str:
    lines = "".join(f"\n    attempt {call.attempt}  {call.line}" for call in calls)
    return f"{name}: {times} calls instead of {expected}{lines}"
