"""The tables of the records, made as ``leases migrate`` makes them, and their models."""

from typing import ClassVar

from django.db import migrations, models

from celery_leases.django.operations import MigrateTables


class Migration(migrations.Migration):
    """Version 1 of the tables."""

    initial = True
    atomic = False
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations = [
        MigrateTables(
            state_operations=[
                migrations.CreateModel(
                    name="LeaseEffect",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "stored_key",
                                "name",
                                "scope",
                                blank=True,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        ("stored_key", models.CharField(max_length=255)),
                        ("name", models.CharField(max_length=255)),
                        ("scope", models.CharField(max_length=255)),
                        ("state", models.CharField(max_length=16)),
                        ("fence", models.BigIntegerField()),
                        ("idempotency_key", models.CharField(max_length=64)),
                        ("reference", models.TextField(null=True)),
                        ("result", models.TextField(null=True)),
                        ("sent_at", models.BigIntegerField()),
                        ("done_at", models.BigIntegerField(null=True)),
                        ("expires_at", models.BigIntegerField(null=True)),
                    ],
                    options={
                        "db_table": "celery_leases_effects",
                        "default_permissions": (),
                    },
                ),
                migrations.CreateModel(
                    name="LeaseGroup",
                    fields=[
                        (
                            "name",
                            models.CharField(max_length=255, primary_key=True, serialize=False),
                        ),
                        ("version", models.BigIntegerField()),
                        ("limited_until", models.BigIntegerField()),
                        ("slots", models.TextField()),
                        ("history", models.TextField()),
                        ("expires_at", models.BigIntegerField()),
                    ],
                    options={
                        "verbose_name": "group",
                        "verbose_name_plural": "groups",
                        "db_table": "celery_leases_groups",
                        "default_permissions": ("view",),
                        "permissions": [
                            ("operate_leasegroup", "Can open and close groups"),
                        ],
                    },
                ),
                migrations.CreateModel(
                    name="LeaseMark",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "stored_key",
                                "name",
                                blank=True,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        ("stored_key", models.CharField(max_length=255)),
                        ("name", models.CharField(max_length=255)),
                        ("value", models.CharField(max_length=255)),
                        ("expires_at", models.BigIntegerField()),
                    ],
                    options={
                        "db_table": "celery_leases_marks",
                        "default_permissions": (),
                    },
                ),
                migrations.CreateModel(
                    name="LeaseRecord",
                    fields=[
                        (
                            "stored_key",
                            models.CharField(max_length=255, primary_key=True, serialize=False),
                        ),
                        ("task", models.CharField(max_length=255)),
                        ("key", models.TextField()),
                        ("call_id", models.CharField(max_length=255)),
                        ("owner", models.CharField(max_length=64)),
                        ("holder", models.CharField(max_length=255)),
                        ("fence", models.BigIntegerField()),
                        ("created_at", models.BigIntegerField()),
                        ("started_at", models.BigIntegerField()),
                        ("attempt", models.IntegerField()),
                        ("crashes", models.IntegerField()),
                        ("resumes", models.SmallIntegerField()),
                        ("lease_store", models.CharField(max_length=255)),
                        ("lease_until", models.BigIntegerField(null=True)),
                        ("state", models.CharField(max_length=16)),
                        ("ended", models.CharField(max_length=16, null=True)),
                        ("reason", models.CharField(max_length=255, null=True)),
                        ("result", models.TextField(null=True)),
                        ("error", models.TextField(null=True)),
                        ("retry_at", models.BigIntegerField(null=True)),
                        ("finished_at", models.BigIntegerField(null=True)),
                        ("expires_at", models.BigIntegerField(null=True)),
                        ("publish_at", models.BigIntegerField(null=True)),
                        ("published_at", models.BigIntegerField(null=True)),
                        ("progress", models.TextField(null=True)),
                        ("message", models.TextField(null=True)),
                        ("details", models.TextField(null=True)),
                    ],
                    options={
                        "verbose_name": "record",
                        "verbose_name_plural": "records",
                        "db_table": "celery_leases_records",
                        "default_permissions": ("view",),
                        "permissions": [
                            ("retry_leaserecord", "Can retry keys"),
                            ("release_leaserecord", "Can release keys"),
                            ("forget_leaserecord", "Can forget keys"),
                            ("resolve_leaserecord", "Can resolve keys"),
                        ],
                    },
                ),
            ],
        ),
    ]
