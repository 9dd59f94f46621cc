"""Effects with real workers: the ledger after failures, refusals, timeouts and repairs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from celery_leases import CoolingDown, LeaseClient, LeaseStatus, PermanentFailure, Uncertain
from celery_leases.errors import EffectMisused
from celery_leases.testing.waits import wait_until
from tests.integration.conftest import DeploymentFactory
from tests.integration.deployments import BOTH_WAYS, PATIENCE, Deployment, environment, spelled
from tests.integration.payments import Provider, provider
from tests.integration.rate_limited_server import Answered

__all__ = ["provider"]

INVOICING = "tests.apps.invoicing"
LIMITED = {"status": 429, "headers": {"retry-after": "1"}}
SILENT = {"never": True}


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=spelled)
def module_stage(
    request: pytest.FixtureRequest, stage_factory: DeploymentFactory, provider: Provider
) -> Iterator[Deployment]:
    """A worker that charges; at its end nothing may be left in the queue."""
    made = stage_factory(request.param, home=INVOICING, env={"PROVIDER": provider.url})
    yield made
    made.close_when_drained(request.session)


def charge_events(stage: Deployment, name: str) -> list[tuple[str, bool]]:
    """Reference and ``saved`` of each effect that a body was given."""
    return [(event["reference"], event["saved"]) for event in stage.events("charge", name=name)]


def status(stage: Deployment, name: str, task: str = "pay") -> LeaseStatus:
    """Where the key of a name stands."""
    return stage.client.status(f"{task}:{name}", task=f"{INVOICING}.{task}")


def raised(result: Any, kind: type[BaseException]) -> BaseException:
    """The error its caller gets."""
    with pytest.raises(kind) as caught:
        result.get(timeout=PATIENCE)
    return caught.value


# -- once ------------------------------------------------------------------------------------------


def test_over_failures_and_copies_the_call_is_made_once(
    stage: Deployment, provider: Provider, name: str
) -> None:
    side = stage.side_queue()
    after = [["fail", "no"], ["retry", 0.1], ["later", 0.1], ["snooze", 0.1]]
    result = stage.tasks.pay.apply_async((name, after), queue=side)
    stage.forward(side, copies=3)
    (charge,) = result.get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [charge]
    assert charge_events(stage, name) == [(charge, False), *[(charge, True)] * 4]
    assert len(provider.lines("asked", name)) == 1
    found = status(stage, name)
    assert (found.state, found.reference) == ("done", charge)
    # Five runs; the snooze gave its attempt back.
    assert (len(stage.events("begin", name=name)), found.attempt) == (5, 4)


def test_an_effects_reply_is_the_same_on_every_attempt(
    stage: Deployment, provider: Provider, name: str
) -> None:
    stage.tasks.pay.delay(name, [["later", 0.1]]).get(timeout=PATIENCE)
    first, second = stage.events("charge", name=name)
    assert (
        first["value"]
        == second["value"]
        == {"id": first["reference"], "customer": name, "key": provider.keys(name)[0]}
    )


def test_several_effects_are_made_once_each(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, {}, LIMITED)
    result = stage.tasks.pay.delay(name, names=["charge", "mail"]).get(timeout=PATIENCE)
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
    stage: Deployment, provider: Provider, name: str
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
    (charge,) = result.get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [charge]
    assert charge_events(stage, name) == [(charge, False), (charge, True)]


def _write_effect_state(stage: Deployment, stored_key: str, state: str) -> None:
    with stage._engine.connect() as connection:
        statement = text("UPDATE celery_leases_effects SET state = :state WHERE stored_key = :key")
        connection.execute(statement, {"state": state, "key": stored_key})


# -- refused: it has not happened ------------------------------------------------------------------


def test_a_limited_call_is_made_again_after_the_cooldown(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, LIMITED)
    result = stage.tasks.pay.delay(name)
    stage.wait_for_state("pay", f"pay:{name}", "cooling")
    assert status(stage, name).effects == ()
    assert provider.charges(name) == []
    (charge,) = result.get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [charge]
    assert charge_events(stage, name) == [(charge, False)]
    assert len(set(provider.keys(name))) == 1
    assert len(provider.keys(name)) == 2


def test_a_declined_charge_fails_and_is_repeated_after_an_operators_retry(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, {"status": 402})
    error = raised(stage.tasks.stops.delay(name), Answered)
    assert isinstance(error, Answered)
    assert error.status == 402
    assert (status(stage, name, "stops").state, status(stage, name, "stops").effects) == (
        "failed",
        (),
    )
    stage.client.retry(f"stops:{name}", task=f"{INVOICING}.stops")
    (charge,) = stage.tasks.stops.delay(name).get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [charge]
    assert len(set(provider.keys(name))) == 1


def test_a_refused_connection_is_retried(stage: Deployment, provider: Provider, name: str) -> None:
    (charge,) = stage.tasks.pay.delay(name, away=[0, 1]).get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [charge]
    assert len(stage.events("begin", name=name)) == 3


# -- in doubt --------------------------------------------------------------------------------------


def test_after_a_timeout_it_is_looked_up(stage: Deployment, provider: Provider, name: str) -> None:
    provider.script(name, SILENT)
    (charge,) = stage.tasks.pay.delay(name, way="verify", timeout=0.3).get(timeout=PATIENCE)[
        "charges"
    ]
    assert provider.charges(name) == [charge]
    assert (len(provider.keys(name)), provider.looks(name)) == (1, [charge])
    assert charge_events(stage, name) == [(charge, True)]
    assert status(stage, name).reference == charge


def test_what_is_not_found_is_called_anew(stage: Deployment, provider: Provider, name: str) -> None:
    provider.script(name, {"status": 500})
    (charge,) = stage.tasks.pay.delay(name, way="verify").get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [charge]
    assert (len(provider.keys(name)), provider.looks(name)) == (2, [None])
    assert charge_events(stage, name) == [(charge, False)]


def test_a_provider_that_dedupes_is_asked_again(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, SILENT, {"status": 500, "charged": True}, dedupe=True)
    (charge,) = stage.tasks.pay.delay(name, way="dedupe", timeout=0.3).get(timeout=PATIENCE)[
        "charges"
    ]
    assert provider.charges(name) == [charge]
    assert len(provider.keys(name)) == 3
    assert len(set(provider.keys(name))) == 1


@pytest.mark.parametrize("way", ["stop", "unsure"])
def test_an_uncertain_effect_waits_for_a_person(
    stage: Deployment, provider: Provider, name: str, way: str
) -> None:
    provider.script(name, SILENT)
    error = raised(stage.tasks.pay.delay(name, way=way, timeout=0.3), Uncertain)
    (key,) = provider.keys(name)
    assert key in str(error)
    assert "leases resolve" in str(error)
    found = status(stage, name)
    assert (found.state, found.reason, found.reference) == ("uncertain", "uncertain", None)
    assert (found.effects[0].name, found.effects[0].state, found.effects[0].idempotency_key) == (
        "charge",
        "sent",
        key,
    )
    assert found.message() == "It may have been executed; an operator must look"
    raised(stage.tasks.pay.delay(name, way=way, timeout=0.3), PermanentFailure)
    assert len(provider.charges(name)) == 1
    assert len(stage.events("begin", name=name)) == 2


def test_an_operator_resolves_what_happened(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, SILENT)
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    (charge,) = provider.charges(name)
    done = stage.client.resolve(
        f"pay:{name}", "done", result={"charges": [charge]}, task=f"{INVOICING}.pay"
    )
    assert (done.state, done.result) == ("done", {"charges": [charge]})
    assert stage.tasks.pay.delay(name, timeout=0.3).get(timeout=PATIENCE) == {"charges": [charge]}
    assert provider.charges(name) == [charge]
    assert len(stage.events("begin", name=name)) == 2


def test_an_operator_lets_it_run_again(stage: Deployment, provider: Provider, name: str) -> None:
    provider.script(name, {"status": 500})
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    again = stage.client.resolve(f"pay:{name}", "retry", task=f"{INVOICING}.pay")
    assert (again.state, again.effects) == ("pending", ())
    (charge,) = stage.tasks.pay.delay(name, timeout=0.3).get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [charge]
    assert len(set(provider.keys(name))) == 1


def test_a_retry_does_not_make_it_certain(stage: Deployment, provider: Provider, name: str) -> None:
    provider.script(name, SILENT)
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    stage.client.retry(f"pay:{name}", task=f"{INVOICING}.pay")
    raised(stage.tasks.pay.delay(name, timeout=0.3), Uncertain)
    assert len(provider.charges(name)) == 1


def test_it_is_not_looked_up_before_the_request_is_over(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, SILENT)
    (charge,) = stage.tasks.pay.delay(name, way="later", timeout=0.3).get(timeout=PATIENCE)[
        "charges"
    ]
    assert provider.charges(name) == [charge]
    (asked,) = provider.lines("asked", name)
    (looked,) = provider.lines("looked", key=asked["key"])
    assert 2.9 < looked["t"] - asked["t"] < 6.0
    assert len(stage.events("begin", name=name)) >= 3
    found = status(stage, name)
    assert (found.attempt, found.failures, found.crashes) == (2, 0, 0)
    assert stage.wait_for_log(f"key pay:{name}:", "is unknown, and verify_after has not passed yet")


# -- replies that cannot be stored -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "why"), [("object", "result_not_json"), ("large", "result_too_large")]
)
def test_a_reply_that_cannot_be_stored_is_an_error_and_the_request_is_never_repeated(
    stage: Deployment, provider: Provider, name: str, reply: str, why: str
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
    assert stage.tasks.stops.delay(name, **given).get(timeout=PATIENCE) == {"charges": charges}
    assert len(charges) == len(provider.lines("asked", name)) == 1


def test_an_unstored_reply_can_be_looked_up(
    stage: Deployment, provider: Provider, name: str
) -> None:
    given: dict[str, Any] = {"reply": "object", "reference": "none", "way": "verify"}
    raised(stage.tasks.stops.delay(name, **given), Uncertain)
    assert provider.looks(name) == []
    stage.client.resolve(f"stops:{name}", "retry", task=f"{INVOICING}.stops")
    assert stage.tasks.stops.delay(name, **given).get(timeout=PATIENCE) == {"charges": [None]}
    (event,) = stage.events("charge", name=name)
    assert (event["saved"], [event["value"]["id"]]) == (True, provider.charges(name))
    assert len(provider.lines("asked", name)) == 1


@pytest.mark.parametrize("reply", ["object", "large"])
def test_a_reference_is_enough(
    stage: Deployment, provider: Provider, name: str, reply: str
) -> None:
    given: dict[str, Any] = {"reply": reply, "reference": "fixed"}
    result = stage.tasks.pay.delay(name, [["later", 0.1]], **given).get(timeout=PATIENCE)
    assert result == {"charges": ["fixed"]}
    assert [event["value"] for event in stage.events("charge", name=name)] == [None, None]
    assert len(provider.charges(name)) == 1


def test_a_reference_that_raises_undoes_nothing(
    stage: Deployment, provider: Provider, name: str
) -> None:
    for _ in range(2):
        raised(stage.tasks.stops.delay(name, reference="raises"), KeyError)
        wait_until(
            lambda: not status(stage, name, "stops").retry_after,
            PATIENCE,
            "the end of the cooldown",
        )
    (effect,) = status(stage, name, "stops").effects
    assert (effect.state, effect.reference) == ("done", None)
    assert charge_events(stage, name) == []
    (charge,) = provider.charges(name)
    assert stage.tasks.stops.delay(name).get(timeout=PATIENCE) == {"charges": [charge]}
    assert provider.charges(name) == [charge]


# -- names -----------------------------------------------------------------------------------------


def test_a_name_twice_is_refused(stage: Deployment, provider: Provider, name: str) -> None:
    error = raised(stage.tasks.stops.delay(name, names=["charge", "charge"]), EffectMisused)
    assert "twice in one attempt" in str(error)
    assert len(provider.charges(name)) == 1


@pytest.mark.parametrize("effect", ["", "x" * 256, 7])
def test_an_invalid_name_is_refused(
    stage: Deployment, provider: Provider, name: str, effect: Any
) -> None:
    error = raised(stage.tasks.stops.delay(name, names=[effect]), EffectMisused)
    assert "1 to 255 characters" in str(error)
    assert provider.keys(name) == []


# -- generations -----------------------------------------------------------------------------------


def test_a_forgotten_key_is_new_work_under_a_new_key(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, dedupe=True)
    (first,) = stage.tasks.pay.delay(name, [["later", 0.1]]).get(timeout=PATIENCE)["charges"]
    stage.client.forget(f"pay:{name}", task=f"{INVOICING}.pay")
    assert (status(stage, name).effects, status(stage, name).reference) == ((), None)
    (second,) = stage.tasks.pay.delay(name).get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == [first, second]
    assert len(set(provider.keys(name))) == 2
    assert [effect.reference for effect in status(stage, name).effects] == [second]


def test_each_call_of_a_rerun_task_has_its_own_effects(
    stage: Deployment, provider: Provider, name: str
) -> None:
    provider.script(name, dedupe=True)
    charges = []
    for number in range(3):
        after = [["ok"]] * (2 * number) + [["later", 0.1]]
        charges += stage.tasks.pays.delay(name, after).get(timeout=PATIENCE)["charges"]
    assert provider.charges(name) == charges
    assert len(set(provider.keys(name))) == len(charges) == 3
    assert charge_events(stage, name) == [
        (charge, saved) for charge in charges for saved in (False, True)
    ]


# -- without a worker ------------------------------------------------------------------------------


def test_called_directly_it_is_the_call(stage: Deployment, provider: Provider, name: str) -> None:
    with environment({"PROVIDER": provider.url, "JOURNAL": str(stage.journal)}):
        charges = [stage.tasks.pay(name)["charges"][0] for _ in range(2)]
    assert provider.charges(name) == charges
    assert len(set(provider.keys(name))) == 2


@pytest.fixture
def eager(stage: Deployment, provider: Provider) -> Iterator[LeaseClient]:
    """The stores in memory of the tasks that run here."""
    with environment({"PROVIDER": provider.url, "JOURNAL": str(stage.journal)}):
        yield LeaseClient.from_app(stage.app, eager=True)


def test_an_eager_call_uses_what_one_before_it_has_done(
    stage: Deployment, provider: Provider, eager: LeaseClient, name: str
) -> None:
    apply, key = stage.tasks.stops.apply, f"t:{INVOICING}.stops|stops:{name}"
    raised(apply((name, [["fail", "no"]])), ValueError)
    raised(apply((name, [["fail", "no"]])), CoolingDown)
    eager.retry(key)
    done = apply((name, [["fail", "no"]])).get()
    assert done == apply((name, [["fail", "no"]])).get() == {"charges": provider.charges(name)}
    assert charge_events(stage, name) == [(done["charges"][0], False), (done["charges"][0], True)]
    assert eager.status(key).reference == done["charges"][0]


def test_an_eager_call_with_an_unknown_outcome_becomes_uncertain(
    stage: Deployment, provider: Provider, eager: LeaseClient, name: str
) -> None:
    apply, key = stage.tasks.stops.apply, f"t:{INVOICING}.stops|stops:{name}"
    provider.script(name, SILENT)
    raised(apply((name,), {"timeout": 0.3}), TimeoutError)
    eager.retry(key)
    raised(apply((name,), {"timeout": 0.3}), Uncertain)
    raised(apply((name,), {"timeout": 0.3}), PermanentFailure)
    assert eager.status(key).state == "uncertain"
    assert len(provider.charges(name)) == 1


def test_an_eager_call_before_the_look_up_gets_the_time(
    stage: Deployment, provider: Provider, eager: LeaseClient, name: str
) -> None:
    apply, key = stage.tasks.stops.apply, f"t:{INVOICING}.stops|stops:{name}"
    provider.script(name, SILENT)
    given = {"timeout": 0.3, "way": "later"}
    raised(apply((name,), given), TimeoutError)
    eager.retry(key)
    told = raised(apply((name,), given), CoolingDown)
    assert isinstance(told, CoolingDown)
    assert 0.0 < told.retry_after <= 3.0
    assert len(provider.keys(name)) == 1


# -- looking ---------------------------------------------------------------------------------------


def test_a_status_is_plain_json(stage: Deployment, provider: Provider, name: str) -> None:
    stage.tasks.pay.delay(name).get(timeout=PATIENCE)
    shown = json.loads(json.dumps(status(stage, name).as_json()))
    (effect,) = shown["effects"]
    assert (effect["name"], effect["state"], effect["reference"]) == (
        "charge",
        "done",
        shown["reference"],
    )
    assert effect["idempotency_key"] == provider.keys(name)[0]
    assert shown["started_at"] <= effect["sent_at"] <= effect["done_at"] <= shown["finished_at"]
