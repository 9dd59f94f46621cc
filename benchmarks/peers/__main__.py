"""Run the cases: ``python -m benchmarks.peers [--only M4,C6] [--check | --write]``."""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from benchmarks.environments import interpreter
from benchmarks.peers.cases import ALL
from benchmarks.peers.columns import PACKAGES, Package
from benchmarks.peers.observations import Case, Observed
from benchmarks.peers.plays import NotPlayed, play
from benchmarks.peers.table import PAGE, differences, drawn, on_page, put_on_page
from tests.support.process import NotReady


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Play cases, print a table."
    )
    parser.add_argument("--only", default="", help="rows, such as M4,C6")
    parser.add_argument("--package", default="", help="names of adapters, such as once,leases")
    parser.add_argument(
        "--jobs", type=int, default=3, help="how many cases are played at once (default: 3)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help=f"end with 1 if {PAGE.name} shows something else"
    )
    what.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args(argv)
    if (options.check or options.write) and (options.only or options.package):
        parser.error(
            "--check and --write are about the whole table: leave out --only and --package"
        )
    return options


def _chosen(names: str, known: Sequence[str]) -> list[str]:
    wanted = names.split(",") if names else list(known)
    if unknown := set(wanted) - set(known):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return wanted


def _played(case: Case, package: Package) -> Observed | None:
    """Run one case and print its observation; None, and the log, if the case did not end."""
    start = time.monotonic()
    try:
        observed = play(case, package.name, interpreter(package.name))
    except (NotPlayed, NotReady) as error:
        print(
            f"== {case.row} on {package.title} was not played to its end\n{error}",
            file=sys.stderr,
            flush=True,
        )
        return None
    took = time.monotonic() - start
    print(f"{case.row:4} {package.title:17} {took:5.1f} s  {observed}", file=sys.stderr, flush=True)
    return observed


def main(argv: Sequence[str]) -> int:
    """0 if every case was run and, with ``--check``, the page shows the observations."""
    options = _arguments(argv)
    rows = _chosen(options.only, [case.row for case in ALL])
    names = _chosen(options.package, [package.name for package in PACKAGES])
    cases = [case for case in ALL if case.row in rows]
    packages = [package for package in PACKAGES if package.name in names]
    for package in packages:
        interpreter(package.name)
    cells: dict[tuple[str, str], Observed] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        plays: dict[Future[Observed | None], tuple[str, str]] = {
            pool.submit(_played, case, package): (case.row, package.name)
            for case in cases
            for package in packages
            if package.name not in case.unfit
        }
        for done in as_completed(plays):
            if (observed := done.result()) is not None:
                cells[plays[done]] = observed
    table = drawn(cases, packages, cells)
    print(table)
    complete = len(cells) == len(plays)
    if options.write and complete:
        put_on_page(table)
    different = differences(on_page(), table) if options.check else []
    if different:
        print("\n".join([f"{PAGE.name} shows something else:", *different]), file=sys.stderr)
    return 0 if complete and not different else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
