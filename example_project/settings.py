"""The settings of Celery and of celery_leases.

All come from the environment, with defaults for a Redis on this machine.
"""

import os

include = ["example_project.tasks"]
broker_url = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
result_backend = os.environ.get("CELERY_RESULT_BACKEND", "redis://localhost:6379/1")
broker_connection_retry_on_startup = True
# A worker that reserves only what it can run loses little when it dies.
worker_prefetch_multiplier = 1

# Without these two, leases live in the broker's Redis, and records in a SQLite file in the working
# directory.
leases_url = os.environ.get("LEASES_URL")
leases_database_url = os.environ.get("LEASES_DATABASE_URL")
leases_ttl = float(os.environ.get("LEASES_TTL", "15"))
