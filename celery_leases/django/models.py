"""Read-only Django models of the tables; records are changed with ``LeaseClient``.

Django's write methods would bypass the fence that orders the attempts, so all of them raise. Times
in the tables are microseconds since the epoch.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from django.db import models

from celery_leases.django.configuration import alias_of_records
from celery_leases.errors import LeaseConfigurationError
from celery_leases.status import ABANDONED


def _refuse(what: str) -> NoReturn:
    raise LeaseConfigurationError(
        f"{what}: the tables of celery_leases are read-only for Django; change records with LeaseClient, the admin or "
        "`manage.py leases`"
    )


class ReadOnlyQuerySet(models.QuerySet):
    """A query set whose write methods raise."""

    def create(self, **_: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse("create()")

    def bulk_create(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse("bulk_create()")

    def bulk_update(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse("bulk_update()")

    def get_or_create(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse("get_or_create()")

    def update_or_create(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse("update_or_create()")

    def update(self, **_: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse("update()")

    def delete(self) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse("delete()")


class _RecordsManager(models.Manager.from_queryset(ReadOnlyQuerySet)):  # type: ignore[misc]
    """Reads from the records database."""

    def get_queryset(self) -> Any:
        queryset = super().get_queryset()
        return queryset if self._db is not None else queryset.using(alias_of_records())


class _ReadOnly(models.Model):
    """A row that is read-only."""

    objects = _RecordsManager()

    class Meta:
        """No table of its own."""

        abstract = True

    def save(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse(f"{type(self).__name__}.save()")

    def delete(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, because rows are read-only."""
        _refuse(f"{type(self).__name__}.delete()")


class LeaseRecord(_ReadOnly):
    """The record of one key: is the work still needed, and what came out of it."""

    stored_key = models.CharField(max_length=255, primary_key=True)
    task = models.CharField(max_length=255)
    key = models.TextField()
    call_id = models.CharField(max_length=255)
    owner = models.CharField(max_length=64)
    holder = models.CharField(max_length=255)
    fence = models.BigIntegerField()
    created_at = models.BigIntegerField()
    started_at = models.BigIntegerField()
    attempt = models.IntegerField()
    crashes = models.IntegerField()
    resumes = models.SmallIntegerField()
    lease_store = models.CharField(max_length=255)
    lease_until = models.BigIntegerField(null=True)
    state = models.CharField(max_length=16)
    ended = models.CharField(max_length=16, null=True)
    reason = models.CharField(max_length=255, null=True)
    result = models.TextField(null=True)
    error = models.TextField(null=True)
    retry_at = models.BigIntegerField(null=True)
    finished_at = models.BigIntegerField(null=True)
    expires_at = models.BigIntegerField(null=True)
    publish_at = models.BigIntegerField(null=True)
    published_at = models.BigIntegerField(null=True)
    progress = models.TextField(null=True)
    message = models.TextField(null=True)
    details = models.TextField(null=True)

    #: It is running and no attempt holds its lease, as far as a page has asked the lease store.
    abandoned = False

    class Meta:
        """The table, and the name of its rows in the admin."""

        db_table = "celery_leases_records"
        default_permissions = ("view",)
        permissions: ClassVar[list[tuple[str, str]]] = [
            ("retry_leaserecord", "Can retry keys"),
            ("release_leaserecord", "Can release keys"),
            ("forget_leaserecord", "Can forget keys"),
            ("resolve_leaserecord", "Can resolve keys"),
        ]
        verbose_name = "record"
        verbose_name_plural = "records"

    @property
    def shown_state(self) -> str:
        """The state as the command line and the board show it."""
        return ABANDONED if self.abandoned else str(self.state)

    def __str__(self) -> str:
        """The key."""
        return str(self.key)


class LeaseEffect(_ReadOnly):
    """One external action of a key."""

    pk = models.CompositePrimaryKey("stored_key", "name", "scope")
    stored_key = models.CharField(max_length=255)
    name = models.CharField(max_length=255)
    scope = models.CharField(max_length=255)
    state = models.CharField(max_length=16)
    fence = models.BigIntegerField()
    idempotency_key = models.CharField(max_length=64)
    reference = models.TextField(null=True)
    result = models.TextField(null=True)
    sent_at = models.BigIntegerField()
    done_at = models.BigIntegerField(null=True)
    expires_at = models.BigIntegerField(null=True)

    class Meta:
        """The table."""

        db_table = "celery_leases_effects"
        default_permissions = ()

    def __str__(self) -> str:
        """The name of the action, and the key."""
        return f"{self.name} of {self.stored_key}"


class LeaseMark(_ReadOnly):
    """A short-lived note of the workers, for example about a call that waits for a key."""

    pk = models.CompositePrimaryKey("stored_key", "name")
    stored_key = models.CharField(max_length=255)
    name = models.CharField(max_length=255)
    value = models.CharField(max_length=255)
    expires_at = models.BigIntegerField()

    class Meta:
        """The table."""

        db_table = "celery_leases_marks"
        default_permissions = ()

    def __str__(self) -> str:
        """The name of the mark."""
        return str(self.name)


class LeaseGroup(_ReadOnly):
    """A group that has running or waiting calls, a rate, or has had failures, if the lease store is
    the database.
    """

    name = models.CharField(max_length=255, primary_key=True)
    version = models.BigIntegerField()
    limited_until = models.BigIntegerField()
    slots = models.TextField()
    history = models.TextField()
    expires_at = models.BigIntegerField()

    class Meta:
        """The table, and the name of its rows in the admin."""

        db_table = "celery_leases_groups"
        default_permissions = ("view",)
        permissions: ClassVar[list[tuple[str, str]]] = [
            ("operate_leasegroup", "Can open and close groups")
        ]
        verbose_name = "group"
        verbose_name_plural = "groups"

    def __str__(self) -> str:
        """The name of the group."""
        return str(self.name)
