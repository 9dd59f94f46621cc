"""The tables of celery_leases."""

from alembic import op

import celery_leases.alembic as leases

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    leases.upgrade(op)


def downgrade() -> None:
    leases.downgrade(op)
