"""What is refused when a task or an app is set up, and what a task class may bring along."""

# ruff: noqa: D102, D103 - names state the behaviour

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task

from celery_leases import LeaseClient, LeaseConfigurationError, LeasedMixin, LeasedTask
from celery_leases.core.classifier.rules import Rules
from celery_leases.core.errors import AlreadyDone, CoolingDown, LeaseHeld
from celery_leases.core.results import NOT_JSON, encode
from celery_leases.core.rulings import permanent
from celery_leases.seam import apps
from celery_leases.seam.apps import settings_of
from celery_leases.wiring import is_local


def an_app(**conf: Any) -> Celery:
    app = Celery("registration", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    return app


def registered(app: Celery, base: Any = LeasedTask, **options: Any) -> Any:
    @app.task(base=base, name="billing.send", bind=True, shared=False, **options)
    def send(self: Any, customer_id: int) -> Any:
        return self.request.id, self.lease.held

    app.finalize()
    return app.tasks["billing.send"]


def refusal(base: Any = LeasedTask, **options: Any) -> str:
    with pytest.raises(LeaseConfigurationError) as caught:
        registered(an_app(), base, **options)
    return str(caught.value)


def test_what_is_said_about_failures_is_gathered_from_task_and_app() -> None:
    """The task's word counts, then the app's."""
    rules = Rules.default().on(status=404, to=permanent())
    app = an_app(leases_cooldown="10m", leases_cooldown_group="billing", leases_max_retries=2, leases_rules=rules)
    options = registered(app, lease_max_retries=0, lease_after_cooldown="stop", lease_idempotent=True).lease_options
    assert (options.cooldown.base, options.cooldown_group, options.rules) == (600.0, "billing", rules)
    assert (options.max_retries, options.after_cooldown, options.idempotent) == (0, "stop", True)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"lease_on_cooldown": "wait"}, "'fail' or 'put_back' or 'ignore'"),
        ({"lease_cooldown_group": "openai:{model}"}, "'model' is none of them"),
        ({"lease_cooldown": 0}, "lease_cooldown=0 is not usable"),
        ({"lease_rules": [permanent()]}, "Rules.default().on(...)"),
        ({"lease_max_failure": 3}, "did you mean lease_max_failures?"),
    ],
)
def test_what_would_be_done_wrong_about_failures_is_refused(options: dict[str, Any], hint: str) -> None:
    """At registration, by name."""
    assert hint in refusal(**options)


def test_what_an_option_asks_for_is_no_traceback_in_the_log() -> None:
    """A call that is told to come back later is no accident."""
    assert {AlreadyDone, CoolingDown, LeaseHeld} <= set(registered(an_app()).throws)


class Traced(Task):
    """A task class of somebody else's, as frameworks make them."""

    calls: list[bool] = []  # noqa: RUF012 - shared on purpose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.request.id is not None)
        return self.run(*args, **kwargs)


def test_a_call_of_another_class_before_the_lease_is_refused() -> None:
    """The body would run without its lease, and nobody would notice."""

    class Backwards(Traced, LeasedTask):
        """The wrong way round."""

    assert "put LeasedMixin first" in refusal(Backwards)


def test_the_call_of_the_class_behind_runs_around_the_body() -> None:
    """An application context or a trace is kept, inside the lease."""

    class Forwards(LeasedMixin, Traced):
        """The right way round."""

    task = registered(an_app(), Forwards, lease_key="c:{customer_id}")
    Traced.calls.clear()
    result = task.apply((1,))
    assert result.get() == [result.id, True]
    assert Traced.calls == [True]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"reject_on_worker_lost": False}, "lease_allow_loss"),
        ({"acks_late": False}, "lease_allow_loss"),
        ({"lease_options": {"ttl": 30}}, "lease_<option>"),
        ({"lease_status": "x"}, "lease_<option>"),
        ({"lease_signature": 1}, "lease_<option>"),
        ({"lease_tll": 30}, "did you mean lease_ttl?"),
    ],
)
def test_what_would_lose_work_or_mean_nothing_is_refused(options: dict[str, Any], hint: str) -> None:
    assert hint in refusal(**options)


def test_settings_may_carry_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Django, where every setting of Celery begins with CELERY_."""

    class DjangoSettings:
        CELERY_BROKER_URL = "redis://elsewhere/0"
        CELERY_LEASES_URL = "database"
        CELERY_LEASES_DATABASE_URL = "sqlite:///named.db"
        CELERY_LEASES_TTL = 44

    app = Celery("registration", set_as_current=False)
    app.config_from_object(DjangoSettings, namespace="CELERY")
    settings = settings_of(app)
    assert (settings.leases_url, settings.database_url) == ("database", "sqlite:///named.db")
    assert registered(app).lease_options.ttl == 44.0


@pytest.mark.parametrize(
    ("setting", "value"), [("leases_ulr", "x"), ("leases_eager_stores", "no"), ("leases_key", "k")]
)
def test_a_setting_that_is_unknown_or_unusable_is_named(setting: str, value: str) -> None:
    with pytest.raises(LeaseConfigurationError, match=setting):
        settings_of(an_app(**{setting: value}))


@pytest.mark.parametrize("broker", ["sqs://id:secret@", "kafka://", "amqp://elsewhere//", "redis://a/0;redis://b/0"])
def test_a_broker_elsewhere_asks_for_a_database(broker: str) -> None:
    """A SQLite file in the working directory would be another one on each machine."""
    assert not is_local(broker)


@pytest.mark.parametrize("broker", ["", "memory://", "amqp://", "redis://localhost", "redis+socket:///run/r.sock"])
def test_a_broker_on_this_machine_does_not(broker: str) -> None:
    assert is_local(broker)


def test_keys_that_look_like_stored_keys_are_found(tmp_path: Path) -> None:
    """A key may begin with anything once its task is named."""
    database = f"sqlite:///{tmp_path / 'records.db'}"
    task = registered(
        an_app(leases_url="database", leases_database_url=database, leases_eager_stores=True),
        lease_key="t:{customer_id}",
    )
    task.apply((5,))
    assert task.lease_status(5).state == "done"
    assert LeaseClient("database", database).status("t:5", task="billing.send").state == "done"


def test_a_result_that_only_looks_like_a_typed_value_is_not_kept() -> None:
    """It could be written, and never read again."""
    assert encode({"__type__": "nonsense", "__value__": 1}, 1000) == (None, NOT_JSON)


@pytest.mark.parametrize(
    ("soft", "hard", "worker", "tight"),
    [
        (3, 3, (None, None), True),
        (3, 3.5, (None, None), True),
        (3, 4, (None, None), False),
        (None, 10, (9.5, 60), True),
        (None, None, (30, 60), False),
        (3, None, (None, None), False),
    ],
)
def test_a_soft_limit_close_to_the_hard_one_is_noticed(
    soft: float | None, hard: float | None, worker: tuple[float | None, float | None], tight: bool
) -> None:
    """The task's own limits count, then the worker's."""
    task = SimpleNamespace(soft_time_limit=soft, time_limit=hard)
    assert apps._leaves_no_time(task, SimpleNamespace(soft_time_limit=worker[0], time_limit=worker[1])) is tight
