"""Effects: what is done about one that was begun before, and in which order intent, call and reply
come.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from celery_leases import results
from celery_leases.body.effects import EffectReply
from celery_leases.body.null_lease import Unleased
from celery_leases.decide import after_run
from celery_leases.decide.endings import Lost, Returned
from celery_leases.effect import (
    NAME_MAX,
    AskOperator,
    Effect,
    EffectState,
    RepeatCall,
    UseSaved,
    Verify,
    VerifyLater,
    idempotency_key,
    is_valid_name,
    on_found,
    reference_of,
    was_executed,
)
from celery_leases.errors import (
    Cooldown,
    EffectMisused,
    LeaseConfigurationError,
    LeaseLost,
    LeaseMisuse,
    PermanentFailure,
    RetryLater,
    Snooze,
    StoreUnavailable,
    Uncertain,
)
from celery_leases.failures.actions import cooldown, permanent, retry
from celery_leases.failures.classifier import Rules
from tests.unit.effect_attempts import CHARGE, KEY, Attempt, EffectBench
from tests.unit.fake_errors import fake_error, http_error

SECOND = 1_000_000
READ_TIMEOUT = "requests.exceptions.ReadTimeout"


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> EffectBench:
    monkeypatch.setattr(after_run, "SETTLE_TIMEOUT", 10.0)
    monkeypatch.setattr(results, "RESULT_MAX", 1000)
    return EffectBench()


@pytest.fixture
def attempt(desk: EffectBench) -> Attempt:
    return desk.attempt()


def found(state: EffectState = EffectState.SENT, age: float = 0.0) -> Effect:
    """An effect of an earlier attempt."""
    return Effect(
        KEY, CHARGE, "#0", state, 17, "k", 1_000 * SECOND, 1_000 * SECOND + round(age * SECOND)
    )


def timed_out() -> Any:
    """The request was sent, and nothing came back."""
    return fake_error(READ_TIMEOUT)


def find_later(_: str) -> Any:
    """A coroutine; closed, so that nobody is warned that it is not awaited."""

    async def find() -> None: ...

    found = find()
    found.close()
    return found


class TestOnFound:
    @pytest.mark.parametrize("verifies", [True, False])
    @pytest.mark.parametrize("uncertain", ["stop", "rerun"])
    @pytest.mark.parametrize("age", [0.0, 1e6])
    def test_what_is_done_is_used(self, verifies: bool, uncertain: Any, age: float) -> None:
        """Whatever else was given."""
        done = found(EffectState.DONE, age)
        assert (
            on_found(done, verifies=verifies, verify_after=60.0, uncertain=uncertain) == UseSaved()
        )

    @pytest.mark.parametrize("uncertain", ["stop", "rerun"])
    @pytest.mark.parametrize(
        ("age", "after", "expected"),
        [
            (0.0, 60.0, VerifyLater(60.0)), (59.5, 60.0, VerifyLater(0.5)), (60.0, 60.0, Verify()),
            (1e6, 60.0, Verify()), (0.0, 0.0, Verify()), (-5.0, 60.0, VerifyLater(60.0)),
        ],
    )  # fmt: skip
    def test_it_is_looked_up_once_the_first_request_cannot_be_on_its_way(
        self, uncertain: Any, age: float, after: float, expected: Any
    ) -> None:
        assert (
            on_found(found(age=age), verifies=True, verify_after=after, uncertain=uncertain)
            == expected
        )

    @pytest.mark.parametrize("age", [0.0, 1e6])
    def test_without_a_way_to_look_it_is_called_again_or_parked(self, age: float) -> None:
        given: dict[str, Any] = {"verifies": False, "verify_after": 60.0}
        assert on_found(found(age=age), uncertain="rerun", **given) == RepeatCall()
        assert on_found(found(age=age), uncertain="stop", **given) == AskOperator()


class TestIdempotencyKeys:
    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            (
                ("celery_leases", "t:billing.send_invoice|invoice:1842:2026-04", "charge", "#0"),
                "85ce8fa249cb3fd523e7c90ab344e6b47128bbc07963f6ef",
            ),
            (
                ("celery_leases", "t:billing.send_invoice|invoice:1842:2026-04", "charge", "#1"),
                "64eaf830851587f717262d0556fad170cfd1547ca9b73176",
            ),
            (
                ("billing", "g:naïve ✓", "mail é", "call-12"),
                "5f5b1af271bf0a64f22113b1aa09a7a95245613ede9899d2",
            ),
        ],
    )
    def test_they_are_as_they_were(self, parts: Any, expected: str) -> None:
        assert idempotency_key(*parts) == expected

    def test_each_part_makes_another_key(self) -> None:
        parts = [
            ("celery_leases", KEY, CHARGE, "#0"),
            ("celery", f"_leases{KEY}", CHARGE, "#0"),
            ("celery_leases", f"{KEY}c", "harge", "#0"),
            ("celery_leases", KEY, "charge1", "#0"),
            ("celery_leases", KEY, CHARGE, "#10"),
            ("celery_leases", KEY, CHARGE, "#1"),
        ]
        assert len({idempotency_key(*one) for one in parts}) == len(parts)

    def test_they_carry_no_personal_data_and_fit_anywhere(self) -> None:
        key = idempotency_key("celery_leases", "t:x|jane@example.com", CHARGE, "#0")
        assert set(key) <= set("0123456789abcdef")
        assert len(key) == 48


class TestNamesAndReferences:
    @pytest.mark.parametrize("name", ["charge", "a" * NAME_MAX, "naïve ✓", "two words"])
    def test_a_text_is_a_name(self, name: str) -> None:
        assert is_valid_name(name)

    @pytest.mark.parametrize(
        "name", ["", "  ", "\n", "a" * (NAME_MAX + 1), "a\x00b", "half \ud800", None, 7, b"charge"]
    )
    def test_anything_else_is_refused_before_anything_happens(self, desk, name) -> None:
        assert not is_valid_name(name)
        with pytest.raises(EffectMisused, match=r"effect\(.*1 to 255 characters"):
            desk.attempt().effect(name=name)
        assert (desk.called, desk.steps()) == ([], [])

    @pytest.mark.parametrize(
        ("said", "kept"),
        [("ch_1", "ch_1"), (17, "17"), (None, None), ("", ""), ("a\x00b", "ab"), ("\ud800", "?")],
    )
    def test_a_reference_is_stored_as_text(self, said: Any, kept: str | None) -> None:
        """Without what a database would refuse."""
        assert reference_of(lambda reply: reply, said) == kept


def codes(*statuses: int) -> list[Any]:
    return [http_error(status) for status in statuses]


class TestWhetherACallWasCarriedOut:
    DEFAULT = Rules.default()

    def known(self, error: BaseException, rules: Rules = DEFAULT) -> bool | None:
        """By the default rules, and by those of the task."""
        return was_executed(self.DEFAULT.classify(error, 0.0), rules.classify(error, 0.0))

    @pytest.mark.parametrize(
        "error", [*codes(400, 401, 402, 404, 409, 422, 429), ConnectionRefusedError()], ids=str
    )
    def test_what_was_refused_was_not(self, error: Any) -> None:
        assert self.known(error) is False

    @pytest.mark.parametrize(
        "error",
        [
            *codes(408, 500, 502, 503, 504), timed_out(), TimeoutError(), ConnectionResetError(),
            ValueError(), KeyError(), fake_error("sqlalchemy.exc.IntegrityError"),
            fake_error("psycopg.errors.UndefinedTable", sqlstate="42P01"), FileNotFoundError(),
            PermissionError(),
        ],
        ids=repr,
    )  # fmt: skip
    def test_anything_else_may_have_been(self, error: Any) -> None:
        assert self.known(error) is None

    def test_a_tasks_own_rules_do_not_change_whether_an_effect_happened(self) -> None:
        rules = Rules.default().on(status=504, to=permanent()).on(exc=READ_TIMEOUT, to=permanent())
        rules = rules.on(status=429, to=retry("10s")).on(status=402, to=cooldown("1h"))
        assert [self.known(error, rules) for error in codes(504, 429, 402)] == [None, False, False]
        assert self.known(timed_out(), rules) is None
        assert (
            self.known(FileNotFoundError(), rules.on(exc=FileNotFoundError, to=permanent())) is None
        )

    def test_a_tasks_own_error_is_what_its_rules_make_of_it(self) -> None:
        rules = (
            Rules.default()
            .on(exc="shop.errors.Declined", to=permanent())
            .on(exc="shop.errors.Odd", to=retry())
        )
        assert self.known(fake_error("shop.errors.Declined"), rules) is False
        assert self.known(fake_error("shop.errors.Odd"), rules) is None
        assert self.known(fake_error("shop.errors.Unknown"), rules) is None


class TestOneAttempt:
    def test_the_intent_is_committed_before_the_call_and_the_reply_after_it(self, desk, attempt):
        """Nothing else is done."""
        states = []
        reply = attempt.effect(lambda _: states.append(desk.state))
        assert desk.steps() == ["begin", "call", "finish"]
        assert (states, desk.state) == (["sent"], "done")
        assert reply == EffectReply(None, None, desk.called[0])

    def test_the_call_is_given_the_idempotency_key(self, desk, attempt) -> None:
        reply = attempt.effect()
        assert (
            desk.called
            == [idempotency_key("celery_leases", KEY, CHARGE, "#0")]
            == [reply.idempotency_key]
        )

    def test_the_reply_is_given_as_json_gives_it_back(self, attempt: Attempt) -> None:
        """So that the first attempt gets what a later one will."""
        reply = attempt.effect({"a": (1, 2), "ü": None}, reference=lambda reply: reply["a"][0])
        assert (reply.value, reply.reference, reply.saved) == ({"a": [1, 2], "ü": None}, "1", False)

    def test_one_name_is_used_once(self, desk: EffectBench, attempt: Attempt) -> None:
        """Also when the first call has failed: the next attempt could not tell them apart."""
        attempt.effect(name="mail")
        with pytest.raises(ValueError, match="no"):
            attempt.effect(ValueError("no"))
        for name in ("mail", CHARGE):
            with pytest.raises(EffectMisused, match="twice in one attempt") as caught:
                attempt.effect(name=name)
            assert caught.value.effect == name
        assert len(desk.called) == 2

    def test_a_lost_lease_begins_nothing(self, desk: EffectBench, attempt: Attempt) -> None:
        attempt.lose()
        with pytest.raises(LeaseLost):
            attempt.effect()
        assert desk.steps() == []

    def test_a_record_that_has_moved_on_begins_nothing(self, desk, attempt) -> None:
        desk.attempt("another call")
        with pytest.raises(LeaseLost, match="was changed by another attempt"):
            attempt.effect()
        assert (desk.called, desk.state) == ([], None)

    def test_an_intent_that_took_too_long_to_commit_is_withdrawn(self, desk, attempt) -> None:
        desk.journal.before("begin", attempt.lose)
        with pytest.raises(LeaseLost):
            attempt.effect()
        assert desk.steps() == ["begin", "withdraw"]
        assert (desk.called, desk.state) == ([], None)

    def test_an_intent_that_a_signal_interrupts_is_withdrawn(self, desk, attempt) -> None:
        attempt.pending = SystemExit()
        with pytest.raises(SystemExit):
            attempt.effect()
        assert desk.steps() == ["begin", "withdraw"]
        assert (desk.called, desk.state) == ([], None)

    def test_a_reply_is_recorded_even_if_the_lease_was_lost_meanwhile(self, desk, attempt) -> None:
        with pytest.raises(LeaseLost):
            attempt.effect(lambda _: (attempt.lose(), "ch_1")[1])
        assert (desk.steps(), desk.state) == (["begin", "call", "finish"], "done")
        assert desk.attempt().effect().value == "ch_1"
        assert len(desk.called) == 1

    @pytest.mark.parametrize("pending", [SystemExit(), LeaseLost()])
    def test_a_reply_is_recorded_even_if_a_signal_arrived_meanwhile(self, desk, attempt, pending):
        def called(_: str) -> str:
            attempt.pending = pending
            return "ch_1"

        with pytest.raises(type(pending)):
            attempt.effect(called)
        assert (desk.state, attempt.held_lease.body_state.progressed) == ("done", True)

    def test_a_reply_is_refused_once_another_attempt_has_taken_the_effect_over(self, desk, attempt):
        def overtaken(_: str) -> str:
            assert desk.attempt().effect("theirs", uncertain="rerun").value == "theirs"
            return "ours"

        with pytest.raises(LeaseLost, match="taken over effect 'charge'"):
            attempt.effect(overtaken)
        assert not attempt.held_lease.body_state.progressed
        assert desk.attempt().effect().value == "theirs"

    def test_it_ends_a_row_of_crashes(self, desk: EffectBench, attempt: Attempt) -> None:
        attempt.effect()
        assert attempt.held_lease.body_state.progressed
        second = desk.attempt()
        assert desk.row.crashes == 1
        desk.steps()
        second.effect(name="mail")
        second.effect(name="parcel")
        assert desk.steps() == [
            "begin", "call", "finish", "clear crashes", "begin", "call", "finish",
        ]  # fmt: skip
        assert desk.row.crashes == 0

    def test_it_keeps_the_crashes_of_another_call(self, desk: EffectBench) -> None:
        """If each call runs, each one's crashes count."""
        desk.attempt("one", each_runs=True)
        other = desk.attempt("other", each_runs=True)
        other.effect()
        other.lease.save_progress(1)
        assert (desk.row.crashes, desk.row.crashed_call) == (1, "one")
        own = desk.attempt("other", each_runs=True)
        assert (desk.row.crashes, desk.row.other_crashes) == (1, {"one": 1})
        own.effect(name="mail")
        assert (desk.row.crashes, desk.row.other_crashes) == (0, {"one": 1})

    def test_crashes_that_cannot_be_cleared_are_no_reason_to_fail(self, desk, attempt) -> None:
        attempt = desk.attempt()
        desk.journal.away("clear crashes")
        assert attempt.effect("ok").value == "ok"


class TestStoresAway:
    def test_without_an_intent_there_is_no_call(self, desk, attempt, monkeypatch) -> None:
        monkeypatch.setattr(after_run, "SETTLE_TIMEOUT", 3.0)
        desk.journal.away("begin")
        began = desk.clock.now()
        with pytest.raises(StoreUnavailable):
            attempt.effect()
        assert desk.called == []
        assert 1.0 < desk.clock.now() - began <= 3.0

    def test_it_is_not_tried_for_longer_than_the_lease_lasts(self, desk, attempt, monkeypatch):
        monkeypatch.setattr(after_run, "SETTLE_TIMEOUT", 1000.0)
        desk.journal.away("begin")
        with pytest.raises(LeaseLost):
            attempt.effect()
        assert desk.called == []
        assert desk.clock.now() < 1000.0 + desk.ttl

    @pytest.mark.parametrize("done", [False, True])
    def test_an_intent_is_tried_again(self, desk, attempt, done) -> None:
        """It may be committed already; a blip must not leave it in doubt."""
        desk.journal.away("begin", times=2, done=done)
        attempt.effect()
        assert desk.steps() == ["begin", "begin", "begin", "call", "finish"]

    @pytest.mark.parametrize("verify", [None, lambda _: None])
    def test_the_intent_is_young_when_the_call_is_made(self, desk, attempt, verify) -> None:
        """Otherwise a later attempt asks for the call before that has arrived."""
        desk.journal.away("begin", times=4, done=True)
        asked = {"verify": verify, "verify_after": 1.0} if verify else {}
        attempt.effect(**asked)
        assert desk.steps() == [*["begin"] * (6 if verify else 5), "call", "finish"]

    @staticmethod
    def refuse_the_check(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        """That check, the first of them being number 1, gets no answer from the store."""
        check, made = attempt.held_lease.check, count(1)

        def checked() -> None:
            if next(made) == number:
                raise StoreUnavailable("away", None)
            check()

        monkeypatch.setattr(attempt.held_lease, "check", checked)

    def test_a_lease_of_which_nothing_is_known_after_the_intent_makes_no_call(
        self, desk: EffectBench, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.refuse_the_check(attempt, monkeypatch, 2)
        with pytest.raises(StoreUnavailable):
            attempt.effect()
        assert (desk.steps(), desk.called, desk.state) == (["begin", "withdraw"], [], None)

    def test_an_intent_is_tried_again_also_where_nothing_is_known_of_the_lease_meanwhile(
        self, desk: EffectBench, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desk.journal.away("begin", times=1, done=True)
        self.refuse_the_check(attempt, monkeypatch, 2)
        attempt.effect()
        assert desk.steps() == ["begin", "begin", "call", "finish"]

    def test_an_intent_that_was_certainly_not_written_is_not_tried_again(self, desk, attempt):
        desk.journal.away("begin")
        desk.store.refuses = True
        with pytest.raises(StoreUnavailable):
            attempt.effect()
        assert (desk.steps(), desk.state) == (["begin"], None)

    @pytest.mark.parametrize("done", [False, True])
    def test_a_reply_is_noted_as_soon_as_they_answer(self, desk, attempt, done) -> None:
        desk.journal.away("finish", times=3, done=done)
        assert attempt.effect("ch_1").value == "ch_1"
        assert desk.steps() == ["begin", "call", *["finish"] * 4]

    def test_a_reply_that_cannot_be_noted_leaves_it_in_doubt(self, desk, attempt) -> None:
        desk.journal.away("finish")
        began = desk.clock.now()
        with pytest.raises(StoreUnavailable):
            attempt.effect("ch_1")
        assert 8.0 < desk.clock.now() - began <= 10.0
        assert desk.state == "sent"
        with pytest.raises(Uncertain):
            desk.attempt().effect()
        assert len(desk.called) == 1

    def test_a_withdrawal_that_cannot_be_written_leaves_it_in_doubt(self, desk, attempt) -> None:
        desk.journal.away("withdraw")
        with pytest.raises(ConnectionRefusedError):
            attempt.effect(ConnectionRefusedError())
        assert desk.state == "sent"


class TestACallThatRaises:
    """What was not carried out is forgotten, what may have been stays in doubt."""

    @pytest.mark.parametrize(
        "error",
        [http_error(429, retry_after="7"), http_error(402), ConnectionRefusedError()],
        ids=repr,
    )
    def test_what_was_not_carried_out_is_withdrawn(self, desk, attempt, error) -> None:
        with pytest.raises(type(error)) as caught:
            attempt.effect(error)
        assert caught.value is error
        assert desk.steps() == ["begin", "call", "withdraw"]
        assert desk.state is None
        assert desk.attempt().effect("ch_1").saved is False
        assert desk.called[0] == desk.called[1]

    @pytest.mark.parametrize(
        "error", [timed_out(), http_error(503), RuntimeError(), LeaseLost(), SystemExit()], ids=repr
    )
    def test_what_may_have_been_carried_out_stays_in_doubt(self, desk, attempt, error) -> None:
        with pytest.raises(type(error)):
            attempt.effect(error)
        assert (desk.steps(), desk.state) == (["begin", "call"], "sent")
        with pytest.raises(Uncertain):
            desk.attempt().effect()

    @pytest.mark.parametrize(
        "error", [Cooldown(5), RetryLater(5), Snooze(5), PermanentFailure("no")], ids=repr
    )
    def test_what_the_callable_asks_for_by_itself_is_in_doubt(self, desk, attempt, error) -> None:
        with pytest.raises(type(error)):
            attempt.effect(error)
        assert desk.state == "sent"

    @pytest.mark.parametrize("asked", [Cooldown, RetryLater, Snooze, PermanentFailure])
    @pytest.mark.parametrize(
        ("cause", "state"),
        [(timed_out, "sent"), (TimeoutError, "sent"), (ConnectionRefusedError, None)],
    )
    @pytest.mark.parametrize("chained", ["from", "while handling", "from None"])
    def test_what_it_asks_for_in_place_of_an_error_is_judged_by_that_error(
        self,
        desk: EffectBench,
        attempt: Attempt,
        asked: Any,
        cause: Callable[[], Exception],
        state: str | None,
        chained: str,
    ) -> None:
        def call(_: str) -> None:
            try:
                raise cause()
            except Exception as error:
                if chained == "from":
                    raise asked(5) from error
                if chained == "from None":
                    raise asked(5) from None
                raise asked(5)  # noqa: B904 - as users write it

        with pytest.raises(asked):
            attempt.effect(call)
        assert desk.state == state

    def test_an_error_from_before_the_call_does_not_decide_about_it(self, desk, attempt) -> None:
        try:
            raise ConnectionRefusedError
        except ConnectionRefusedError:
            with pytest.raises(RetryLater):
                attempt.effect(RetryLater(5))
        assert desk.state == "sent"


class TestALaterAttempt:
    def test_a_saved_reply_is_used_without_a_call(self, desk, attempt) -> None:
        first = attempt.effect({"id": "ch_1"}, reference=lambda reply: reply["id"])
        for _ in range(2):
            desk.steps()
            again = desk.attempt().effect("never", reference=lambda reply: reply["id"])
            assert desk.steps() == ["begin"]
            assert again == replace(first, saved=True)
        assert len(desk.called) == 1

    def test_without_verify_it_is_parked_for_an_operator(self, desk, attempt) -> None:
        with pytest.raises(RuntimeError):
            attempt.effect(RuntimeError())
        with pytest.raises(Uncertain, match="leases resolve") as caught:
            desk.attempt().effect()
        assert desk.called[0] in str(caught.value)
        assert (caught.value.effect, caught.value.idempotency_key) == (CHARGE, desk.called[0])
        assert (len(desk.called), desk.state) == (1, "sent")

    def test_by_rerun_it_is_called_again_under_the_same_key(self, desk, attempt) -> None:
        with pytest.raises(RuntimeError):
            attempt.effect(RuntimeError())
        later = desk.attempt()
        reply = later.effect("ch_1", uncertain="rerun")
        assert (reply.value, reply.saved) == ("ch_1", False)
        assert len(desk.called) == 2
        assert len(set(desk.called)) == 1
        row = desk.effect()
        assert row is not None
        assert row.fence == later.record.fence

    @pytest.mark.parametrize(
        "error", [http_error(429), ConnectionRefusedError(), Snooze(5)], ids=repr
    )
    def test_a_refusal_of_the_second_call_does_not_decide_about_the_first(
        self, desk: EffectBench, attempt: Attempt, error: BaseException
    ) -> None:
        """It stays in doubt: an operator would else be shown a key without any effect."""
        with pytest.raises(RuntimeError):
            attempt.effect(RuntimeError())
        with pytest.raises(type(error)):
            desk.attempt().effect(error, uncertain="rerun")
        assert desk.state == "sent"
        with pytest.raises(Uncertain):
            desk.attempt().effect()

    def test_a_lease_lost_before_the_second_call_leaves_the_first_in_doubt(self, desk, attempt):
        with pytest.raises(RuntimeError):
            attempt.effect(RuntimeError())
        later = desk.attempt()
        desk.journal.before("begin", lambda: desk.journal.before("begin", later.lose))
        with pytest.raises(LeaseLost):
            later.effect(uncertain="rerun")
        assert (len(desk.called), desk.state) == (1, "sent")


class TestVerify:
    @pytest.fixture
    def later(self, desk: EffectBench) -> Attempt:
        """An attempt after one that was killed in its call, a long time ago."""
        with pytest.raises(RuntimeError):
            desk.attempt().effect(RuntimeError())
        desk.clock.sleep(100.0)
        desk.called.clear()
        desk.journal.clear()
        return desk.attempt()

    def test_a_reply_that_was_found_is_noted_and_no_call_is_made(self, desk, later) -> None:
        asked: list[str] = []
        reply = later.effect(
            "never",
            verify=lambda key: (asked.append(key), {"id": "ch_1"})[1],
            reference=lambda reply: reply["id"],
        )
        assert (reply.value, reply.reference, reply.saved) == ({"id": "ch_1"}, "ch_1", True)
        assert desk.steps() == ["begin", "begin", "finish", "clear crashes"]
        assert (desk.called, asked) == ([], [reply.idempotency_key])
        assert desk.attempt().effect().value == {"id": "ch_1"}

    def test_none_means_that_it_has_not_happened(self, desk: EffectBench, later: Attempt) -> None:
        reply = later.effect("ch_2", verify=lambda _: None)
        assert desk.steps() == ["begin", "begin", "call", "finish", "clear crashes"]
        assert (reply.value, reply.saved) == ("ch_2", False)

    def test_what_is_refused_after_that_is_withdrawn(self, desk, later) -> None:
        with pytest.raises(ConnectionRefusedError):
            later.effect(ConnectionRefusedError(), verify=lambda _: None)
        assert desk.state is None

    @pytest.mark.parametrize("value", [0, "", [], {}])
    def test_an_empty_reply_is_a_reply(self, desk: EffectBench, later: Attempt, value: Any) -> None:
        assert later.effect("never", verify=lambda _: value).value == value
        assert desk.called == []

    @pytest.mark.parametrize("verify", [lambda _: False, find_later, lambda _: (one for one in ())])
    def test_what_is_no_reply_is_refused_and_changes_nothing(self, desk, later, verify) -> None:
        with pytest.raises(EffectMisused, match="verify returned"):
            later.effect("never", verify=verify)
        assert (desk.state, desk.called) == (EffectState.SENT, [])
        assert desk.attempt().effect("ch_2", verify=lambda _: {"id": "ch_1"}).value == {
            "id": "ch_1"
        }

    def test_a_look_up_without_an_answer_makes_it_uncertain(self, desk, later) -> None:
        def verify(_: str) -> None:
            raise Uncertain("two charges look like it")

        with pytest.raises(Uncertain, match=r"two charges look like it.*leases resolve") as caught:
            later.effect(verify=verify)
        assert caught.value.effect == CHARGE
        assert caught.value.idempotency_key
        assert (desk.called, desk.state) == ([], "sent")

    @pytest.mark.parametrize("error", [timed_out(), http_error(429), Snooze(5)], ids=repr)
    def test_one_that_fails_is_asked_again_by_the_next_attempt(self, desk, later, error) -> None:
        before = desk.effect()

        def verify(_: str) -> None:
            raise error

        with pytest.raises(type(error)):
            later.effect(verify=verify)
        assert (desk.called, desk.effect()) == ([], before)

    def test_it_is_not_asked_before_its_time(self, desk: EffectBench, attempt: Attempt) -> None:
        with pytest.raises(RuntimeError):
            attempt.effect(RuntimeError())
        desk.clock.sleep(20.0)
        asked: list[str] = []
        with pytest.raises(Snooze) as caught:
            desk.attempt().effect(verify=asked.append)
        assert caught.value.delay == pytest.approx(40.0)
        assert (asked, len(desk.called)) == ([], 1)
        desk.clock.sleep(40.0)
        desk.attempt().effect(verify=asked.append)
        assert (len(asked), len(desk.called)) == (1, 2)

    def test_its_time_starts_again_with_each_call(self, desk: EffectBench, later: Attempt) -> None:
        with pytest.raises(RuntimeError):
            later.effect(RuntimeError(), verify=lambda _: None)
        with pytest.raises(Snooze) as caught:
            desk.attempt().effect(verify=lambda _: None)
        assert caught.value.delay == pytest.approx(60.0)

    def test_a_reply_that_came_while_it_looked_counts(self, desk: EffectBench) -> None:
        zombie = desk.attempt()

        def slow(_: str) -> str:
            desk.clock.sleep(100.0)
            looking = desk.attempt()

            def verify(_: str) -> None:
                row = desk.effect()
                assert row is not None
                assert desk.store.finish(row, '"ch_1"', None)

            with pytest.raises(Snooze, match="another attempt has changed"):
                looking.effect("never", verify=verify)
            return "ch_1"

        with pytest.raises(LeaseLost):
            zombie.effect(slow)
        assert desk.attempt().effect().value == "ch_1"
        assert len(desk.called) == 1

    def test_a_lease_lost_while_it_looked_calls_nothing(self, desk, later) -> None:
        before = desk.effect()
        with pytest.raises(LeaseLost):
            later.effect(verify=lambda _: later.lose())
        found = desk.effect()
        assert before is not None
        assert found is not None
        assert (desk.called, found.fence) == ([], before.fence)

    def test_a_reply_it_found_is_not_forgotten_because_a_signal_came(self, desk, later) -> None:
        """What is there must not be called for again: it stays in doubt, and is looked up again."""

        def verify(_: str) -> str:
            later.pending = SystemExit()
            return "ch_1"

        with pytest.raises(SystemExit):
            later.effect(verify=verify)
        assert (desk.called, desk.state) == ([], "sent")


class TestRepliesThatCannotBeKept:
    @pytest.mark.parametrize(
        ("reply", "why"),
        [
            (object(), "result_not_json"),
            ({1, 2}, "result_not_json"),
            ("x" * 2000, "result_too_large"),
        ],
    )
    def test_it_is_done_and_never_called_again(self, desk, attempt, reply, why) -> None:
        with pytest.raises(
            Uncertain, match=f"HAS happened.*{why}.*reference=.*resolve .* --done"
        ) as caught:
            attempt.effect(reply)
        assert (desk.state, attempt.held_lease.body_state.progressed) == ("done", True)
        assert (caught.value.effect, caught.value.idempotency_key) == (CHARGE, desk.called[0])
        with pytest.raises(Uncertain, match=r"HAS happened.*no verify was given"):
            desk.attempt().effect("never", uncertain="rerun")
        with pytest.raises(Uncertain, match=r"HAS happened.*verify did not find it"):
            desk.attempt().effect("never", uncertain="rerun", verify=lambda _: None)
        assert len(desk.called) == 1

    def test_a_corrected_task_looks_its_reply_up(self, desk: EffectBench, attempt: Attempt) -> None:
        with pytest.raises(Uncertain):
            attempt.effect(object())
        before = desk.effect()
        for _ in range(2):
            reply = desk.attempt().effect(
                "never", verify=lambda key: {"id": key}, reference=lambda reply: reply["id"]
            )
            assert reply == EffectReply(
                {"id": desk.called[0]}, desk.called[0], desk.called[0], saved=True
            )
        assert desk.effect() == before
        assert len(desk.called) == 1

    @pytest.mark.parametrize(
        ("found", "why"), [(object(), "result_not_json"), (Uncertain("two of them"), "two of")]
    )
    def test_a_looked_up_reply_that_cannot_be_stored_makes_it_uncertain(
        self, desk: EffectBench, attempt: Attempt, found: Any, why: str
    ) -> None:
        def verify(_: str) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

        with pytest.raises(Uncertain):
            attempt.effect(object())
        with pytest.raises(Uncertain, match=f"HAS happened.*{why}"):
            desk.attempt().effect("never", verify=verify)
        if not isinstance(found, Exception):
            reply = desk.attempt().effect("never", verify=verify, reference=lambda _: "ch_1")
            assert (reply.value, reply.reference) == (None, "ch_1")

    @pytest.mark.parametrize("reply", [object(), "x" * 2000])
    def test_a_reference_is_enough_to_go_on_with(self, desk, attempt, reply) -> None:
        first = attempt.effect(reply, reference=lambda _: "ch_1")
        assert (first.value, first.reference, first.saved) == (None, "ch_1", False)
        assert desk.attempt().effect("never", reference=lambda _: "no") == replace(
            first, saved=True
        )

    def test_a_reference_that_raises_does_not_undo_the_effect(self, desk, attempt) -> None:
        for number in range(2):
            with pytest.raises(KeyError):
                (attempt if not number else desk.attempt()).effect(
                    {"ID": "ch_1"}, reference=lambda reply: reply["id"]
                )
        assert desk.state == "done"
        assert desk.attempt().effect(reference=lambda reply: reply["ID"]).reference == "ch_1"
        assert len(desk.called) == 1

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
    def test_neither_does_one_that_raises_what_ends_a_process(self, desk, attempt, error) -> None:
        class Reply(dict[str, str]):
            def items(self) -> Any:
                raise error

        def raises(_: Any) -> Any:
            raise error

        with pytest.raises(error):
            attempt.effect(Reply(id="ch_1"), reference=raises)
        assert desk.state == "done"

    def test_a_reply_without_a_reference_has_none(self, attempt: Attempt) -> None:
        assert attempt.effect("ok", reference=lambda _: None).reference is None
        assert attempt.desk.attempt().effect(reference=lambda _: None).reference is None


class TestGenerations:
    """A new idempotency key for new work, and only for that."""

    def test_the_key_stays_over_attempts(self, desk: EffectBench) -> None:
        for _ in range(3):
            attempt = desk.attempt()
            with pytest.raises(ConnectionRefusedError):
                attempt.effect(ConnectionRefusedError())
            desk.closed(attempt.record, Lost("gone"))
            desk.records.retry(KEY)
        assert len(set(desk.called)) == 1

    def test_another_call_of_a_rerun_task_is_new_work(self, desk: EffectBench) -> None:
        assert desk.attempt("one", each_runs=True).effect("1").value == "1"
        assert desk.attempt("one", each_runs=True).effect("never").value == "1"
        assert desk.attempt("two", each_runs=True).effect("2").value == "2"
        assert len(set(desk.called)) == len(desk.called) == 2

    @pytest.mark.parametrize("way", ["verify", "stop", "rerun"])
    def test_a_call_of_a_rerun_task_finds_its_effect_after_another_has_had_the_key(self, desk, way):
        with pytest.raises(RuntimeError):
            desk.attempt("one", each_runs=True).effect(RuntimeError())
        other = desk.attempt("two", each_runs=True)
        assert other.effect("of two").value == "of two"
        desk.closed(other.record, Returned(None, None, None))
        again = desk.attempt("one", each_runs=True)
        assert again.record.generation == 2
        if way == "stop":
            with pytest.raises(Uncertain):
                again.effect("never")
        elif way == "verify":
            assert (
                again.effect("never", verify=lambda key: key, verify_after=0).value
                == desk.called[0]
            )
        else:
            assert again.effect("of one", uncertain="rerun").value == "of one"
        assert desk.called == [desk.called[0], desk.called[1]] + [desk.called[0]] * (way == "rerun")
        assert desk.called[0] != desk.called[1]


async def _asynchronous(key: str) -> str:
    return key


def _generating(key: str) -> Any:
    yield key


class TestWhatIsGiven:
    @pytest.mark.parametrize(
        ("given", "error"),
        [
            ({"verify": "payments.find"}, LeaseMisuse),
            ({"reference": "id"}, LeaseMisuse),
            ({"uncertain": "retry"}, LeaseMisuse),
            ({"uncertain": None}, LeaseMisuse),
            ({"verify": lambda: None}, LeaseMisuse),
            ({"reference": isinstance}, LeaseMisuse),
            ({"verify": _asynchronous}, LeaseMisuse),
            ({"verify_after": -1}, LeaseConfigurationError),
            ({"verify_after": "soon"}, LeaseConfigurationError),
        ],
    )
    @pytest.mark.parametrize("leased", [True, False])
    def test_a_wrong_argument_is_named(self, desk, attempt, given, error, leased) -> None:
        (name,) = given
        with pytest.raises(error, match=f"effect.*{name}"):
            (attempt.lease if leased else Unleased()).effect(CHARGE, desk.calling(), **given)
        assert (desk.called, desk.steps()) == ([], [])

    def test_the_call_must_be_one(self, attempt: Attempt) -> None:
        with pytest.raises(LeaseMisuse, match=r"call=.*callable"):
            attempt.lease.effect(CHARGE, {"id": "ch_1"})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "call", [lambda: "ch_1", _asynchronous, _generating], ids=["arity", "async", "generator"]
    )
    def test_the_call_can_be_made_as_it_is(self, desk, attempt, call) -> None:
        """Else the key would be parked for a call that was never made."""
        with pytest.raises(LeaseMisuse, match=r"effect\(call="):
            attempt.lease.effect(CHARGE, call)
        assert desk.steps() == []

    def test_a_call_that_only_promises_a_reply_is_taken_back(self, desk: EffectBench) -> None:
        promise = _asynchronous("")
        with pytest.raises(EffectMisused, match="returned a coroutine"):
            desk.attempt().effect(promise)
        promise.close()
        assert desk.attempt().effect("ch_1").value == "ch_1"

    @pytest.mark.parametrize("after", ["1m", 60])
    def test_verify_after_is_any_duration(self, desk: EffectBench, after: Any) -> None:
        with pytest.raises(RuntimeError):
            desk.attempt().effect(RuntimeError())
        with pytest.raises(Snooze) as caught:
            desk.attempt().effect(verify=lambda _: None, verify_after=after)
        assert caught.value.delay == 60.0


def test_without_a_lease_it_is_the_call_and_nothing_else() -> None:
    marker = object()
    keys: list[str] = []
    for _ in range(2):
        reply = Unleased().effect(
            CHARGE, lambda key: (keys.append(key), marker)[1], reference=lambda _: 17
        )
        assert (reply.value, reply.reference, reply.saved, reply.idempotency_key) == (
            marker, "17", False, keys[-1],
        )  # fmt: skip
    assert len(set(keys)) == 2
    with pytest.raises(socket.gaierror):
        Unleased().effect(CHARGE, lambda _: (_ for _ in ()).throw(socket.gaierror()))
