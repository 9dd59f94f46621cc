"""The payment provider of :mod:`tests.apps.provider`, started by a test as a child process."""

import json
import sys
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self

import pytest

from celery_leases.testing.waits import wait_until
from tests.support.process import GuardedProcess


class Provider:
    """A running provider; a context manager."""

    def __init__(self, directory: Path) -> None:
        self._ledger = directory / "ledger"
        argv = [sys.executable, "-m", "tests.apps.provider", str(self._ledger)]
        self._process = GuardedProcess(argv, log=directory / "provider.log", cwd=Path.cwd())
        self._port = int(self._process.wait_for_log(r"listening on (\d+)", 20)[1])
        self.url = f"http://127.0.0.1:{self._port}"

    def script(self, customer: str, *steps: Mapping[str, Any], dedupe: bool = False) -> None:
        """Set the script of *customer*; see :mod:`tests.apps.provider`."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=20)
        connection.request(
            "PUT", f"/scripts/{customer}", json.dumps({"steps": steps, "dedupe": dedupe})
        )
        assert connection.getresponse().status == 200
        connection.close()

    def lines(self, what: str, customer: str | None = None, **match: Any) -> list[dict[str, Any]]:
        """Lines of the ledger; *what* is asked, charged, deduped, looked or replied."""
        found = (
            [json.loads(line) for line in self._ledger.read_text().splitlines()]
            if self._ledger.exists()
            else []
        )
        wanted = {"what": what} | ({"customer": customer} if customer is not None else {}) | match
        return [
            line for line in found if all(line.get(name) == value for name, value in wanted.items())
        ]

    def charges(self, customer: str) -> list[str]:
        """The charges of *customer*, by their ids."""
        return [line["id"] for line in self.lines("charged", customer)]

    def keys(self, customer: str) -> list[str]:
        """The idempotency key of each request for *customer*."""
        return [line["key"] for line in self.lines("asked", customer)]

    def looks(self, customer: str) -> list[str | None]:
        """The result of each look-up of a charge of *customer*."""
        keys = set(self.keys(customer))
        return [line["found"] for line in self.lines("looked") if line["key"] in keys]

    def wait_for(self, what: str, customer: str, number: int = 1) -> dict[str, Any]:
        """Wait for line *number* of the ledger, and return it."""
        wait_until(
            lambda: len(self.lines(what, customer)) >= number,
            30,
            f"{number} x {what} of {customer}",
        )
        return self.lines(what, customer)[number - 1]

    def close(self) -> None:
        self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    """One provider for the tests of a module; each test has customers of its own."""
    with Provider(tmp_path_factory.mktemp("provider")) as made:
        yield made
