"""Make the tables of the contender that ``BENCH_CONTENDER`` names: ``python -m
benchmarks.performance.prepare``.
"""

import importlib

from benchmarks.performance import settings

if __name__ == "__main__":
    name = settings.given(settings.CONTENDER)
    importlib.import_module(f"benchmarks.performance.contenders.{name}").prepare()
