"""The calls of the model, their cost, and the promises of the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from example_project.demo.narrator import table

LEASES = "celery_leases"
PLAIN = "plain Celery"


@dataclass(frozen=True)
class Promise:
    """A promised value, and the value that was measured."""

    what: str
    promised: object
    seen: object

    @property
    def kept(self) -> bool:
        """Whether the two are equal."""
        return self.promised == self.seen


@dataclass(frozen=True)
class Account:
    """The totals of one scene on one side: ``calls`` reached the model and cost ``cents``."""

    scene: str
    side: str
    presses: int
    calls: int
    cents: int
    documents: int
    finished: int


@dataclass(frozen=True)
class Bill:
    """The promises and totals, as far as the demo ran."""

    promises: Sequence[Promise]
    accounts: Sequence[Account]

    def broken(self) -> list[str]:
        """One line for each promise that was not kept."""
        return [
            f"{promise.what}: {promise.seen}, not {promise.promised}"
            for promise in self.promises
            if not promise.kept
        ]

    def kept(self) -> str:
        """The summary, if all promises were kept."""
        leases, plain = (
            sum(account.calls for account in self.accounts if account.side == side)
            for side in (LEASES, PLAIN)
        )
        return f"{len(self.promises)} promises, {leases} paid calls where plain Celery paid for {plain}"

    def show(self) -> None:
        """Print the promises, and the table of both sides."""
        table(
            [
                ["promise", "was", ""],
                *([p.what, str(p.seen), "kept" if p.kept else "broken"] for p in self.promises),
            ]
        )
        print()
        table(
            [
                ["scene", "on", "presses", "calls at the model", "paid", "finished"],
                *map(_row, self.accounts),
            ]
        )


def _row(account: Account) -> list[str]:
    finished = f"{account.finished} of {account.documents}"
    paid = f"${account.cents / 100:.2f}"
    return [account.scene, account.side, str(account.presses), str(account.calls), paid, finished]
