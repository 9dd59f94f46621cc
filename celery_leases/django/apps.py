"""The Django app: what is connected when Django starts."""

from __future__ import annotations

from typing import Any

from celery.signals import worker_init
from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate

from celery_leases.django import configuration
from celery_leases.worker.app_settings import complete_settings_by


class LeasesConfig(AppConfig):
    """Leases and records of Celery tasks, in a database of Django's."""

    name = "celery_leases.django"
    label = "celery_leases"
    verbose_name = "Celery leases"
    default_auto_field = "django.db.models.BigAutoField"

    def __init__(self, app_name: str, app_module: Any) -> None:
        super().__init__(app_name, app_module)
        # Before any task is registered, as its options have defaults in the settings.
        configuration.remember_names()
        complete_settings_by(configuration.complete)

    def ready(self) -> None:
        """Connect what follows Django's migrations and test databases, and register the checks."""
        from celery_leases.django import checks, testing_databases, tests_without_migrations

        checks.register_all()
        worker_init.connect(checks.log_in_worker, dispatch_uid="celery_leases.checks")
        pre_migrate.connect(
            tests_without_migrations.make_tables,
            sender=self,
            dispatch_uid="celery_leases.unmigrated",
        )
        post_migrate.connect(
            testing_databases.follow, sender=self, dispatch_uid="celery_leases.test_databases"
        )
