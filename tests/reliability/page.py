"""The tables of docs/explanation/reliability.md, each made of one recorded run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pages import part, put
from tests.mutants.explained import reason_of
from tests.reliability.runs import recorded

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md"

Table = list[list[str]]


def marks(name: str) -> tuple[str, str]:
    """What is before and after the table of a name."""
    return f"<!-- {name}: written by python -m tests.reliability -->", f"<!-- end of {name} -->"


def shown(name: str, page: Path = PAGE) -> str:
    """What the page has for a name."""
    return part(page, *marks(name))


def write(page: Path = PAGE) -> None:
    """Write all parts of the page."""
    for name, made in PARTS.items():
        put(page, *marks(name), made())


def drawn(table: Table) -> str:
    """A table of Markdown, with its head first."""
    head, *rows = table
    rule = ["---", *("--:" if _is_number(cell) else "---" for cell in (rows or [head])[0][1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace(" s", "").isdigit()


def simulation() -> str:
    """The seeds that were run."""
    head = ["seeds", "steps", "simulated days", "CPU seconds", "seeds that break a promise"]
    rows = []
    for name, option in (("simulation", ""), ("days", " with `--days`")):
        for found in recorded(name)["runs"]:
            last = found["first"] + found["seeds"] - 1
            row = [f"{found['first']:,} to {last:,}{option}", f"{found['steps']:,}"]
            row += [f"{found['days']:,.1f}", f"{found['cpu_seconds']:,}"]
            rows.append([*row, ", ".join(map(str, found["failed"])) or "none"])
    return drawn([head, *rows])


def planted() -> str:
    """Each planted bug, and a seed that shows it: the first one, or for a rare bug one whose run
    suits it.
    """
    rows, seeds = [], []
    for name, told in recorded("planted")["bugs"].items():
        seed, _, why = told.partition(", ")
        number = seed.removeprefix("seed ")
        if number.isdigit():
            seeds.append(int(number))
        rows.append([name, number if number.isdigit() else "not found", why.partition(":")[0]])
    rows.sort(key=lambda row: (not row[1].isdigit(), int(row[1]) if row[1].isdigit() else 0))
    told = (
        f"{len(seeds)} of {len(rows)} are found, the median with seed {statistics.median(seeds):g}."
    )
    return f"{told}\n\n{drawn([['the planted bug', 'a seed', 'which promise it breaks'], *rows])}"


def mutants() -> str:
    """How many mutations of each module were noticed."""
    head = ["module", "mutations", "run", "by a test", "by the simulator", "survive"]
    rows, sums = [], dict.fromkeys(("mutations", "run", "by a test", "by the simulator"), 0)
    names = recorded("mutants")["survivors"]
    for module, counts in recorded("mutants")["modules"].items():
        if not counts.get("run"):
            continue
        survive = sum(name.startswith(f"{module} ") for name in names)
        noticed = counts["run"] - survive - counts.get("by the simulator", 0)
        row = [counts["mutations"], counts["run"], noticed, counts.get("by the simulator", 0)]
        for name, number in zip(sums, row, strict=True):
            sums[name] += number
        rows.append(
            [f"`{module.removeprefix('celery_leases.')}`", *map(_thousands, (*row, survive))]
        )
    rows.append(["all", *map(_thousands, (*sums.values(), len(names)))])
    return drawn([head, *rows])


def survivors() -> str:
    """Each mutation that nothing noticed, with the reason if it changes nothing that counts."""
    by_place: dict[str, list[str]] = {}
    for name in recorded("mutants")["survivors"]:
        place, _, change = name.removeprefix("celery_leases.").partition(": ")
        why = f" ({reason})" if (reason := reason_of(name)) else ""
        by_place.setdefault(place, []).append(f"`{change}`{why}")
    return "\n".join(f"* {place}: {', '.join(changes)}" for place, changes in by_place.items())


def faults() -> str:
    """How often a connection was cut in each scenario, and what came of it."""
    head = ["on", "what was played", "trials", "cut", "lost by kombu", "violations"]
    head += ["longest overlap", "longest trial"]
    rows = []
    for combination, found in recorded("faults").items():
        if combination == "versions":
            continue
        for scenario, row in found["scenarios"].items():
            cells = [
                _thousands(row[each]) for each in ("trials", "cut", "lost by kombu", "violations")
            ]
            spans = [f"{row[each]:.1f} s" for each in ("longest overlap", "longest")]
            rows.append([TITLES[combination], scenario, *cells, *spans])
    return drawn([head, *rows])


TITLES = {
    "redis": "Redis broker, Redis leases, PostgreSQL",
    "rabbit": "RabbitMQ, database leases, PostgreSQL",
}


def soak() -> str:
    """Each run of many keys with faults of all kinds."""
    head = ["leases in", "seed", "minutes", "keys", "calls", "bodies run", "faults"]
    head += ["longest pause", "longest overlap", "violations"]
    rows = [
        [
            each["leases"],
            str(each["seed"]),
            f"{each['minutes']:g}",
            *map(_thousands, (each["keys"], each["calls"], each["runs"])),
            _thousands(sum(each["faults"].values())),
            f"{each['longest_pause']:.1f} s",
            f"{each['longest_overlap']:.1f} s",
            str(len(each["violations"])),
        ]
        for each in recorded("soak")["runs"]
    ]
    broken = [
        f"* seed {each['seed']}: {why}"
        for each in recorded("soak")["runs"]
        for why in each["violations"]
    ]
    told = "\n\nNot explained yet:\n\n" + "\n".join(broken) if broken else ""
    return drawn([head, *rows]) + told


def versions() -> str:
    """With which versions the runs were made."""
    found: dict[str, Any] = recorded("faults")["versions"]
    return ", ".join(f"{name} {version}" for name, version in found.items()) + "."


def _thousands(number: int) -> str:
    return f"{number:,}"


def whole() -> str:
    """The page below its title."""
    return "\n\n".join(
        (
            (
                f"What was done to break the [promises](guarantees.md), with {versions()}\n"
                "Each command prints what it finds; `--record` writes it to `tests/reliability`."
            ),
            "## The simulator\n\n    python -m tests.simulation --seeds 1-3000",
            (
                "A seed is the cluster of a minute or, one in ten, of longer; with `--days` it is a day of "
                "3 workers, 20 keys and 10 accidents."
            ),
            simulation(),
            "### Planted bugs\n\n    make planted",
            planted(),
            '## Mutations\n\n    make mutants MUTANTS_ARGS="--minutes 45"',
            mutants(),
            (
                "These survive the tests of attempts and decisions, but perhaps not `make test`; a "
                "reason is given if they do no harm:"
            ),
            survivors(),
            "## Cuts on real servers\n\n    make faults",
            (
                "Each request of a delivery is cut once before the server gets it, and once before its "
                "reply.\n"
                "No lease ends, and no process is killed but for a takeover, so a body must run as "
                "often as without the cut."
            ),
            faults(),
            "## A soak\n\n    make soak MINUTES=10",
            (
                "Three workers of three pools run 200 keys at a time, while processes and servers are "
                "killed and paused, and connections cut."
            ),
            soak(),
        )
    )


PARTS: dict[str, Callable[[], str]] = {"page": whole}
