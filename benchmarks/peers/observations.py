"""Cases and their observations: a text for the table, and whether it is right or wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.stage import Stage


@dataclass(frozen=True)
class Observed:
    """What happened, in a few words, and whether a user of such tasks wants that."""

    right: bool
    text: str

    def __str__(self) -> str:
        return f"{'✓' if self.right else '✗'} {self.text}"


def right(text: str) -> Observed:
    """Nothing went wrong."""
    return Observed(True, text)


def wrong(text: str) -> Observed:
    """A body ran too often or never, or a caller waits for ever."""
    return Observed(False, text)


@dataclass(frozen=True)
class Case:
    """One case; *unfit* has the reasons why it does not apply to a package. Times are seconds, None
    is the default.

    ``visibility`` is how long the broker waits for an acknowledgement, ``locks`` how long locks and
    leases last.
    """

    row: str
    title: str
    play: Callable[["Stage"], Observed]
    unfit: Mapping[str, str] = field(default_factory=dict)
    visibility: float | None = None
    locks: float | None = None


CASES: dict[str, Case] = {}
"""All cases by row, in the order of the table."""


def case(
    row: str,
    title: str,
    *,
    unfit: Mapping[str, str] | None = None,
    visibility: float | None = None,
    locks: float | None = None,
) -> Callable[[Callable[["Stage"], Observed]], Callable[["Stage"], Observed]]:
    """Register a function as the case of a row."""

    def register(play: Callable[["Stage"], Observed]) -> Callable[["Stage"], Observed]:
        CASES[row] = Case(row, title, play, unfit or {}, visibility, locks)
        return play

    return register


NO_KEYS = "Celery alone has no keys: nothing is held, and nothing is refused."
NO_MEMORY = (
    "It remembers nothing of finished work: the body runs again, so that nobody has to be skipped."
)
SILENT = "It has no error for a duplicate: `delay()` returns `None`."
EVERYBODY = ("once", "singleton", "heimdall", "once_task")
KEYLESS = {"plain": NO_KEYS}
