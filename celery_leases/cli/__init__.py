"""``celery -A proj leases …``: show and repair keys and groups, explain rules, create the tables.

Each module of this package, and of the operators' annex, adds its commands to the group ``leases``
when it is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

from celery_leases.cli.root import leases

__all__ = ["leases"]

for _package in (__name__, "celery_leases.ops.commands"):
    for _module in iter_modules(import_module(_package).__path__):
        import_module(f"{_package}.{_module.name}")
