"""The plots of the page; only this module needs matplotlib."""

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.environments import ROOT
from benchmarks.performance import roster
from benchmarks.performance.goals import Facts
from benchmarks.performance.summary import BODIES

PICTURES: Final = ROOT / "docs/pictures"
COLOURS: Final = ("#1b4f72", "#5499c7", "#a9cce3")
PARTS: Final = {
    "children": ("the worker's children", "#1b4f72"),
    "main": ("the worker's main process", "#5499c7"),
    "redis": ("Redis", "#cb4335"),
    "postgres": ("PostgreSQL", "#7d3c98"),
}

# The same figures give the same file; text is written as text.
mpl.rcParams.update({"svg.hashsalt": "celery_leases", "svg.fonttype": "none", "font.size": 9})


def draw(facts: Facts, directory: Path = PICTURES) -> list[Path]:
    """Draw the measurements; returns the files that were written."""
    written = []
    if all(f"{body} rate leases / plain" in facts for body in BODIES):
        written += [_throughput(facts, directory), _costs(facts, directory)]
    return written


def _throughput(facts: Facts, directory: Path) -> Path:
    figure, axes = plt.subplots(figsize=(8, 4.2))
    rows = [contender for contender in reversed(roster.ON_CELERY) if contender is not roster.PLAIN]
    height = 0.8 / len(BODIES)
    for number, body in enumerate(BODIES):
        shares = [facts[f"{body} rate {contender.name} / plain"] for contender in rows]
        axes.barh(
            [row + height * (1 - number) for row in range(len(rows))],
            [100 * share.median for share in shares],
            height,
            xerr=[
                [100 * (share.median - share.low) for share in shares],
                [100 * (share.high - share.median) for share in shares],
            ],
            color=COLOURS[number],
            label=f"{body} body",
            error_kw={"lw": 0.8},
        )
    axes.axvline(100, color="black", lw=0.8)
    axes.set_xlabel("throughput, % of plain Celery's")
    return _saved(figure, axes, rows, directory / "performance-throughput.svg")


def _costs(facts: Facts, directory: Path) -> Path:
    figure, axes = plt.subplots(figsize=(8, 3.4))
    rows = list(reversed(roster.ON_CELERY))
    left = [0.0] * len(rows)
    for part, (title, colour) in PARTS.items():
        widths = [facts[f"no-op {part} {contender.name}"].median / 1000 for contender in rows]
        axes.barh(range(len(rows)), widths, 0.7, left=left, color=colour, label=title)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_xlabel("CPU per task with a no-op body, ms")
    return _saved(figure, axes, rows, directory / "performance-cpu.svg")


def _saved(figure: Any, axes: Any, rows: list[roster.Contender], path: Path) -> Path:
    axes.set_yticks(range(len(rows)), [contender.heading.replace("*", "") for contender in rows])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.35, -0.16), ncols=4, frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path
