"""Options that contradict one another, and the defaults an app may give for all its tasks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_leases.failures.classifier import Rules
from celery_leases.options import Failures, LeaseOptions
from tests.unit.task_options import gathered_options, refused

CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"fingerprint": ["month"]}, "fingerprint", "add lease_key"),
    ({"fingerprint": False}, "fingerprint", "add lease_key"),
    ({"on_busy": "ignore"}, "on_busy", "add lease_key"),
    ({"on_done": "ignore"}, "on_done", "add lease_key"),
    ({"on_done": "raise"}, "on_done", "add lease_key"),
    (
        {"key": "{month}", "runs": "each", "fingerprint": ["month"]},
        "fingerprint",
        'lease_runs="each"',
    ),
    ({"runs": "latest"}, "runs", "add it"),
    ({"key": "{month}", "runs": "latest", "on_done": "ignore"}, "on_done", 'lease_runs="latest"'),
    ({"key": "{month}", "runs": "latest", "on_busy": "raise"}, "on_busy", "lose the last change"),
    ({"key": "{month}", "runs": "latest", "outbox": "once"}, "outbox", "write lease_outbox=False"),
    ({"key": "{month}", "debounce": "5s"}, "debounce", 'lease_runs="latest"'),
    ({"key": "{month}", "runs": "latest", "debounce_max": 9}, "debounce_max", "lease_debounce"),
    (
        {"key": "{month}", "runs": "latest", "debounce": 9, "debounce_max": 8},
        "debounce_max",
        "shorter",
    ),
    (
        {"key": "{month}", "fingerprint": ["month", "year"]},
        "fingerprint",
        "'year', which is not a parameter",
    ),
]


class TestContradictions:
    @pytest.mark.parametrize(("given", "name", "neighbour"), CONTRADICTIONS, ids=str)
    def test_the_message_names_the_option_its_value_and_the_neighbour(self, given, name, neighbour):
        message = refused(**given)
        assert re.match(rf"task billing\.send: lease_{name}=", message)
        assert neighbour in message

    def test_rerun_needs_no_key(self) -> None:
        assert gathered_options(runs="each").each_runs

    def test_saying_the_default_aloud_is_no_contradiction(self) -> None:
        assert gathered_options(runs="once", on_done="replay", fingerprint=None) == LeaseOptions()


class TestDefaultsOfTheApp:
    """``app.conf.leases_<option>`` speaks to all tasks, so it cannot contradict what one of them
    is.
    """

    @pytest.mark.parametrize(
        "defaults",
        [
            *[{"on_busy": value} for value in ("wait", "ignore", "raise")],
            *[{"on_done": value} for value in ("replay", "ignore", "raise")],
            {"fingerprint": False},
            {"fingerprint": ["a_parameter_of_some_tasks"]},
            {"runs": "each", "fingerprint": ["month"]},
        ],
        ids=str,
    )
    @pytest.mark.parametrize(
        "given", [{}, {"key": "{month}"}, {"key": "{month}", "runs": "each"}], ids=str
    )
    def test_a_task_that_did_not_ask_is_never_refused(self, defaults, given) -> None:
        assert isinstance(gathered_options(defaults=defaults, **given), LeaseOptions)

    @pytest.mark.parametrize(
        "defaults",
        [
            {"on_busy": "ignore"},
            {"group": "billing"},
            {"group": str},
            {"failures": Failures(Rules(), cooldown="10m", retries=0, resume="never")},
        ],
        ids=lambda defaults: next(iter(defaults)),
    )  # fmt: skip
    @pytest.mark.parametrize("given", [{}, {"key": "{month}"}], ids=str)
    def test_options_for_failures_have_app_wide_defaults(self, defaults, given) -> None:
        (name, value), *_ = defaults.items()
        found = getattr(gathered_options(defaults=defaults, **given), name)
        assert (found.name if name == "group" else found) == value

    def test_the_error_for_a_default_group_with_unknown_parameters_names_the_setting(self) -> None:
        message = refused(defaults={"group": "openai:{model}"})
        assert message.startswith(
            "app.conf: leases_group (for task billing.send)='openai:{model}' is not usable"
        )
        assert gathered_options(defaults={"group": "openai:{model}"}, group="{month}").group

    def test_a_default_counts_if_the_task_has_no_option(self) -> None:
        options = gathered_options(defaults={"ttl": 60, "on_busy": "raise"}, key="{month}", ttl=20)
        assert (options.ttl, options.on_busy) == (20.0, "raise")

    def test_a_task_may_lean_on_a_default(self) -> None:
        assert gathered_options(defaults={"ttl": 3}, key="{month}", ttl=5).ttl == 5.0

    def test_what_the_task_asks_is_still_held_against_a_default(self) -> None:
        assert "lease_fingerprint" in refused(
            defaults={"runs": "each"}, key="{month}", fingerprint=["month"]
        )
