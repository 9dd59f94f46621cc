"""What a project's own tests meet: eager tasks, ``delay_in`` and records, with and without
transactions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import skipIf

from celery import shared_task
from django.apps import apps as installed
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.models import F
from django.test import SimpleTestCase, TestCase, TransactionTestCase
from shop.celery import app

from celery_leases import LeaseClient, LeasedTask, testing
from celery_leases.django.models import LeaseRecord
from celery_leases.django.operations import MigrateTables
from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.sql.schema import NEWEST, Tables
from celery_leases.worker import processes
from orders.models import Order
from orders.tasks import charge, plain, refund

IN_MEMORY = connection.vendor == "sqlite"


packed: list[int] = []


@shared_task(base=LeasedTask, lease_key="pack:{number}")
def pack(number: int) -> None:
    """Commit a row, and say so."""
    with transaction.atomic():
        Order.objects.filter(number=number).update(charges=F("charges") + 1)
        transaction.on_commit(lambda: packed.append(number))


@contextmanager
def configured(**values: object) -> Iterator[None]:
    """Change settings of the Celery app in a ``with`` block."""
    before = {name: app.conf.get(name) for name in values}
    app.conf.update(values)
    try:
        yield
    finally:
        app.conf.update(before)


class Eager:
    """Runs tasks at once."""

    def run(self, result: object = None) -> object:
        """Run the test with eager tasks."""
        with configured(task_always_eager=True, task_eager_propagates=True):
            return super().run(result)


class EagerTests(Eager, TestCase):
    """A test in a transaction, whose records are in memory."""

    def test_a_charge_is_made_once(self) -> None:
        """The second call gets the first result."""
        Order.objects.create(number=1)
        self.assertEqual(charge.delay(1).get(), {"order": 1, "attempt": 1})
        self.assertEqual(charge.delay(1).get(), {"order": 1, "attempt": 1})
        self.assertEqual(Order.objects.get(number=1).charges, 1)
        self.assertEqual(charge.lease_status(1).state, "done")

    def test_a_failure_is_seen_by_the_status(self) -> None:
        """And by nothing in the database."""
        with self.assertRaises(ValueError):
            refund.delay(2)
        self.assertEqual(refund.lease_status(2).state, "failed")
        self.assertFalse(LeaseRecord.objects.exists())

    def test_delay_in_runs_with_the_commit(self) -> None:
        """Django's helper runs the callbacks of the commit, which a TestCase does not do."""
        Order.objects.create(number=3)
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            charge.delay_in(connection, 3)
            self.assertEqual(Order.objects.get(number=3).charges, 0)
        self.assertEqual(len(callbacks), 1)
        self.assertEqual(Order.objects.get(number=3).charges, 1)


class KitTests(TestCase):
    """The test kit of celery_leases, beside Django's transactions."""

    def setUp(self) -> None:
        """Calls are queued and run when the test wants it."""
        self.leases = self.enterContext(testing.leases(app, eager=False))
        Order.objects.create(number=8)

    def test_a_call_is_queued_by_the_commit_and_runs_once(self) -> None:
        """Neither the database of Django nor a broker sees it."""
        with self.captureOnCommitCallbacks(execute=True):
            charge.delay_in(connection, 8)
            self.assertEqual(self.leases.published, [])
        testing.assert_queued(charge, 8)
        self.assertEqual(testing.status(charge, 8).message(), "Queued")
        testing.run_queued()
        charge.delay(8)
        testing.run_queued()
        testing.assert_ran_once(charge, 8)
        testing.assert_replayed(charge, 8)
        self.assertEqual(Order.objects.get(number=8).charges, 1)
        self.assertFalse(LeaseRecord.objects.exists())

    def test_a_task_without_effects_does_not_survive_a_crash(self) -> None:
        """Its row is charged again by the attempt that takes over."""
        died = testing.crash(charge, 8, at="before:return")
        self.assertEqual(died.resume().get(), {"order": 8, "attempt": 2})
        self.assertEqual(Order.objects.get(number=8).charges, 2)


def queued() -> int:
    """How many messages are queued; they are removed."""
    with app.connection_for_read() as broker:
        broker.default_channel.queue_declare("celery")
        return int(broker.default_channel.queue_purge("celery"))


class PublishingTests(TestCase):
    """A test in a transaction, with messages that go to a broker."""

    def setUp(self) -> None:
        queued()

    def test_delay_in_is_published_by_the_commit(self) -> None:
        """On Django's connection, because no other connection sees the row before."""
        with self.captureOnCommitCallbacks(execute=True):
            charge.delay_in(connection, 5)
            self.assertEqual(queued(), 0)
        self.assertEqual(queued(), 1)
        if not IN_MEMORY:
            record = LeaseRecord.objects.get(key="charge:5")
            self.assertEqual((record.state, record.publish_at), ("pending", None))
            self.assertIsNotNone(record.published_at)

    def test_a_rollback_publishes_nothing(self) -> None:
        """Its record is gone too."""
        with (
            self.captureOnCommitCallbacks(execute=True),
            self.assertRaises(ZeroDivisionError),
            transaction.atomic(),
        ):
            charge.delay_in(connection, 6)
            _ = 1 / 0
        self.assertEqual(queued(), 0)
        self.assertFalse(LeaseRecord.objects.filter(key="charge:6").exists())

    def test_leased_tasks_keep_what_celery_gives_to_tasks_of_django(self) -> None:
        """As a task without a lease has it."""
        with self.captureOnCommitCallbacks(execute=True):
            charge.delay_on_commit(7)
            charge.apply_async_on_commit((8,))
            plain.delay_on_commit(9)
            self.assertEqual(queued(), 0)
        self.assertEqual(queued(), 3)


class CommittingTests(TransactionTestCase):
    """A test with real commits."""

    def test_delay_in_is_published_by_the_commit(self) -> None:
        """And noted as published."""
        queued()
        with transaction.atomic():
            charge.delay_in(connection, 10)
            self.assertEqual(queued(), 0)
        self.assertEqual(queued(), 1)
        self.assertEqual(charge.lease_status(10).state, "pending")

    @skipIf(IN_MEMORY, "a database in memory has one connection")
    def test_records_may_be_in_the_test_database(self) -> None:
        """And never in the configured one."""
        Order.objects.create(number=4)
        processes.close_all()  # those of eager calls in memory, as the setting changes
        self.addCleanup(processes.close_all)
        with configured(task_always_eager=True, leases_eager_stores=True):
            self.assertEqual(charge.delay(4).get(), {"order": 4, "attempt": 1})
            self.assertEqual(LeaseRecord.objects.get(key="charge:4").state, "done")
            self.assertEqual(
                LeaseClient.from_app(app).status("charge:4", task=charge.name).state, "done"
            )

    @skipIf(IN_MEMORY, "a database in memory has one connection")
    def test_with_open_connections_the_test_database_can_be_destroyed(self) -> None:
        """They are left open here; the runner closes them before it destroys the database."""
        processes.close_all()
        with configured(task_always_eager=True, leases_eager_stores=True):
            refund.apply((9,))
        self.assertEqual(LeaseRecord.objects.get(key="refund:9").state, "failed")

    @skipIf(IN_MEMORY, "the records are not in the database")
    def test_the_models_are_read_only(self) -> None:
        """For every write method."""
        with transaction.atomic():
            charge.delay_in(connection, 8)
        record = LeaseRecord.objects.get(key="charge:8")
        ways = (
            record.save,
            record.delete,
            LeaseRecord.objects.all().delete,
            lambda: LeaseRecord.objects.update(state="done"),
            lambda: LeaseRecord.objects.create(stored_key="x"),
            lambda: LeaseRecord.objects.bulk_create([record]),
            lambda: LeaseRecord.objects.bulk_update([record], ["state"]),
        )
        for way in ways:
            with self.assertRaisesRegex(LeaseConfigurationError, "read-only"):
                way()
        self.assertEqual(LeaseRecord.objects.get(key="charge:8").state, "pending")


class CommitPointTests(TransactionTestCase):
    """The test kit has Django's commits among the points where a process can die."""

    def test_a_process_dies_before_or_after_a_commit(self) -> None:
        """What it had committed stays, and it calls nothing afterwards."""
        Order.objects.create(number=11)
        with testing.leases(app):
            testing.crash(pack, 11, at="before:commit")
            self.assertEqual(Order.objects.get(number=11).charges, 0)
            testing.reset()
            died = testing.crash(pack, 11, at="after:commit")
            self.assertEqual(Order.objects.get(number=11).charges, 1)
            self.assertEqual(packed, [])
            died.resume()
        self.assertEqual(Order.objects.get(number=11).charges, 2)
        self.assertEqual(packed, [11])


class WithoutDatabaseTests(Eager, SimpleTestCase):
    """A test that may not use a database; run alone, there is no test database either."""

    def test_a_task_does_not_meet_the_configured_database(self) -> None:
        """Not even with settings that put the records of eager tasks there."""
        processes.close_all()
        self.addCleanup(processes.close_all)
        with configured(leases_eager_stores=True):
            with self.assertRaises(ValueError):
                refund.delay(21)
            self.assertEqual(refund.lease_status(21).state, "failed")


class ModelTests(SimpleTestCase):
    """The models are the tables that this release of celery_leases has."""

    def test_each_column_has_a_field(self) -> None:
        """Of the same name, nullable alike, and as long; the version has no model."""
        tables = Tables().metadata.tables
        models = {
            model._meta.db_table: model
            for model in installed.get_app_config("celery_leases").get_models()
        }
        self.assertEqual({*tables} - {*models}, {"celery_leases_version"})
        for name, model in models.items():
            columns = {
                (c.name, bool(c.nullable), getattr(c.type, "length", None))
                for c in tables[name].columns
            }
            fields = {
                (f.column, f.null, f.max_length) for f in model._meta.concrete_fields if f.column
            }
            self.assertEqual(fields, columns)
            key = model._meta.pk
            names = [field.name for field in getattr(key, "fields", [key])]
            self.assertEqual(names, [column.name for column in tables[name].primary_key.columns])

    def test_each_version_of_the_tables_has_a_migration(self) -> None:
        """Django's models follow the tables."""
        loader = MigrationLoader(None)
        operations = [
            operation
            for (label, _), migration in loader.disk_migrations.items()
            if label == "celery_leases"
            for operation in migration.operations
            if isinstance(operation, MigrateTables)
        ]
        self.assertEqual(len(operations), NEWEST)
