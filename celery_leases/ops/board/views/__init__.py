"""The routes of the board: its pages and actions, by method and path."""

from typing import Final

from celery_leases.ops.board.application import View
from celery_leases.ops.board.views import actions, groups, keys, overview, runtimes, upkeep, workers

ROUTES: Final[tuple[tuple[str, str, View], ...]] = (
    ("GET", "/", overview.overview),
    ("GET", "/keys", keys.listed),
    ("GET", "/key", keys.one),
    ("POST", "/keys/confirm", actions.confirm),
    ("POST", "/keys/act", actions.act),
    ("GET", "/groups", groups.listed),
    ("POST", "/groups/confirm", groups.confirm),
    ("POST", "/groups/act", groups.act),
    ("GET", "/workers", workers.workers),
    ("GET", "/runtimes", runtimes.runtimes),
    ("GET", "/doctor", overview.doctor),
    ("GET", "/upkeep", upkeep.upkeep),
    ("POST", "/upkeep/confirm", upkeep.confirm),
    ("POST", "/upkeep/act", upkeep.act),
    ("GET", "/jobs", actions.job),
    ("POST", "/jobs/stop", actions.stop),
)
