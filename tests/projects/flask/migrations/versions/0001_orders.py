"""The orders."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("number", sa.String(50), nullable=False),
        sa.Column("amount", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("orders")
