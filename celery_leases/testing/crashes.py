"""Checks that a task survives a crash at each of its points: no external call is repeated or
lost, and the task ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from celery_leases.record import State
from celery_leases.status import LeaseStatus
from celery_leases.testing.crash_points import EFFECTS, CrashPlan, ExternalCall

Run = Callable[[int | None], tuple[CrashPlan, Any, LeaseStatus]]
"""Runs a call that dies at the point with this number (``None``: at no point), and delivers it
again until it has ended. Returns its plan, its result, and the status of its key.
"""
ACCEPTED_STATES: Final = (State.DONE, State.UNCERTAIN)
"""The states in which a call that crashed may end: with its result, or with an effect that an
operator must check.
"""


def check_survival(task: Any, reset: Callable[[], None], run: Run) -> list[str]:
    """Run *task* once for each point at which it can die; returns the points. See
    ``assert_survives_crashes``.

    *reset* is called before each run. *run* runs a call that dies at the point with that number.
    """
    reset()
    whole, result, status = run(None)
    if not result.successful():
        raise AssertionError(f"{task.name} does not even end without a crash: {result.result!r}")
    if status.state != State.DONE:
        raise AssertionError(f"{task.name} ended without a crash, but its key is {status.state}")
    if not whole.calls:
        raise AssertionError(
            f"{task.name} makes no known external call; name the functions that it calls, as in "
            'watch("shop.gateway.charge"), or make the calls effects of its lease'
        )
    problems: list[str] = []
    for number, point in enumerate(whole.points):
        reset()
        plan, result, status = run(number)
        if plan.crashed != point:
            problems.append(
                f"  point {point} not reached: the task took another path this time; reset your own "
                "state in on_reset()"
            )
            continue
        problems += [
            f"  dead {point}: {problem}"
            for problem in _problems(whole, plan, result.result, status)
        ]
    reset()
    if problems:
        raise AssertionError("\n".join((f"{task.name} does not survive each crash:", *problems)))
    return whole.points


def _problems(whole: CrashPlan, plan: CrashPlan, result: Any, status: LeaseStatus) -> list[str]:
    found = []
    for what in dict.fromkeys(call.what for call in (*whole.calls, *plan.calls)):
        expected = [call for call in whole.calls if call.what == what]
        made = [call for call in plan.calls if call.what == what]
        found += _count_problems(what, expected, made, ended=status.state == State.DONE)
    if status.state not in ACCEPTED_STATES:
        found.append(f"the key is {status.state} in the end: {result!r}")
    return found


def _count_problems(
    what: str, expected: Sequence[ExternalCall], made: Sequence[ExternalCall], *, ended: bool
) -> list[str]:
    """The calls named *what* that were made too often or, if the task has *ended*, too few times.

    A call with arguments that are new, such as a time, counts as one of the missing calls.
    """
    wanted = Counter(map(_identity_of_call, _without_repetitions(expected)))
    counts = Counter(map(_identity_of_call, _without_repetitions(made)))
    if counts.total() > wanted.total():
        name = "effects under new names or keys" if what == EFFECTS else what
        return [_count_problem(name, counts.total(), wanted.total(), made)]
    new = (counts - Counter(dict.fromkeys(wanted, counts.total()))).total()
    missing = (wanted - counts).total()
    found = []
    for one, times in wanted.items():
        doubled, lost = counts[one] > times, ended and not new and counts[one] < times
        if doubled or lost:
            same = [call for call in made if _identity_of_call(call) == one]
            shown = next(call.arguments for call in expected if _identity_of_call(call) == one)
            found.append(_count_problem(f"{what}{shown}", counts[one], times, same))
    if ended and new and missing > new and not found:
        found.append(_count_problem(what, counts.total(), wanted.total(), made))
    return found


def _identity_of_call(call: ExternalCall) -> str:
    return call.identity if call.identity is not None else call.arguments


def _without_repetitions(calls: Sequence[ExternalCall]) -> list[ExternalCall]:
    """The calls without those that the external service recognises as repeated."""
    seen: set[tuple[str, str]] = set()
    found = []
    for call in calls:
        if call.identity is not None:
            if (call.what, call.identity) in seen:
                continue
            seen.add((call.what, call.identity))
        found.append(call)
    return found


def _count_problem(name: str, times: int, expected: int, calls: Sequence[ExternalCall]) -> str:
    lines = "".join(f"\n    attempt {call.attempt}  {call.line}" for call in calls)
    return f"{name}: {times} calls instead of {expected}{lines}"
