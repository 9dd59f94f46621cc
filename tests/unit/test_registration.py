"""What is refused when a task or an app is set up, and what a task class may bring along."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Barrier, Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest
from celery import Celery, Task
from celery.worker.request import Request

from celery_leases import Failures, Group, LeaseClient, LeasedMixin, LeasedTask, current_lease
from celery_leases.errors import AlreadyDone, CoolingDown, LeaseConfigurationError, LeaseHeld
from celery_leases.failures.actions import permanent
from celery_leases.failures.classifier import Rules
from celery_leases.keys import call_key
from celery_leases.results import NOT_JSON, encode
from celery_leases.settings import is_local
from celery_leases.worker import processes
from celery_leases.worker.app_settings import settings_of
from celery_leases.worker.checks.settings import TimeLimits, soft_limit_is_tight
from celery_leases.worker.request import LeaseRequest, request_class


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


def test_a_body_and_its_threads_have_one_lease() -> None:
    """Its progress is that of one object, which is made at the first use."""
    app, found = an_app(), list[Any]()

    @app.task(base=LeasedTask, name="threads", bind=True, shared=False)
    def threads(self: Any) -> None:
        together = Barrier(8)

        def ask() -> None:
            together.wait(10)
            found.append(current_lease.each.__self__)

        started = [Thread(target=copy_context().run, args=(ask,)) for _ in range(8)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(10)
        found.append(self.lease)

    threads.apply().get()
    assert len(found) == 9
    assert len(set(map(id, found))) == 1


def test_options_for_failures_are_gathered_from_task_and_app() -> None:
    of_app = Failures(Rules.default().on(status=404, to=permanent()), cooldown="10m")
    defaults: dict[str, Any] = {"leases_failures": of_app, "leases_group": "billing"}
    options = registered(an_app(**defaults)).lease_options
    assert (options.failures, options.group) == (of_app, Group("billing"))
    own = replace(of_app, resume="never")
    assert registered(an_app(**defaults), lease_failures=own).lease_options.failures is own


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"lease_on_done": "skip"}, "'replay' or 'raise' or 'ignore'"),
        ({"lease_tenant": str}, "write app.conf.leases_tenant="),
        ({"lease_on_busy": "reschedule"}, "'wait' or 'raise' or 'ignore'"),
        ({"lease_group": "openai:{model}"}, ", not 'model'"),
        ({"lease_failures": Rules()}, "write Failures("),
        ({"lease_failure": 3}, "did you mean lease_failures?"),
        ({"lease_crashes": 3}, "did you mean lease_failures=Failures(crashes=…)?"),
    ],
)
def test_what_would_be_done_wrong_about_failures_is_refused(options, hint) -> None:
    assert hint in refusal(**options)


def test_what_an_option_asks_for_is_no_traceback_in_the_log() -> None:
    assert {AlreadyDone, CoolingDown, LeaseHeld} <= set(registered(an_app()).throws)


class Traced(Task):
    """A third-party task class, as frameworks have."""

    calls: list[bool] = []  # noqa: RUF012 - shared on purpose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.request.id is not None)
        return self.run(*args, **kwargs)


def test_a_call_of_another_class_before_the_lease_is_refused() -> None:
    """The body would run without its lease, so the class itself is refused."""
    with pytest.raises(LeaseConfigurationError, match="put LeasedMixin first"):
        type("Backwards", (Traced, LeasedTask), {})
    with pytest.raises(LeaseConfigurationError, match="put LeasedMixin first"):
        type("Own", (LeasedTask,), {"__call__": Traced.__call__})


@pytest.mark.parametrize("other", [Traced, Task])
def test_the_mixin_behind_a_task_class_is_refused(other: type) -> None:
    """All of Celery's Task would hide the lease: such a task ran twice, and its options were never
    read.
    """
    with pytest.raises(
        LeaseConfigurationError, match=r"comes before LeasedMixin.*LeasedMixin, OtherTask"
    ):
        type("Backwards", (other, LeasedMixin), {})


def test_a_plain_mixin_before_the_lease_is_allowed() -> None:
    class Logged:
        """Has a hook of Celery's."""

        def on_success(self, *args: Any, **kwargs: Any) -> None:
            """As in Celery."""

    class Both(Logged, LeasedTask):
        """Log and lease."""

    assert registered(an_app(), Both).lease_options.ttl == 15.0


def test_a_class_whose_messages_pass_the_lease_is_refused() -> None:
    class Batches(Task):
        """The shape of celery_batches.Batches."""

        abstract = True

        def Strategy(self, task: Any, app: Celery, consumer: Any) -> Any:  # noqa: N802 - Celery's name
            """Collect messages."""

    for base in (type("Mine", (LeasedMixin, Batches), {}), LeasedTask):
        options = {} if base is not LeasedTask else {"Strategy": "billing.strategies:collect"}
        assert "Strategy bypasses the lease" in refusal(base, **options)


class AuditedRequest(Request):
    """A third-party request class."""

    seen: list[str] = []  # noqa: RUF012 - shared on purpose

    def on_failure(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(self.id)
        return super().on_failure(*args, **kwargs)


class Audited(Task):
    """A task class that brings it along."""

    abstract = True
    Request = AuditedRequest


@pytest.mark.parametrize(
    ("base", "options"),
    [
        (type("Behind", (LeasedMixin, Audited), {}), {}),
        (type("Own", (LeasedTask,), {"Request": AuditedRequest}), {}),
        (LeasedTask, {"Request": f"{__name__}:AuditedRequest"}),
    ],
    ids=["behind", "before", "by name"],
)
def test_a_request_class_of_another_is_combined_with_that_of_the_lease(base, options) -> None:
    made = request_class(registered(an_app(), base, **options))
    assert made.__mro__[1:3] == (LeaseRequest, AuditedRequest)
    assert request_class(registered(an_app())) is LeaseRequest


def test_a_request_class_that_is_made_of_ours_is_taken_as_it_is() -> None:
    own = type("Own", (LeaseRequest,), {})
    assert request_class(registered(an_app(), Request=own)) is own


@pytest.mark.parametrize("other", ["billing.requests:Missing", object])
def test_what_is_no_request_class_is_refused(other: Any) -> None:
    task = registered(an_app(), Request=other)
    with pytest.raises(LeaseConfigurationError, match="write a subclass of"):
        request_class(task)


def test_options_of_the_task_are_refused_where_a_call_is_made() -> None:
    """They would do nothing there."""
    app = an_app(task_always_eager=True)
    task = registered(app, lease_key="c:{customer_id}")
    calls: list[Callable[[], Any]] = [
        lambda: task.apply_async((1,), lease_ttl=30),
        lambda: task.apply((1,), lease_ttl=30),
        lambda: task.s(1).set(lease_ttl=30).apply_async(),
        lambda: app.signature("billing.send", (1,)).apply_async(lease_ttl=30),
    ]
    for app.conf.task_always_eager, call in product((True, False), calls):
        with pytest.raises(
            LeaseConfigurationError, match=r"lease_ttl=30 .*@app.task\(lease_ttl=30\)"
        ):
            call()
    assert task.delay(1).id


def test_the_call_of_the_class_behind_runs_around_the_body() -> None:
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
        ({"reject_on_worker_lost": False}, "drops the message of a killed process; leave it out"),
        ({"acks_late": False}, "a kill loses it; leave it out"),
        ({"lease_options": {"ttl": 30}}, "lease_<option>"),
        ({"lease_status": "x"}, "lease_<option>"),
        ({"lease_signature": 1}, "lease_<option>"),
        ({"lease_tll": 30}, "did you mean lease_ttl?"),
        ({"leases_key": "k"}, "unknown option leases_key; did you mean lease_key?"),
        ({"leasekey": "k"}, "unknown option leasekey; did you mean lease_key?"),
        ({"leased": True}, "unknown option leased; known are lease_key, "),
        ({"lease_key": "send:customer_id"}, 'write "send:{customer_id}", because without braces'),
    ],
)
def test_what_would_lose_work_or_mean_nothing_is_refused(options, hint) -> None:
    assert hint in refusal(**options)


class User(pydantic.BaseModel):
    """An argument of a pydantic task."""

    id: int
    items: list[str] = []


def test_a_template_may_name_the_fields_of_a_model_that_arrives_as_a_mapping() -> None:
    app = an_app()

    @app.task(
        base=LeasedTask,
        name="billing.greet",
        lease_key="u:{user.id}:{user.items}",
        pydantic=True,
        shared=False,
    )
    def greet(user: User) -> str:
        return "greeted"  # Celery 5.5.0 makes no model of an annotation that is text

    app.finalize()
    task: Any = app.tasks["billing.greet"]
    sent = User(id=7, items=["a"]).model_dump()
    assert task.apply((sent,)).get() == task.apply((), {"user": sent}).get() == "greeted"
    assert (
        call_key(task.name, task.lease_options, task.lease_signature, "", (sent,), {}).key
        == 'u:7:["a"]'
    )
    assert "KeyUnusable" in repr(task.apply(({"id": 7},)).result)


def test_settings_may_carry_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_settings_in_capitals_are_read_where_the_app_has_no_namespace() -> None:
    class Settings:
        LEASES_URL = "database"
        CELERY_LEASES_DATABASE_URL = LEASES_DATABASE_URL = "sqlite:///named.db"
        LEASES_SIGNED_BY = "a landlord"

    class Plain:
        LEASES_URL = "database"
        LEASES_DATABASE_URL = "sqlite:///named.db"

    plain = Celery("registration", set_as_current=False)
    plain.config_from_object(Plain)
    assert settings_of(plain).database_url == "sqlite:///named.db"

    named = Celery("registration", set_as_current=False)
    named.config_from_object(Settings, namespace="CELERY")
    with pytest.raises(LeaseConfigurationError, match=r"LEASES_URL: .* write CELERY_LEASES_URL"):
        settings_of(named)
    del Settings.LEASES_URL
    assert settings_of(named).database_url == "sqlite:///named.db"


def test_late_acknowledgement_is_on_with_any_setting_of_the_app() -> None:
    task = registered(an_app(task_acks_late=False, task_reject_on_worker_lost=False))
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)


def test_the_status_of_an_eager_call_is_asked_from_the_real_stores(tmp_path: Path) -> None:
    app = an_app(leases_url="database", leases_database_url=f"sqlite:///{tmp_path / 'records.db'}")

    @app.task(base=LeasedTask, lease_key="order:{number}", shared=False)
    def ship(number: int) -> int:
        return number

    assert ship.apply((7,)).get() == 7
    assert ship.lease_status(7).state == "absent"
    app.conf.leases_eager_stores = True
    processes.close_all()
    assert ship.apply((8,)).get() == 8
    assert ship.lease_status(8).state == "done"


def test_an_eager_call_needs_no_database_with_any_broker() -> None:
    app = Celery("registration", broker="amqp://broker.example/", set_as_current=False)

    @app.task(base=LeasedTask, lease_key="order:{number}", shared=False)
    def ship(number: int) -> int:
        return number

    assert ship.apply((7,)).get() == 7
    app.conf.leases_eager_stores = True
    processes.close_all()
    with pytest.raises(LeaseConfigurationError, match="leases_database_url"):
        ship.apply((8,)).get()


@pytest.mark.parametrize(
    ("setting", "value"), [("leases_ulr", "x"), ("leases_eager_stores", "no"), ("leases_key", "k")]
)
def test_a_setting_that_is_unknown_or_unusable_is_named(setting: str, value: str) -> None:
    with pytest.raises(LeaseConfigurationError, match=setting):
        settings_of(an_app(**{setting: value}))


@pytest.mark.parametrize(
    "broker", ["sqs://id:secret@", "kafka://", "amqp://elsewhere//", "redis://a/0;redis://b/0"]
)
def test_a_broker_elsewhere_asks_for_a_database(broker: str) -> None:
    """A SQLite file in the working directory would be another one on each machine."""
    assert not is_local(broker)


@pytest.mark.parametrize(
    "broker", ["", "memory://", "amqp://", "redis://localhost", "redis+socket:///run/r.sock"]
)
def test_a_broker_on_this_machine_does_not(broker: str) -> None:
    assert is_local(broker)


def test_keys_that_look_like_stored_keys_are_found(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.db'}"
    task = registered(
        an_app(leases_url="database", leases_database_url=database, leases_eager_stores=True),
        lease_key="t:{customer_id}",
    )
    task.apply((5,))
    assert task.lease_status(5).state == "done"
    assert LeaseClient("database", database).status("t:5", task="billing.send").state == "done"


def test_a_result_that_only_looks_like_a_typed_value_is_not_stored() -> None:
    """It could be written, and never read again."""
    assert encode({"__type__": "nonsense", "__value__": 1}, 1000) == (None, NOT_JSON)


@pytest.mark.parametrize(
    ("soft", "hard", "worker", "tight"),
    [
        (3, 3, (None, None), True), (3, 3.5, (None, None), True), (3, 4, (None, None), False),
        (None, 10, (9.5, 60), True), (None, None, (30, 60), False), (3, None, (None, None), False),
    ],
)  # fmt: skip
def test_a_soft_limit_close_to_the_hard_one_is_noticed(soft, hard, worker, tight) -> None:
    task = SimpleNamespace(soft_time_limit=soft, time_limit=hard)
    assert soft_limit_is_tight(task, TimeLimits(worker[0], worker[1])) is tight


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("leases_databse_url", "did you mean leases_database_url?"),
        ("leases_retry", "did you mean leases_failures=Failures(retries=…)?"),
        ("leases_zzz", "known are leases_url, "),
        ("lease_url", "did you mean leases_url?"),
        ("leaseurl", "did you mean leases_url?"),
        ("lease_ttl", "did you mean leases_ttl?"),
    ],
)
def test_an_unknown_setting_names_the_one_that_was_meant(setting: str, hint: str) -> None:
    with pytest.raises(LeaseConfigurationError) as caught:
        settings_of(an_app(**{setting: 1}))
    assert str(caught.value).startswith(f"unknown setting {setting}; {hint}")


def test_a_module_with_settings_may_import_names_that_begin_with_lease() -> None:
    module = ModuleType("celeryconfig")
    vars(module).update(LeasedTask=LeasedTask, leased_tasks=len, leases=pytest, LEASE_OFFICE="x")
    app = an_app()
    app.config_from_object(module)
    assert settings_of(app).prefix == "celery_leases"


def test_a_task_that_another_thread_meets_before_it_is_bound_has_its_options() -> None:
    app, met = an_app(), []

    class Registry(type(app._tasks)):  # type: ignore[misc]
        def __setitem__(self, name: str, task: Any) -> None:
            super().__setitem__(name, task)
            met.append((task.lease_options, task.lease_signature))

    app.finalize()
    app._tasks = Registry()
    task = registered(app, lease_key="send:{customer_id}")
    assert met == [(task.lease_options, task.lease_signature)]
    assert task.lease_options.key == "send:{customer_id}"
    with pytest.raises(AttributeError, match="no attribute 'lease_nothing'"):
        _ = task.lease_nothing
