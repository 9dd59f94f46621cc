"""A result backend that is away while the file RESULTS_AWAY exists."""

import os
from pathlib import Path

from celery.backends.redis import RedisBackend


class Results(RedisBackend):
    """Celery's Redis backend, as it is after the last of its own retries."""

    def set(self, key, value, **retry_policy):
        """Write, unless it is away."""
        if Path(os.environ["RESULTS_AWAY"]).exists():
            raise ConnectionError("the results are away")
        return super().set(key, value, **retry_policy)
