"""Published contract suites: what every lease store, mark store and record store must do.

To test a store of your own, subclass in a test module and give the store as a fixture::

    from celery_leases.testing.contracts import MarkStoreContract, SeparateLeaseStoreContract

    class TestMyLeases(SeparateLeaseStoreContract):
        @pytest.fixture
        def store(self):
            return MyLeaseStore(...)

``GateStoreContract`` asks for the fixture ``store`` too, as does ``GateHistoryContract`` for stores
that remember when gates were closed, ``MarkStoreContract`` for ``marks``,
``RecordStoreContract`` for ``records``, ``EffectStoreContract`` for ``records`` and ``effects``.

A store may be shared with other tests: every test makes keys of its own. Times are real; raise the
class attributes ``ttl`` and ``short`` where a store is slow.
"""

import pytest

# Before the suites are imported, as pytest explains only the assertions it has rewritten.
_LEASES = (
    "leases",
    "separate_leases",
    "fuzz",
    "marks",
    "group_case",
    "group_closing",
    "group_history",
    "group_probes",
)
_RECORDS = ("record_case", "claims", "settling", "failures", "repair")
_EFFECTS = ("effect_case", "intents", "replies", "progress")
pytest.register_assert_rewrite(
    *(f"{__name__}.{suite}" for suite in (*_LEASES, *_RECORDS, *_EFFECTS))
)

from celery_leases.testing.contracts.effects import EffectStoreContract  # noqa: E402
from celery_leases.testing.contracts.group_history import GateHistoryContract  # noqa: E402
from celery_leases.testing.contracts.groups import GateStoreContract  # noqa: E402
from celery_leases.testing.contracts.leases import LeaseStoreContract  # noqa: E402
from celery_leases.testing.contracts.marks import MarkStoreContract  # noqa: E402
from celery_leases.testing.contracts.records import RecordStoreContract  # noqa: E402
from celery_leases.testing.contracts.separate_leases import SeparateLeaseStoreContract  # noqa: E402

__all__ = [
    "EffectStoreContract",
    "GateHistoryContract",
    "GateStoreContract",
    "LeaseStoreContract",
    "MarkStoreContract",
    "RecordStoreContract",
    "SeparateLeaseStoreContract",
]
