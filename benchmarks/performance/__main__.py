"""Measure, print and write: ``python -m benchmarks.performance [--quick] [--only ring,wal]``."""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Final

from benchmarks.environments import ROOT, interpreter
from benchmarks.performance import goals, page, roster, summary
from benchmarks.performance.bench import Bench, NotDone
from benchmarks.performance.figures import Figure
from benchmarks.performance.findings import Finding, drawn
from benchmarks.performance.goals import Facts
from tests.support.process import NotReady
from tests.support.servers import ServerMissing

MEASUREMENTS: Final = (
    *("throughput", "pools", "replay", "latency", "ring", "writes", "memory", "connections"),
    *("renewals", "mutex", "storms", "growth", "imports"),
)
QUICK: Final = "--quick"
KEPT: Final = ROOT / "build" / "performance"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.performance", description="Measure, and print tables."
    )
    parser.add_argument(QUICK, action="store_true", help="small samples: rough figures")
    parser.add_argument("--only", default="", help=f"some of {','.join(MEASUREMENTS)}")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bound is not kept")
    parser.add_argument(
        "--write",
        action=argparse.BooleanOptionalAction,
        help=f"put tables and plots into docs, and the sentence into {page.README.name} (default: unless --quick)",
    )
    options = parser.parse_args(argv)
    if unknown := set(options.only.split(",")) - {*MEASUREMENTS, ""}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(MEASUREMENTS)}")
    if options.write is None:
        options.write = not options.quick
    return options


def _measured(bench: Bench, name: str, quick: bool) -> Finding:
    start = time.monotonic()
    finding: Finding = importlib.import_module(f"benchmarks.performance.measures.{name}").measure(
        bench, quick
    )
    print(f"\n== {name}: {time.monotonic() - start:.0f} s\n\n{finding.markdown()}", flush=True)
    return finding


def _known(finding: Finding, quick: bool) -> Facts:
    """The figures of this run, and those of earlier runs of the same size for the others."""
    place = KEPT / ("quick" if quick else "full")
    place.mkdir(parents=True, exist_ok=True)
    kept = {fact: asdict(figure) for fact, figure in finding.facts.items()}
    (place / f"{finding.name}.json").write_text(json.dumps(kept, indent=1))
    files = [place / f"{name}.json" for name in MEASUREMENTS]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    return {fact: Figure(**figure) for facts in found for fact, figure in facts.items()}


def _machine(bench: Bench, quick: bool) -> str:
    """The machine and the versions of the measurement."""
    ((postgres,),) = bench.stage(roster.PLAIN).sql("SHOW server_version")
    with bench.client() as client:
        redis = client.info("server")["redis_version"]
    samples = f" Small samples, by `{QUICK}`: rough figures." if quick else ""
    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d} on {os.cpu_count()} cores of one machine, with Python "
        f"{platform.python_version()}, Redis {redis} and PostgreSQL {str(postgres).split()[0]}.{samples}"
    )


@dataclass
class Run:
    """The measurements, the machine, the figures of earlier runs, and what failed."""

    quick: bool
    machine: str = ""
    findings: list[Finding] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def measure(self, names: Sequence[str]) -> None:
        """Measure one after the other on the same servers; raises ServerMissing."""
        with Bench() as bench:
            self.machine = _machine(bench, self.quick)
            for name in names:
                try:
                    self.findings.append(_measured(bench, name, self.quick))
                    self.facts = _known(self.findings[-1], self.quick)
                except (NotDone, NotReady, TimeoutError) as error:
                    print(f"== {name} was not measured: {error}", file=sys.stderr, flush=True)
                    self.failed.append(name)

    def judged(self) -> str:
        """The table of goals."""
        return drawn(goals.table(self.facts, self.quick))

    def write(self) -> None:
        """Write tables and plots to docs, and the sentence to the README."""
        from benchmarks.performance import plots

        for finding in self.findings:
            page.show(finding.name, finding.markdown())
        page.show("machine", self.machine)
        page.show("goals", self.judged())
        plots.draw(self.facts)
        if short := summary.table(self.facts):
            page.show("summary", drawn(short))
            page.show("summary", summary.sentence(short), page.README)


def main(argv: Sequence[str]) -> int:
    """0 if everything was measured and, if requested, no bound is missed."""
    options = _arguments(argv)
    for environment in sorted({contender.environment for contender in roster.ALL}):
        interpreter(environment)
    run = Run(options.quick)
    try:
        run.measure(options.only.split(",") if options.only else MEASUREMENTS)
    except ServerMissing as error:
        sys.exit(str(error))
    print(f"\n== goals\n\n{run.judged()}\n\n{run.machine}")
    if options.write:
        run.write()
    return 1 if run.failed or (options.check and goals.missed(run.facts, run.quick)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
