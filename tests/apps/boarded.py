"""The app of ``tests.support.boards`` for a board that is served as a command; LEASES_URL and
LEASES_DATABASE_URL come from the environment.
"""

import os

from tests.support.boards import Shop

app = Shop(os.environ["LEASES_DATABASE_URL"], os.environ["LEASES_URL"]).app
