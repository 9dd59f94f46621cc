"""Create the tables of the contender in ``BENCH_CONTENDER``."""

import importlib

from benchmarks.performance import settings

if __name__ == "__main__":
    name = settings.given(settings.CONTENDER)
    importlib.import_module(f"benchmarks.performance.contenders.{name}").prepare()
