"""The cost of many leases in one process, and how late they are renewed."""

import json
import subprocess
from pathlib import Path

from benchmarks.environments import ROOT
from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, NotDone
from benchmarks.performance.figures import Figure, figure
from benchmarks.performance.findings import Finding

FULL = (1000, 5.0, 30.0)
QUICK = (200, 2.0, 6.0)
"""Leases, the seconds within which all are acquired, and the seconds of the measurement."""


def measure(bench: Bench, quick: bool) -> Finding:
    """Both modes, one after the other."""
    leases, spread, seconds = QUICK if quick else FULL
    rows = [
        [f"{leases:,} leases", "share of a core, %", "renewals", "calls of the store", "latest, ms"]
    ]
    facts: dict[str, Figure] = {}
    for contender in roster.OURS:
        stage = bench.stage(contender)
        stage.prepare()
        command: list[str | Path] = [
            stage.python,
            "-W",
            "ignore",
            "-m",
            "benchmarks.performance.holder",
        ]
        command += [str(leases), str(seconds), str(spread)]
        held = subprocess.run(
            command, env=stage.env(), cwd=ROOT, capture_output=True, text=True, check=False
        )
        if held.returncode:
            raise NotDone(held.stderr[-3000:])
        seen = json.loads(held.stdout.splitlines()[-1])
        share, latest = 100 * seen["cpu"], 1000 * seen["latest"]
        rows.append(
            [
                contender.title,
                f"{share:.2f}",
                f"{seen['renewals']:,}",
                f"{seen['calls']:,}",
                f"{latest:.0f}",
            ]
        )
        facts |= {
            f"renewals share {contender.name}": figure([share]),
            f"renewals late {contender.name}": figure([latest]),
        }
    text = f"Begun within {spread:g} s, watched once, for {seconds:g} s."
    return Finding("renewals", [rows], text, facts)
