"""Effects with real workers: the ledger after failures, refusals, timeouts and repairs."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from celery_leases import CoolingDown, LeaseClient, LeaseStatus, PermanentFailure, Uncertain
from tests.integration.conftest import MakeStage
from tests.integration.deployments import BOTH_WAYS, Stage, environment, got, spelled
from tests.integration.payments import Provider
from tests.integration.rate_limited_server import Answered
from tests.support.records import assert_has

INVOICING = "tests.apps.invoicing"
LIMITED = {"status": 429, "headers": {"retry-after": "1"}}
SILENT = {"never": True}


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=spelled)
def module_stage(
    request: pytest.FixtureRequest, stage_factory: MakeStage, provider: Provider
) -> Iterator[Stage]:
    """A worker that charges; at its end nothing may be left in the queue."""
    made = stage_factory(request.param, home=INVOICING, env={"PROVIDER": provider.url})
    yield made
    made.close_when_drained(request.session)


def charge_events(stage: Stage, name: str) -> list[tuple[str, bool]]:
    """Reference and ``saved`` of each effect that a body was given."""
    return [(event["reference"], event["saved"]) for event in stage.events("charge", name=name)]


def status(stage: Stage, name: str, task: str = "pay") -> LeaseStatus:
    return stage.client.status(f"{task}:{name}", task=f"{INVOICING}.{task}")


def raised(result: Any, kind: type[BaseException]) -> BaseException:
    with pytest.raises(kind) as caught:
        got(result)
    return caught.value


def test_over_failures_the_call_is_made_once(stage: Stage, provider: Provider, name: str) -> None:
    side = stage.side_queue()
    after = [["fail", "no"], ["retry", 0.1], ["later", 0.1], ["snooze", 0.1]]
    result = stage.tasks.pay.apply_async((name, after), queue=side)
    stage.forward(side, copies=3)
    (charge,) = got(result)["charges"]
    assert provider.charges(name) == [charge]
    assert charge_events(stage, name) == [(charge, False), *[(charge, True)] * 4]
    assert len(provider.lines("asked", name)) == 1
    found = status(stage, name)
    assert (found.state, found.reference) == ("done", charge)
    # Five runs; the snooze gave its attempt back.
    assert (len(stage.events("begin", name=name)), found.attempt) == (5, 4)


def test_several_effects_are_made_once_each(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, {}, LIMITED)
    result = got(stage.tasks.pay.delay(name, names=["charge", "mail"]))
    assert provider.charges(name) == result["charges"]
    one, two, again = provider.keys(name)
    assert (one != two, two == again) == (True, True)
    effects = status(stage, name).effects
    assert [(effect.name, effect.state, effect.reference) for effect in effects] == [
        ("charge", "done", result["charges"][0]),
        ("mail", "done", result["charges"][1]),
    ]
    assert status(stage, name).reference == result["charges"][1]


def test_a_call_whose_effect_cannot_be_read_waits_until_it_is_repaired(
    stage: Stage, provider: Provider, name: str
) -> None:
    result = stage.tasks.pay.delay(name, [["later", 5]])
    row = stage.wait_for_state("pay", f"pay:{name}", "pending")
    _write_effect_state(stage, row["stored_key"], "bogus")
    assert (
        "effect 'charge' cannot be read: its column state has 'bogus'"
        in stage.wait_for_log(result.id, "cannot be")[0]
    )
    found = status(stage, name)
    assert ([effect.state for effect in found.effects], found.state, found.attempt) == (
        ["unreadable"],
        "pending",
        1,
    )
    assert result.state == "RETRY"
    _write_effect_state(stage, row["stored_key"], "done")
    (charge,) = got(result)["charges"]
    assert provider.charges(name) == [charge]
    assert charge_events(stage, name) == [(charge, False), (charge, True)]


def _write_effect_state(stage: Stage, stored_key: str, state: str) -> None:
    with stage._engine.connect() as connection:
        statement = text("UPDATE celery_leases_effects SET state = :state WHERE stored_key = :key")
        connection.execute(statement, {"state": state, "key": stored_key})


def test_a_limited_call_is_made_again_later(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, LIMITED)
    result = stage.tasks.pay.delay(name)
    stage.wait_for_state("pay", f"pay:{name}", "cooling")
    assert status(stage, name).effects == ()
    assert provider.charges(name) == []
    (charge,) = got(result)["charges"]
    assert provider.charges(name) == [charge]
    assert charge_events(stage, name) == [(charge, False)]
    assert len(set(provider.keys(name))) == 1
    assert len(provider.keys(name)) == 2


def test_a_declined_charge_fails_and_is_repeated_after_an_operators_retry(
    stage: Stage, provider: Provider, name: str
) -> None:
    provider.script(name, {"status": 402})
    error = raised(stage.tasks.stops.delay(name), Answered)
    assert isinstance(error, Answered)
    assert error.status == 402
    assert_has(status(stage, name, "stops"), state="failed", effects=())
    stage.client.retry(f"stops:{name}", task=f"{INVOICING}.stops")
    (charge,) = got(stage.tasks.stops.delay(name))["charges"]
    assert provider.charges(name) == [charge]
    assert len(set(provider.keys(name))) == 1


def test_a_refused_connection_is_retried(stage: Stage, provider: Provider, name: str) -> None:
    (charge,) = got(stage.tasks.pay.delay(name, away=[0, 1]))["charges"]
    assert provider.charges(name) == [charge]
    assert len(stage.events("begin", name=name)) == 3


def test_after_a_timeout_it_is_looked_up(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, SILENT)
    (charge,) = got(stage.tasks.pay.delay(name, way="verify", timeout=0.3))["charges"]
    assert provider.charges(name) == [charge]
    assert (len(provider.keys(name)), provider.looks(name)) == (1, [charge])
    assert charge_events(stage, name) == [(charge, True)]
    assert status(stage, name).reference == charge


def test_a_deduping_provider_is_asked_again(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, SILENT, {"status": 500, "charged": True}, dedupe=True)
    (charge,) = got(stage.tasks.pay.delay(name, way="dedupe", timeout=0.3))["charges"]
    assert provider.charges(name) == [charge]
    assert len(provider.keys(name)) == 3
    assert len(set(provider.keys(name))) == 1


@pytest.mark.parametrize("way", ["stop", "unsure"])
def test_in_doubt_it_waits_for_a_person(
    stage: Stage, provider: Provider, name: str, way: str
) -> None:
    provider.script(name, SILENT)
    error = raised(stage.tasks.pay.delay(name, way=way, timeout=0.3), Uncertain)
    (key,) = provider.keys(name)
    assert key in str(error)
    assert "leases resolve" in str(error)
    found = status(stage, name)
    assert (found.state, found.reason, found.reference) == ("uncertain", "uncertain", None)
    assert_has(found.effects[0], name="charge", state="sent", idempotency_key=key)
    assert found.message() == "It may have been executed; a person must check"
    raised(stage.tasks.pay.delay(name, way=way, timeout=0.3), PermanentFailure)
    assert len(provider.charges(name)) == 1
    assert len(stage.events("begin", name=name)) == 2


def test_an_operator_resolves_what_happened(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, SILENT)
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    (charge,) = provider.charges(name)
    done = stage.client.resolve(
        f"pay:{name}", "done", result={"charges": [charge]}, task=f"{INVOICING}.pay"
    )
    assert (done.state, done.result) == ("done", {"charges": [charge]})
    assert got(stage.tasks.pay.delay(name, timeout=0.3)) == {"charges": [charge]}
    assert provider.charges(name) == [charge]
    assert len(stage.events("begin", name=name)) == 2


def test_an_operator_lets_it_run_again(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, {"status": 500})
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    again = stage.client.resolve(f"pay:{name}", "retry", task=f"{INVOICING}.pay")
    assert (again.state, again.effects) == ("pending", ())
    (charge,) = got(stage.tasks.pay.delay(name, timeout=0.3))["charges"]
    assert provider.charges(name) == [charge]
    assert len(set(provider.keys(name))) == 1


def test_a_retry_does_not_make_it_certain(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, SILENT)
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    stage.client.retry(f"pay:{name}", task=f"{INVOICING}.pay")
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    assert len(provider.charges(name)) == 1


def test_it_is_looked_up_once_the_request_is_over(
    stage: Stage, provider: Provider, name: str
) -> None:
    provider.script(name, SILENT)
    (charge,) = got(stage.tasks.pay.delay(name, way="later", timeout=0.3))["charges"]
    assert provider.charges(name) == [charge]
    (asked,) = provider.lines("asked", name)
    (looked,) = provider.lines("looked", key=asked["key"])
    assert 2.9 < looked["t"] - asked["t"] < 6.0
    assert len(stage.events("begin", name=name)) >= 3
    found = status(stage, name)
    assert (found.attempt, found.failures, found.crashes) == (2, 0, 0)
    assert stage.wait_for_log(f"key pay:{name}:", "is unknown, and verify_after has not passed yet")


@pytest.mark.parametrize(
    ("reply", "why"), [("object", "result_not_json"), ("large", "result_too_large")]
)
def test_a_reply_that_cannot_be_stored_is_an_error_and_the_request_is_never_repeated(
    stage: Stage, provider: Provider, name: str, reply: str, why: str
) -> None:
    given: dict[str, Any] = {"reply": reply, "reference": "none", "way": "dedupe"}
    error = raised(stage.tasks.stops.delay(name, **given), Uncertain)
    assert why in str(error)
    assert "HAS happened" in str(error)
    found = status(stage, name, "stops")
    assert (found.state, found.effects[0].state, found.effects[0].reference) == (
        "uncertain",
        "done",
        None,
    )
    task, key = f"{INVOICING}.stops", f"stops:{name}"
    stage.client.resolve(key, "retry", task=task)
    raised(stage.tasks.stops.delay(name, **given), Uncertain)
    assert len(stage.events("begin", name=name)) == 2
    charges = provider.charges(name)
    stage.client.resolve(key, "done", result={"charges": charges}, task=task)
    assert got(stage.tasks.stops.delay(name, **given)) == {"charges": charges}
    assert len(charges) == len(provider.lines("asked", name)) == 1


def test_a_forgotten_key_has_a_new_one(stage: Stage, provider: Provider, name: str) -> None:
    provider.script(name, dedupe=True)
    (first,) = got(stage.tasks.pay.delay(name, [["later", 0.1]]))["charges"]
    stage.client.forget(f"pay:{name}", task=f"{INVOICING}.pay")
    assert (status(stage, name).effects, status(stage, name).reference) == ((), None)
    (second,) = got(stage.tasks.pay.delay(name))["charges"]
    assert provider.charges(name) == [first, second]
    assert len(set(provider.keys(name))) == 2
    assert [effect.reference for effect in status(stage, name).effects] == [second]


@pytest.fixture
def eager(stage: Stage, provider: Provider) -> Iterator[LeaseClient]:
    """The stores in memory of the tasks that run here."""
    with environment({"PROVIDER": provider.url, "JOURNAL": str(stage.journal)}):
        yield LeaseClient.from_app(stage.app, eager=True)


def test_an_eager_call_uses_what_one_before_it_has_done(
    stage: Stage, provider: Provider, eager: LeaseClient, name: str
) -> None:
    apply, key = stage.tasks.stops.apply, f"t:{INVOICING}.stops|stops:{name}"
    raised(apply((name, [["fail", "no"]])), ValueError)
    raised(apply((name, [["fail", "no"]])), CoolingDown)
    eager.retry(key)
    done = apply((name, [["fail", "no"]])).get()
    assert done == apply((name, [["fail", "no"]])).get() == {"charges": provider.charges(name)}
    assert charge_events(stage, name) == [(done["charges"][0], False), (done["charges"][0], True)]
    assert eager.status(key).reference == done["charges"][0]


# -- looking ---------------------------------------------------------------------------------------
