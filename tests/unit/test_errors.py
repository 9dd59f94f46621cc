"""Every error of the package crosses processes: by pickle, and by ``cls(*args)`` as JSON result backends do it."""

# ruff: noqa: D103 - names state the behaviour

from __future__ import annotations

import inspect
import json
import pickle
from typing import Any

import pytest

from celery_leases.core import errors
from celery_leases.core.errors import KeyReused, LeaseHeld, LeaseLost, LeasesError, PermanentFailure

Described = type[LeasesError] | type[LeaseLost]
EVERY: list[Any] = [
    found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, BaseException) and found.__module__ == errors.__name__ and not name.startswith("_")
]
SAMPLES: dict[str, Any] = {
    "key": "invoice:1842",
    "differing": ["amount", "month"],
    "remaining": 3.5,
    "holder": "host-a/17",
    "call_id": "call-1",
    "reason": "taken",
    "rule": "crash_loop",
    "error": "shop.errors.Declined",
    "executed": True,
    "ours": "redis://one",
    "theirs": "database",
}

every_error = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)


def sample(kind: Described) -> LeasesError | LeaseLost:
    return kind("what happened", **{name: SAMPLES[name] for name in kind.details})


def told(error: BaseException) -> dict[str, Any]:
    return {"type": type(error), "text": str(error), **vars(error)}


def test_there_are_errors_to_look_at() -> None:
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


@every_error
def test_the_text_of_an_error_is_its_message(kind: Described) -> None:
    assert str(sample(kind)) == "what happened"


@every_error
def test_details_may_be_left_out_and_are_none(kind: Described) -> None:
    bare = pickle.loads(pickle.dumps(kind("what happened")))  # noqa: S301 - our own bytes
    assert [getattr(bare, name) for name in kind.details] == [None] * len(kind.details)


@every_error
def test_without_a_message_the_docstring_speaks(kind: Described) -> None:
    assert str(kind()) == inspect.cleandoc(kind.__doc__ or "") != ""


@every_error
def test_every_detail_is_declared_and_described_by_its_type(kind: Described) -> None:
    assert set(kind.details) <= set(inspect.get_annotations(kind))


@every_error
def test_an_unknown_detail_is_refused(kind: Described) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes a message"):
        kind("what happened", colour="red")
    with pytest.raises(TypeError, match=f"{kind.__name__} takes a message"):
        kind("what happened", *[None] * (len(kind.details) + 1))


@every_error
def test_all_but_a_lost_lease_have_one_base_that_user_code_can_catch(kind: Described) -> None:
    assert issubclass(kind, LeasesError) != (kind is LeaseLost)


def test_a_lost_lease_passes_through_except_exception() -> None:
    assert issubclass(LeaseLost, BaseException)
    assert not issubclass(LeaseLost, Exception)


def test_a_subclass_of_a_user_keeps_the_details() -> None:
    class Declined(PermanentFailure):
        """The card was declined."""

    assert (str(Declined()), Declined("no", rule="card").rule) == ("The card was declined.", "card")
