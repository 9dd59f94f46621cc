"""``celery -A proj leases …``: show and repair keys and groups, create tables, publish messages.

Each module of this package, and of ``celery_leases.ops.commands``, adds its commands to the group
``leases`` when it is imported. They are imported when a command of the group is looked up, so that
other commands of Celery, such as ``celery worker``, do not wait for them.
"""

from celery_leases.cli.root import leases

__all__ = ["leases"]
