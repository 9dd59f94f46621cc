"""What travels with a message: pins are believed for their own call only, owners are of one process."""

import pytest

from celery_leases.seam.pin import HEADER, call_id_of, owner_of, pinned


def test_two_processes_never_share_an_owner() -> None:
    """Billiard may run one delivery in two children."""
    assert owner_of("token", 11557) != owner_of("token", 11491)
    assert owner_of("token", 11557) == owner_of("token", 11557)


def test_an_owner_fits_its_column() -> None:
    """64 characters, whatever the largest process id."""
    assert len(owner_of("f" * 32, 2**22)) <= 64


@pytest.mark.parametrize(("nesting", "call_id"), [(None, "a"), (0, "a"), (1, "a~1")])
def test_a_replacement_is_another_call(nesting: int | None, call_id: str) -> None:
    """It goes on under the id of the task it replaces."""
    assert call_id_of("a", nesting) == call_id


@pytest.mark.parametrize(
    "headers",
    [None, {}, {HEADER: "x"}, {HEADER: {"task": "other", "id": "a"}}, {HEADER: {"task": "t", "id": "b"}}],
    ids=["none", "empty", "no mapping", "another task", "another call"],
)
def test_a_pin_of_anybody_else_is_none(headers: dict[str, object] | None) -> None:
    """Members of a group share one headers dict."""
    assert pinned(headers, "t", "a") == {}
