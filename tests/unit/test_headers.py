"""Headers of messages: they are read as they were written or not at all, owners are of
one process.
"""

import inspect
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.task import Context

from celery_leases.attempt.held_lease import BodyState
from celery_leases.decide.copies import Copy
from celery_leases.errors import KeyUnusable
from celery_leases.keys import STORED_KEY_MAX, CallKey, call_key, stored_key
from celery_leases.options import LeaseOptions
from celery_leases.worker.body_exceptions import BODY_STATE, body_state_of
from celery_leases.worker.headers import (
    HEADER,
    LONGEST_KEY,
    Header,
    call_id_of,
    celery_id_of,
    group_of,
    key_of,
    owner_of,
    read_header,
    token_of,
)

OWNER = owner_of("0123456789abcd+/", 2**22)
FINGERPRINT = "v1:" + "a" * 22
FULL = Header(
    task="billing.send",
    id="call",
    key="invoice:7",
    fingerprint=FINGERPRINT,
    group="mail",
    copy=Copy().after("b" * 32),
    reschedules=3,
    store_failures=2,
    prior=(OWNER,),
    started=True,
    failure_fence=17,
    due=1795745140.5,
    waited_for_newer=2.5,
)
PLAIN = Header("billing.send", "call")


def test_two_processes_never_share_an_owner() -> None:
    assert owner_of("token", 11557) != owner_of("token", 11491)
    assert owner_of("token", 11557) == owner_of("token", 11557)


def test_an_owner_fits_its_column() -> None:
    assert len(owner_of("f" * 16, 2**22)) <= 64


@pytest.mark.parametrize(
    "task_id",
    ["a", "job~2026", "a~1", "a~replaced~1", "a~replaced~1~replaced~0", "", "~", "ü" * 239],
)
def test_a_replacement_is_another_call(task_id: str) -> None:
    calls = [call_id_of(task_id, nesting) for nesting in (0, 1, 2)]
    assert call_id_of(task_id, None) == calls[0]
    assert {celery_id_of(call) for call in calls} == {task_id}
    ids = ("a", "a~1", "a~replaced~0", "a~replaced~1", "a~replaced~1~replaced~0")
    every = {call_id_of(one, nesting) for one in ids for nesting in (0, 1, 2)}
    assert len(every) == 3 * len(ids)


@pytest.mark.parametrize("nesting", [None, 1])
def test_the_id_of_a_call_fits_its_column(nesting: int | None) -> None:
    one, other = ("x" * 300 + end for end in "ab")
    assert len(call_id_of(one, nesting)) == 255
    assert call_id_of(one, nesting) != call_id_of(other, nesting)
    exactly = call_id_of(one, None)
    assert call_id_of(exactly, None) not in (exactly, call_id_of(one, nesting))


class TestAHeader:
    @pytest.mark.parametrize(
        "header",
        [FULL, PLAIN, Header("billing.send", "call", failure_fence=0)],
        ids=["all", "none", "0"],
    )
    def test_is_read_as_it_was_written(self, header: Header) -> None:
        headers = {HEADER: json.loads(json.dumps(header.written()))}
        assert read_header(headers, "billing.send", "call") == header

    @pytest.mark.parametrize(
        "headers",
        [
            None, "x", [], {}, {HEADER: None}, {HEADER: FULL.written() | {"task": "o"}},
            {HEADER: {**FULL.written(), "id": "b"}},
        ],
        ids=["none", "text", "list", "empty", "null", "another task", "another call"],
    )  # fmt: skip
    def test_of_another_call_is_ignored(self, headers, caplog) -> None:
        assert read_header(headers, "billing.send", "call") is None
        assert not caplog.records

    @pytest.mark.parametrize(
        "changed",
        [
            {"v": 2}, {"v": None}, {"key": None}, {"key": {"a": 1}},
            {"key": "x" * (LONGEST_KEY + 1)}, {"key": "a\0b"}, {"key": "\ud800"}, {"stored": 1},
            {"stored": "x" * 256}, {"fingerprint": "v1:x"}, {"fingerprint": 7}, {"group": ["g"]},
            {"group": "g" * 256}, {"copy": "7"}, {"copy": ["7", "a"]}, {"tries": "3"},
            {"tries": True}, {"tries": -1}, {"tries": 1.5}, {"away": {}}, {"prior": "x"},
            {"prior": [OWNER] * 9}, {"prior": [1]}, {"prior": ["not an owner"]}, {"started": 1},
            {"started": "no"}, {"met": "17"}, {"met": -1}, {"met": 2**63}, {"due": "soon"},
            {"due": -1}, {"due": float("inf")}, {"task": 7}, {"id": None},
        ],
        ids=str,
    )  # fmt: skip
    def test_that_we_cannot_have_written_is_ignored_with_a_warning(self, changed, caplog) -> None:
        with caplog.at_level(logging.WARNING):
            assert read_header({HEADER: FULL.written() | changed}, "billing.send", "call") is None
        (line,) = caplog.messages
        assert line.startswith(
            "billing.send[call]: its message header 'celery_leases' is ignored: its "
        )

    @pytest.mark.parametrize("value", ["x", 1, [], ["task"], True])
    def test_that_is_no_mapping_is_ignored_with_a_warning(self, value, caplog) -> None:
        """Whatever else it is."""
        assert read_header({HEADER: value}, "billing.send", "call") is None
        assert len(caplog.messages) == 1

    @pytest.mark.parametrize("length", [1, 200, LONGEST_KEY, LONGEST_KEY + 1, 140_000])
    def test_is_of_bounded_length(self, length: int) -> None:
        key = "é" * length
        header = FULL.of_key(
            CallKey(key, stored_key("billing.send", key), FINGERPRINT), "g" * length
        )
        assert len(json.dumps(header.written(), ensure_ascii=False).encode()) < 6_000
        assert read_header({HEADER: header.written()}, "billing.send", "call") == header


def a_task(**options: Any) -> Any:
    """A task of one customer's invoice."""

    def send(customer: int, text: str = "") -> None: ...

    given = {"key": "invoice:{customer}", "group": "mail:{customer}"} | options
    return SimpleNamespace(
        name="billing.send",
        lease_options=LeaseOptions(**given),
        lease_signature=inspect.signature(send),
    )


def begun(task: Any, *args: Any, **changes: Any) -> Header:
    """The header of a call that has begun with those arguments."""
    key = call_key(task.name, task.lease_options, task.lease_signature, "call", args, {})
    return Header(task.name, "call", started=True, **changes).of_key(key, None)


class TestTheKeyInAHeader:
    """It counts for a call that has begun, and where it can be one of its task."""

    def test_stays_with_any_arguments_of_a_retry(self) -> None:
        task = a_task()
        key = key_of(task, begun(task, 7), "call", (8,), {}, 1)
        assert (key.key, key.stored) == ("invoice:7", "t:billing.send|invoice:7")
        assert key.fingerprint == begun(task, 7).fingerprint

    def test_stays_where_a_retry_brings_arguments_that_make_none(self) -> None:
        task = a_task()
        header = begun(task, 7)
        assert key_of(task, header, "call", (), {}, 1).key == "invoice:7"
        assert group_of(task, FULL, (), {}, 1) == "mail"

    @pytest.mark.parametrize("begin", ["", "/exports/"])
    def test_stays_where_it_is_too_long_to_be_carried(self, begin: str) -> None:
        task = a_task(
            key=lambda customer, *_: f"{begin}export:" + ",".join(map(str, range(customer))),
        )
        header = begun(task, 20_000)
        whole = key_of(task, None, "call", (20_000,), {}, 0)
        assert not header.key
        assert len(header.stored) == STORED_KEY_MAX
        assert key_of(task, header, "call", (20_000,), {}, 1) == whole
        found = key_of(task, header, "call", (7,), {}, 1)
        assert (found.stored, found.fingerprint) == (whole.stored, whole.fingerprint)
        assert found.key.startswith("export:0,1,2")
        assert len(found.key) < STORED_KEY_MAX

    @pytest.mark.parametrize(
        ("template", "carried", "found"),
        [
            ("i:{customer}", "/other/i:7", "i:8"),
            ("/own/{customer}", "/other/7", "/own/8"),
            ("/own/{customer}", "/own/7", "/own/7"),
        ],
    )
    def test_of_another_task_does_not_count(self, template, carried, found) -> None:
        task = a_task(key=template, fingerprint=False)
        forged = Header("billing.send", "call", key=carried, started=True)
        assert key_of(task, forged, "call", (8, "x"), {}, 5).key == found

    def test_of_a_call_that_has_not_begun_does_not_count(self) -> None:
        task = a_task()
        header = Header(
            **{name: getattr(begun(task, 7), name) for name in ("task", "id", "key", "fingerprint")}
        )
        assert key_of(task, header, "call", (8,), {}, 0).key == "invoice:8"
        with pytest.raises(KeyUnusable):
            key_of(task, header, "call", (), {}, 0)
        with pytest.raises(KeyUnusable):
            group_of(task, header, (), {}, 0)

    def test_without_a_fingerprint_does_not_count_where_they_are_compared(self) -> None:
        """It would be given the result of any arguments, and leave a record that agrees with all of
        them.
        """
        task = a_task()
        forged = Header("billing.send", "call", key="invoice:7", started=True)
        assert key_of(task, forged, "call", (8, "x"), {}, 5).key == "invoice:8"
        same = key_of(
            task,
            Header("billing.send", "call", key="invoice:8", started=True),
            "call",
            (8, "x"),
            {},
            5,
        )
        assert same.fingerprint is not None

    @pytest.mark.parametrize("options", [{"fingerprint": False}, {"runs": "each"}])
    def test_counts_without_a_fingerprint_where_none_is_compared(self, options: Any) -> None:
        task = a_task(**options)
        for fingerprint in (None, FINGERPRINT):
            header = Header(
                "billing.send", "call", key="invoice:7", fingerprint=fingerprint, started=True
            )
            assert key_of(task, header, "call", (8,), {}, 1).fingerprint is None
            assert key_of(task, header, "call", (8,), {}, 1).key == "invoice:7"

    def test_never_counts_for_a_task_without_keys(self) -> None:
        task = a_task(key=None)
        header = Header(
            "billing.send", "call", key="another call", fingerprint=FINGERPRINT, started=True
        )
        assert key_of(task, header, "call", (8,), {}, 1).key == "call"

    @pytest.mark.parametrize(
        "stored",
        [
            "", "t:billing.send|invoice:7", "t:billing.other|" + "x" * 200, "g:" + "x" * 253,
            "t:billing.send|" + "x" * 240,
        ],
    )  # fmt: skip
    def test_in_a_stored_form_that_is_not_one_of_this_task_does_not_count(self, stored) -> None:
        task = a_task()
        header = Header(
            "billing.send", "call", stored=stored, fingerprint=FINGERPRINT, started=True
        )
        assert key_of(task, header, "call", (8,), {}, 1).key == "invoice:8"


class TestARequest:
    @pytest.mark.parametrize("value", [True, "x", {"reported": "FAILURE"}, ["t:x|y", "call"]])
    def test_remembers_nothing_that_a_message_has_brought(self, value: object) -> None:
        request = Context({BODY_STATE: value, "celery_leases_state": value})
        assert vars(body_state_of(request)) == vars(BodyState())

    def test_remembers_what_its_body_has_done(self) -> None:
        request = Context({"id": "call"})
        body_state_of(request).reported = "FAILURE"
        assert body_state_of(request).reported == "FAILURE"

    @pytest.mark.parametrize("token", [None, 7, "", "x", "A" * 15, "a" * 17, "a" * 15 + "-"])
    def test_has_no_token_but_one_of_ours(self, token: object) -> None:
        assert token_of(Context({"celery_leases_token": token})) is None
        assert token_of(Context({"celery_leases_token": "a+/Z" * 4})) == "a+/Z" * 4
