"""Every error of the package crosses processes: by pickle, and by ``cls(*args)`` as JSON result
backends do it.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import pickle
import re
import traceback
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_leases import errors
from celery_leases.errors import (
    AlreadyCompleted,
    CompletionNotCommitted,
    Cooldown,
    CoolingDown,
    EffectMisused,
    ForkedLease,
    GuardOpen,
    KeyReused,
    LeaseConfigurationError,
    LeaseHeld,
    LeaseLost,
    LeaseMisuse,
    LeasesError,
    PermanentFailure,
    RetryLater,
    Snooze,
    WrongDatabase,
)
from celery_leases.signals import SIGNALS
from tests.unit.doc_pages import page
from tests.unit.reference_pages import (
    calls,
    checks_of_django,
    codes,
    findings,
    modules,
    noted_lines,
)
from tests.unit.reference_pages import every_error as every_error_class

Described = type[LeasesError] | type[LeaseLost]
ASKED: list[Any] = [Cooldown, RetryLater, Snooze]
EVERY: list[Any] = [
    found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, BaseException)
    and found.__module__ == errors.__name__
    and not name.startswith("_")
]
DESCRIBED = [kind for kind in EVERY if kind not in ASKED]
SAMPLES: dict[str, Any] = {
    "key": "invoice:1842", "differing": ["amount", "month"], "remaining": 3.5,
    "holder": "host-a/17", "call_id": "call-1", "state": "pending", "reason": "taken",
    "rule": "crash_loop", "error": "shop.errors.Declined", "executed": True, "column": "progress",
    "ours": "redis://one", "theirs": "database", "retry_at": 1_800_000_000.5, "retry_after": 37.5,
    "delay": 60.0, "scope": "group", "effect": "charge", "idempotency_key": "9c6ea44d",
}  # fmt: skip

every_error = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
described_error = pytest.mark.parametrize("kind", DESCRIBED, ids=lambda kind: kind.__name__)


def sample(kind: Any) -> Any:
    if kind in ASKED:
        return kind(**{name: SAMPLES[name] for name in kind.details if name != "until"})
    return kind("what happened", **{name: SAMPLES[name] for name in kind.details})


def told(error: BaseException) -> dict[str, Any]:
    return {"type": type(error), "text": str(error), **vars(error)}


def test_the_list_of_errors_is_not_empty() -> None:
    assert {LeasesError, LeaseLost, KeyReused, LeaseHeld} <= set(EVERY)


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_pickles_with_all_its_details(kind: Described, protocol: int) -> None:
    before = sample(kind)
    assert told(pickle.loads(pickle.dumps(before, protocol))) == told(before)  # noqa: S301 - our own bytes


@every_error
def test_an_error_is_rebuilt_from_its_args_after_json(kind: Described) -> None:
    before = sample(kind)
    assert told(kind(*json.loads(json.dumps(before.args)))) == told(before)


@described_error
def test_the_text_of_an_error_is_its_message(kind: Described) -> None:
    assert str(sample(kind)) == "what happened"


@described_error
def test_details_may_be_left_out_and_are_none(kind: Described) -> None:
    bare = pickle.loads(pickle.dumps(kind("what happened")))  # noqa: S301 - our own bytes
    assert [getattr(bare, name) for name in kind.details] == [None] * len(kind.details)


@described_error
def test_without_a_message_the_docstring_speaks(kind: Described) -> None:
    assert str(kind()) == inspect.cleandoc(kind.__doc__ or "") != ""


@every_error
def test_every_detail_is_declared_and_described_by_its_type(kind: Described) -> None:
    assert set(kind.details) <= set(inspect.get_annotations(kind))


@described_error
def test_an_unknown_detail_is_refused(kind: Described) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes a message"):
        kind("what happened", colour="red")
    with pytest.raises(TypeError, match=f"{kind.__name__} takes a message"):
        kind("what happened", *[None] * (len(kind.details) + 1))


@every_error
def test_all_but_the_two_that_pass_through_have_one_base_that_user_code_can_catch(kind) -> None:
    assert issubclass(kind, LeasesError) != (kind in (LeaseLost, Snooze))


MISUSE = {
    LeaseMisuse, AlreadyCompleted, CompletionNotCommitted, EffectMisused, ForkedLease, GuardOpen,
    WrongDatabase,
}  # fmt: skip


@every_error
def test_misuse_has_one_base_which_is_a_value_error_too(kind: Described) -> None:
    """No other error is one: a store that does not answer must not pass for a wrong argument."""
    assert issubclass(kind, LeaseMisuse) == issubclass(kind, ValueError) == (kind in MISUSE)


@pytest.mark.parametrize("kind", [LeaseLost, Snooze])
def test_a_lost_lease_and_a_snooze_pass_through_except_exception(kind: type[BaseException]) -> None:
    assert issubclass(kind, BaseException)
    assert not issubclass(kind, Exception)


@pytest.mark.parametrize("delay", [300, 300.0, "5m", "300", timedelta(minutes=5)])
@pytest.mark.parametrize("kind", ASKED)
def test_a_delay_may_be_any_duration_and_is_stored_as_seconds(kind: Any, delay: Any) -> None:
    assert (kind(delay).delay, type(kind(delay).delay)) == (300.0, float)


def test_a_cooldown_may_end_at_a_time_which_is_stored_as_epoch_seconds() -> None:
    moment = datetime(2026, 4, 1, 12, tzinfo=UTC)
    assert Cooldown(until=moment).until == Cooldown(until=moment.timestamp()).until == 1775044800.0


def test_a_cooldown_without_a_delay_leaves_it_to_the_policy_of_the_key() -> None:
    bare = Cooldown()
    assert (bare.delay, bare.until, bare.scope, bare.reason) == (None, None, "key", None)


def test_a_reason_is_text_whatever_was_given() -> None:
    assert Cooldown(1, ValueError("draft")).args == (1.0, "draft", None, "key")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Cooldown(0),
        lambda: Cooldown(-1),
        lambda: Cooldown("soon"),
        lambda: Cooldown(float("nan")),
        lambda: Cooldown(True),
        lambda: Cooldown(scope="world"),  # type: ignore[arg-type]
        lambda: Cooldown(until=datetime(2026, 4, 1)),  # noqa: DTZ001 - without a zone on purpose
        lambda: Cooldown(until=float("inf")),
        lambda: Cooldown(until=True),
        lambda: Cooldown(until=0),
        lambda: Cooldown(until=1e12),
        lambda: Cooldown(1, until=1.0),
        lambda: RetryLater(-1),
        lambda: Snooze(0),
        lambda: Snooze("later"),
    ],
)
def test_a_wrong_wait_is_refused_where_it_is_written(wrong: Any) -> None:
    with pytest.raises(LeaseConfigurationError, match=r"(Cooldown|RetryLater|Snooze): .* write "):
        wrong()


def test_a_retry_may_be_asked_for_at_once() -> None:
    assert (RetryLater(0).delay, RetryLater().delay) == (0.0, 1.0)


def test_the_text_of_what_was_asked_names_the_span_and_the_reason() -> None:
    assert str(Cooldown(300, "draft")) == "the task asked for a cooldown of 300 s of its key: draft"
    assert str(Cooldown(scope="group")) == "the task asked for a cooldown of its group"
    assert (
        str(Cooldown(until=1775044800))
        == "the task asked for a cooldown until 1775044800 (epoch seconds) of its key"
    )
    assert str(RetryLater(10)) == "the task asked to be retried after 10 s"
    assert str(Snooze(60, "busy")) == "the task asked to be rescheduled in 60 s: busy"


def test_cooling_down_has_the_time_of_the_next_try() -> None:
    told = CoolingDown(
        "wait",
        key="k",
        retry_at=5.0,
        retry_after=2.0,
        reason="error",
        rule="anything-else",
        scope="key",
    )
    assert told.args == ("wait", "k", 5.0, 2.0, "error", "anything-else", "key")


def test_a_subclass_of_a_user_has_the_details() -> None:
    class Declined(PermanentFailure):
        """The card was declined."""

    assert (str(Declined()), Declined("no", rule="card").rule) == ("The card was declined.", "card")


# -- codes and advice ------------------------------------------------------------------------------


def test_every_error_has_a_code_and_says_what_to_do() -> None:
    found = every_error_class()
    assert len({kind.code for kind in found}) == len(found) > 25
    for kind in found:
        assert "advice" in vars(kind), f"{kind.__name__}: write an advice"
        assert re.fullmatch("[a-z]+(-[a-z]+)*", kind.code)
        assert not kind.advice.endswith(".")


@every_error
def test_a_traceback_ends_with_the_advice_and_the_place_of_the_code(kind: Any) -> None:
    error = sample(kind)
    error.add_note("a note of the user")
    *_, ours, theirs = "".join(traceback.format_exception(error)).splitlines()
    assert ours == f"What to do: {kind.advice}. (docs/reference/errors.md#{kind.code})"
    assert theirs == "a note of the user"
    assert sample(kind).__notes__ == [ours]


LOGGERS = re.compile(r"(^|\.)_?logger\.(warning|error|exception|critical|log)$|\._log$")
HAVE_CODES = {
    "finding.text",  # a finding of the doctor
    "message.msg",  # a check of Django
    "line",  # an event
}


def test_every_log_line_that_asks_for_attention_has_a_code_of_the_page() -> None:
    """Each call of a logger above INFO has a ``code=``, or its line has a code already."""
    found, missing = 0, []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not LOGGERS.search(ast.unparse(node.func)):
                continue
            found += 1
            known = any(each.arg == "code" for each in node.keywords)
            known |= ast.unparse(node.args[0]) == "logging.INFO"
            if not known and not HAVE_CODES & {ast.unparse(one) for one in node.args[1:]}:
                missing.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert found > 40
    assert missing == []
    text = page("warnings")
    for code in noted_lines():
        assert re.fullmatch("[a-z]+(-[a-z]+)*", code)
        assert f"### {code}\n" in text, code


def test_every_event_that_is_a_warning_says_what_to_do() -> None:
    warned = [event for event in SIGNALS if event.level >= logging.WARNING]
    assert len(warned) > 6
    assert [event.__name__ for event in warned if "What to do:" not in (event.__doc__ or "")] == []


def test_every_finding_of_the_doctor_says_what_to_write_and_is_documented() -> None:
    found, text = findings(), page("warnings")
    assert len(found) > 30
    for code, (_, problem, advice) in found.items():
        assert f"### {code}\n" in text, code
        assert problem.strip("…"), code
        assert advice.strip("…"), code
    written = [code for call in calls("_part", "_refused") for code in codes(call)]
    assert {code for code in written if re.fullmatch("[a-z]+(-[a-z]+)+", code)} <= found.keys()


def test_every_check_of_django_has_a_hint() -> None:
    found = [*checks_of_django()]
    assert len(found) > 8
    for name, problem, hint in found:
        assert f"### {name}\n" in page("warnings")
        assert problem.strip("…"), name
        assert hint.strip("…"), name
