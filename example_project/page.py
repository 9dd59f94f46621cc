"""A web process of the demo: print what the page of a document says to its reader.

``python -m example_project.page example_project.tasks.write_summary document:1842``. It imports no task.
"""

from __future__ import annotations

import sys

from celery_leases import LeaseClient
from example_project import app


def main(task: str, key: str) -> None:
    """Ask where *key* stands, and print that for a person."""
    client = LeaseClient(app.conf.leases_url, app.conf.leases_database_url)
    print(client.status(key, task=task).message())
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
