"""Each real error, judged where it was raised."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.catalog import CASES
from tests.clients.expectations import Case, Places, judged

# Stripe hands httpx its data in a way that httpx no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:httpx")

CLIENTS = (
    *("aiohttp", "anthropic", "botocore", "google", "grpc", "httpcore", "httpcore2", "httpx"),
    *("httpx2", "openai", "psycopg", "psycopg2", "pydantic", "pymysql", "requests", "stripe"),
    *("tenacity", "urllib3"),
)

ALONE = """
import sys
from celery_leases.failures.classifier import Rules

before = set(sys.modules)

class RateLimitError(Exception):
    __module__ = "openai"
    status_code = 429

for error in (RateLimitError("No."), ConnectionRefusedError(111, "No."), KeyError("total"), OSError(28, "No space")):
    print(Rules.default().classify(error, 1_800_000_000.0).reason)
print(*sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])), *(set(sys.modules) - before))
"""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_real_error_lands_in_its_row(
    case: Case, places: Callable[[Case], Places], nothing_left: None
) -> None:
    """The default rules classify an error of a real library as the table says."""
    case.check(judged(case.raised(places(case))))


def test_no_client_library_is_imported_to_judge(pytestconfig: pytest.Config) -> None:
    """A fresh interpreter judges errors and has none of the client libraries among its modules,
    before or after.
    """
    command = [sys.executable, "-c", ALONE, *CLIENTS]
    root: Path = pytestconfig.rootpath
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["rate_limited", "unreachable", "error", "error", ""]
