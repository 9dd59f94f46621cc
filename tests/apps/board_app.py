"""The Celery app for ``leases web``: LEASES_URL and LEASES_DATABASE_URL are in the environment."""

import os

from tests.support.boards import Shop

app = Shop(os.environ["LEASES_DATABASE_URL"], os.environ["LEASES_URL"]).app
