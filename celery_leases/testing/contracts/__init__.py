"""Published contract suites for lease stores, mark stores, group stores, record stores and effect
stores.

To test a store of your own, subclass a suite in a test module, and override its fixture::

    from celery_leases.testing.contracts import MarkStoreContract, SeparateLeaseStoreContract

    class TestMyLeases(SeparateLeaseStoreContract):
        @pytest.fixture
        def store(self):
            return MyLeaseStore(...)

``GroupStoreContract`` and ``GroupHistoryContract`` (for stores that remember when groups were
closed) also use the fixture ``store``. ``MarkStoreContract`` uses ``marks``,
``RecordStoreContract`` uses ``records``, and ``EffectStoreContract`` uses ``records`` and
``effects``.

A store may be shared with other tests, because every test makes its own keys. Times are real;
increase the class attributes ``ttl`` and ``short`` for a slow store.
"""

from pkgutil import iter_modules

import pytest

# Before the suites are imported, because pytest explains only the assertions that it has rewritten.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from celery_leases.testing.contracts.effects import EffectStoreContract  # noqa: E402
from celery_leases.testing.contracts.group_history import GroupHistoryContract  # noqa: E402
from celery_leases.testing.contracts.groups import GroupStoreContract  # noqa: E402
from celery_leases.testing.contracts.leases import LeaseStoreContract  # noqa: E402
from celery_leases.testing.contracts.marks import MarkStoreContract  # noqa: E402
from celery_leases.testing.contracts.records import RecordStoreContract  # noqa: E402
from celery_leases.testing.contracts.separate_leases import SeparateLeaseStoreContract  # noqa: E402

__all__ = [
    "EffectStoreContract",
    "GroupHistoryContract",
    "GroupStoreContract",
    "LeaseStoreContract",
    "MarkStoreContract",
    "RecordStoreContract",
    "SeparateLeaseStoreContract",
]
