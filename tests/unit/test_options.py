"""Each option is checked at registration, with a message that shows what to write instead."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from datetime import timedelta
from typing import Any

import pytest

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.classifier import Rules
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.options import (
    APP_ONLY,
    OPTION_NAMES,
    Failures,
    Group,
    LeaseOptions,
)
from tests.unit.task_options import gathered_options, refused


def test_a_task_that_gives_nothing_has_the_published_defaults() -> None:
    assert gathered_options() == LeaseOptions(
        key=None,
        fingerprint=None,
        ttl=15.0,
        renew=True,
        on_lost="interrupt",
        runs="once",
        on_busy=None,
        on_done="replay",
        failures=Failures(
            None,
            cooldown=CooldownPolicy(300.0, factor=2.0, cap=6 * 3600.0, jitter=0.5),
            retries=5,
            failures=10,
            crashes=3,
            idempotent=False,
            resume="transient",
        ),
        group=None,
        retention=7 * 86_400.0,
        outbox=False,
        max_hold=86_400.0,
    )
    assert Failures().classifier == Rules.default()


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        gathered_options().ttl = 3.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Failures().retries = 3  # type: ignore[misc]


WRONG = [
    *[(name, value) for name in ("ttl", "retention") for value in
      (0, -1, "", "fifteen", "15x", "-5s", None, True, float("nan"), float("inf"), 1e12, timedelta(0), [15])],
    ("ttl", 0.5),
    ("ttl", timedelta(milliseconds=500)),
    ("ttl", "500ms"),
    *[(name, value) for name in ("renew",) for value in
      (None, 0, 1, "yes", [])],
    *[(name, value) for name in ("on_lost", "runs", "on_busy", "on_done") for value in
      (None, "", "nonsense", True, 1, ["reschedule"], "PUT_BACK")],
    ("on_busy", "reschedule"),
    ("on_done", "rerun"),
    *[("group", value) for value in ("", " ", 7, b"g", ["a"], True, "{", "a}", "{}", "{0}", "{month!x}")],
    *[("failures", value) for value in (None, 3, {}, {"retries": 3}, Failures, Rules())],
    ("on_lost", "murder"),
    *[("outbox", value) for value in (None, 0, True, "twice", [])],
    *[("key", value) for value in ("", " ", 7, b"k", ["a"], True, "{", "a}", "{}", "{0}", "{0.name}", "{month!x}")],
    *[("fingerprint", value) for value in (True, 7, "month", {"month": 1}, ["month", 1], b"month")],
]  # fmt: skip


class TestWrongValues:
    @pytest.mark.parametrize(("name", "value"), WRONG, ids=repr)
    def test_the_message_names_task_option_and_value_and_what_to_write(self, name, value) -> None:
        message = refused(**{name: value})
        if name in APP_ONLY:
            assert message == (
                f"task billing.send: lease_{name} is no option of a task; write app.conf.leases_{name}={value!r}"
            )
        else:
            assert message.startswith(
                f"task billing.send: lease_{name}={value!r} is not usable; write "
            )

    @pytest.mark.parametrize(("name", "value"), WRONG, ids=repr)
    def test_a_wrong_default_of_the_app_names_the_setting(self, name: str, value: Any) -> None:
        message = refused(defaults={name: value})
        assert message.startswith(f"app.conf: leases_{name}")

    @pytest.mark.parametrize(
        ("name", "value", "hint"),
        [
            ("outbox", True, "False, 'store' or 'once'"),
            ("runs", "twice", "'once' or 'latest' or 'each'"),
            ("on_busy", "skip", "'wait' or 'raise' or 'ignore'"),
            ("on_done", "skip", "'replay' or 'raise' or 'ignore'"),
            ("on_lost", "skip", "'interrupt' or 'flag' or 'kill'"),
            *[
                ("key", key, '"/name/key" for a key that tasks share')
                for key in (
                    "/",
                    "/a",
                    "/a/",
                    "//x",
                    "/a|b/x",
                    "/ /x",
                    "/a\n/x",
                    "/{month}",
                    "/{month}/x",
                    f"/{'x' * 151}/x",
                )
            ],
            ("ttl", 0.2, "at least 1 (seconds); 10 or more is advised"),
            ("retention", "-30", "seconds above 0 (below ten years) as a number, as text such as"),
            ("renew", "no", "True or False"),
            (
                "group",
                7,
                'a template such as "openai:{model}", or a callable of the arguments',
            ),
            (
                "group",
                "{model}",
                "names of the task's parameters (customer_id, month), not 'model'",
            ),
            ("failures", {"retries": 3}, "Failures("),
            (
                "fingerprint",
                "month",
                "a list of argument names, a callable of the arguments, or False",
            ),
            ("key", 7, 'a template such as "invoice:{customer_id}"'),
            ("key", "{0}", "the names of parameters in the braces, not positions"),
            (
                "key",
                "{customer}",
                "names of the task's parameters (customer_id, month), not 'customer'",
            ),
        ],
    )
    def test_the_message_shows_what_to_write(self, name: str, value: Any, hint: str) -> None:
        assert hint in refused(**{name: value})


class TestRightValues:
    @pytest.mark.parametrize("name", ["ttl", "retention"])
    @pytest.mark.parametrize(
        "span", [120, 120.0, timedelta(minutes=2), "2m", "120", "1m60s", "120s"]
    )
    def test_spans_are_seconds_text_or_timedeltas(self, name: str, span: Any) -> None:
        assert getattr(gathered_options(**{name: span}), name) == 120

    def test_a_ttl_of_one_second_is_allowed(self) -> None:
        assert gathered_options(ttl=1).ttl == 1.0

    @pytest.mark.parametrize(
        "key",
        [
            "constant", "{month}", "{customer_id}:{month}", "{month:>10}", "{month!r}",
            "{customer_id.name}", "{customer_id[0]}", "{{{month}}}", str, None,
        ],
    )  # fmt: skip
    def test_templates_and_callables_are_keys(self, key: Any) -> None:
        assert gathered_options(key=key).key == key

    def test_a_body_that_takes_any_keyword_may_have_any_name_in_its_template(self) -> None:
        assert gathered_options(key="{whatever}", parameters=None).key == "{whatever}"

    def test_names_for_the_fingerprint_are_stored_as_a_tuple(self) -> None:
        assert gathered_options(key="{month}", fingerprint=["month"]).fingerprint == ("month",)

    @pytest.mark.parametrize("group", ["openai", "openai:{month}", "{customer_id[0]}", str, None])
    def test_templates_and_callables_are_groups_with_and_without_a_key(self, group: Any) -> None:
        found = gathered_options(group=group).group
        assert found == (None if group is None else Group(group))
        assert gathered_options(group=group, key="{month}").group == found

    @pytest.mark.parametrize(
        ("rate", "pause"), [("60/m", 1.0), ("20/s", 0.05), ("1000/h", 3.6), ("5/d", 17_280.0)]
    )
    def test_a_rate_is_a_pause_between_two_begins(self, rate: str, pause: float) -> None:
        assert Group("g", rate=rate).pause == pytest.approx(1.05 * pause)
        assert Group("g", rate=rate).limited
        assert Group("g", limit=1).limited
        assert not Group("g").limited

    @pytest.mark.parametrize(
        "more",
        [{"limit": 0}, {"limit": 1.5}, {"limit": True}, {"rate": 60}, {"rate": "60"},
         {"rate": "0/s"}, {"rate": "60/min"}, {"rate": "1.5/s"}, {"rate": ""}],
    )  # fmt: skip
    def test_a_wrong_limit_or_rate_is_refused(self, more: dict[str, Any]) -> None:
        with pytest.raises(LeaseConfigurationError, match="Group: "):
            Group("g", **more)

    def test_a_copy_of_a_group_may_have_other_numbers(self) -> None:
        group = Group("g", limit=1, rate="60/m")
        assert replace(group, rate="5/s") == Group("g", limit=1, rate="5/s")
        assert replace(group, rate="5/s").pause == pytest.approx(0.21)
        with pytest.raises(LeaseConfigurationError, match="Group: "):
            replace(group, rate="60")

    @pytest.mark.parametrize("chosen", [False, str])
    def test_a_fingerprint_is_switched_off_or_made_by_a_callable(self, chosen: Any) -> None:
        assert gathered_options(key="{month}", fingerprint=chosen).fingerprint == chosen


WRONG_PARTS = [
    *[(name, value, "a whole number of at least 1") for name in ("failures", "crashes")
      for value in (0, -1, 1.5, True, None, "3", 3.0)],
    *[("retries", value, "a whole number of at least 0") for value in (-1, 1.5, True, None, "3", 0.0)],
    *[("idempotent", value, "True or False") for value in (None, 0, 1, "yes", [])],
    *[("resume", value, "'transient' or 'always' or 'never'") for value in (None, "", "fail", "stop", True, ["never"])],
    *[("rules", value, "Rules.default().on(...), or Rules() for your own rules alone")
      for value in ("default", [], {}, Rules, print)],
    *[("cooldown", value, "seconds above 0 (below ten years) as a number, as text such as")
      for value in (0, -1, "", "soon", None, True, float("nan"), [300], {"base": 300})],
]  # fmt: skip


class TestFailures:
    @pytest.mark.parametrize(("name", "value", "write"), WRONG_PARTS, ids=repr)
    def test_the_message_names_the_wrong_part_its_value_and_what_to_write(
        self, name: str, value: Any, write: str
    ) -> None:
        with pytest.raises(LeaseConfigurationError) as caught:
            Failures(**{name: value})
        message = str(caught.value)
        assert message.startswith(f"Failures: {name}={value!r} is not usable; write {write}")

    @pytest.mark.parametrize("base", [600, 600.0, "10m", timedelta(minutes=10)])
    def test_a_number_is_the_base_of_a_cooldown_that_doubles_up_to_six_hours(
        self, base: Any
    ) -> None:
        assert Failures(cooldown=base).cooldown == CooldownPolicy(
            600.0, factor=2.0, cap=6 * 3600.0, jitter=0.5
        )

    def test_a_base_above_six_hours_is_its_own_cap(self) -> None:
        assert Failures(cooldown="8h").cooldown.cap == 8 * 3600.0

    def test_rules_and_a_policy_are_taken_as_they_are(self) -> None:
        rules, policy = Rules(), CooldownPolicy("10s", factor=3.0, cap="1h", jitter=0.0)
        given = Failures(rules, cooldown=policy)
        assert given.rules is given.classifier is rules
        assert given.cooldown is policy

    def test_a_copy_differs_only_in_what_is_given(self) -> None:
        given = Failures(Rules(), cooldown="1h", retries=0, failures=1, idempotent=True)
        assert replace(given, resume="never") == Failures(
            Rules(), cooldown="1h", retries=0, failures=1, idempotent=True, resume="never"
        )


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("tll", "ttl"),
            ("on_bus", "on_busy"),
            ("retension", "retention"),
            ("keys", "key"),
            ("crash", "failures=Failures(crashes=…)"),
            ("groups", "group"),
            ("rule", "failures=Failures(rules=…)"),
            ("failure", "failures"),
            ("idempotency", "failures=Failures(idempotent=…)"),
        ],
    )  # fmt: skip
    def test_a_name_misspelt_is_answered_with_the_one_meant(self, name: str, meant: str) -> None:
        given: dict[str, Any] = {name: 1}
        assert (
            refused(**given)
            == f"task billing.send: unknown option lease_{name}; did you mean lease_{meant}?"
        )

    def test_the_error_for_an_unknown_name_without_a_similar_one_lists_all(self) -> None:
        message = refused(zzz=1)
        assert all(f"lease_{name}" in message for name in OPTION_NAMES if name not in APP_ONLY)
        assert not any(f"lease_{name}" in message for name in APP_ONLY)

    @pytest.mark.parametrize("name", ["zzz", "key"])
    def test_a_setting_that_is_no_default_is_refused(self, name: str) -> None:
        """A key belongs to one task: as a default it would break every task without that
        parameter.
        """
        assert refused(defaults={name: "{month}"}).startswith(
            f"app.conf: leases_{name} is no default"
        )
