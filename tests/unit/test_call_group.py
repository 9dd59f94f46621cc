"""From the arguments of a call to its cooldown group."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from celery_leases.errors import KeyUnusable
from celery_leases.keys import call_group
from celery_leases.options import Group, KeyMaker, LeaseOptions


def ask(prompt: str, model: str = "large", *, tags: Any = ()) -> None:
    """A body."""


def group_of(group: KeyMaker, *args: Any, **kwargs: Any) -> str | None:
    """The group of a call of that body."""
    options = LeaseOptions(group=None if group is None else Group(group))
    return call_group("shop.ask", options, inspect.signature(ask), args, kwargs)


def test_without_the_option_a_call_has_no_group() -> None:
    assert group_of(None, "hello") is None


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("openai", "openai"),
        ("openai:{model}", "openai:large"),
        ("{tags[0]}", "a"),
        (lambda _, model, tags: f"{model}/{len(tags)}", "large/2"),
    ],
)
def test_a_template_or_a_callable_names_it(group: KeyMaker, expected: str) -> None:
    """With defaults applied, and arguments as the wire would deliver them."""
    assert group_of(group, "hello", tags=("a", "b")) == expected


def test_calls_of_different_keys_share_it() -> None:
    """That is what it is for; and it is not scoped by the task, so that tasks share it too."""
    assert group_of("openai:{model}", "one") == group_of("openai:{model}", "two")


@pytest.mark.parametrize(
    ("group", "args", "why"),
    [
        ("{tags[5]}", ("hello",), "cannot be filled"),
        ("{model}", ("hello", ""), "gave an empty key"),
        ("{model}", ("hello", "a\x00b"), "NUL character"),
        ("{model}", ("hello", "\ud800"), "surrogate"),
        (lambda *_, **__: 7, ("hello",), "returned int; return a str"),
        (lambda *_, **__: 1 / 0, ("hello",), "raised ZeroDivisionError"),
        ("openai", (), "do not fit its signature"),
    ],
)
def test_a_group_no_store_could_hold_is_refused_by_the_name_of_its_option(group, args, why) -> None:
    """As a key would be."""
    with pytest.raises(KeyUnusable, match=why) as caught:
        group_of(group, *args)
    assert "lease_group" in str(caught.value) or not args
