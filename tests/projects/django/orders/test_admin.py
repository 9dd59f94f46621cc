"""The admin of leases: what it shows, what it asks before it acts, and whom it refuses."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock, skipIf
from urllib.parse import quote

from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote as as_in_links
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import TransactionTestCase
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from shop.celery import app
from starlette.testclient import TestClient

from celery_leases import LeaseClient
from celery_leases.django import admin_records
from celery_leases.django.board import CHANGE_PERMISSIONS, staff
from celery_leases.django.models import LeaseRecord
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.ops.board import leases_board
from celery_leases.worker import processes
from orders.models import Order
from orders.tasks import charge, refund
from orders.tests import IN_MEMORY, configured

RECORDS = reverse("admin:celery_leases_leaserecord_changelist")
REFUSED = r"<script(?![^>]*\bsrc=)[^>]*>(?!\s*</script>)|<style|\sstyle=|\son\w+="
GROUPS = reverse("admin:celery_leases_leasegroup_changelist")


@contextmanager
def on_the_database() -> Iterator[None]:
    """Eager calls have their records in the test database."""
    with configured(task_always_eager=True, leases_eager_stores=True, task_eager_propagates=False):
        yield


def page_of(record: LeaseRecord) -> str:
    """The URL of one record's page."""
    return reverse("admin:celery_leases_leaserecord_change", args=[as_in_links(record.pk)])


@skipIf(IN_MEMORY, "the records are not in the database")
class AdminTests(TransactionTestCase):
    """Two keys, one of which has failed for good."""

    def setUp(self) -> None:
        processes.close_all()
        self.addCleanup(processes.close_all)
        for number in (1, 2):
            Order.objects.create(number=number)
        with on_the_database():
            charge.apply((1,))
            refund.apply((2,))
        self.failed = LeaseRecord.objects.get(key="refund:2")
        self.done = LeaseRecord.objects.get(key="charge:1")

    def login(self, *permissions: str) -> None:
        """Log in a staff member with these permissions and the permission to view."""
        user = User.objects.create_user(
            f"user{User.objects.count()}", password="secret", is_staff=True
        )
        names = {"view_leaserecord", "view_leasegroup", *permissions}
        user.user_permissions.set(Permission.objects.filter(codename__in=names))
        self.client.force_login(user)

    def post(self, what: str, *records: LeaseRecord, **more: str) -> str:
        """Ask for an action; the text of the page that follows."""
        given = {"action": what, "_selected_action": [record.pk for record in records], **more}
        response = self.client.post(RECORDS, given, follow=True)
        self.assertEqual(response.status_code, 200)
        return response.content.decode()

    def confirmed(self, what: str, *records: LeaseRecord, **more: str) -> str:
        """Ask, and answer the page that asks."""
        asked = self.post(what, *records)
        self.assertIn(f"{len(records)} key", asked)
        seen = re.findall(r'name="seen" value="([^"]+)"', asked)
        self.assertEqual(len(seen), len(records))
        return self.post(what, *records, confirmed="yes", seen=seen, **more)

    def test_the_pages_link_to_the_board(self) -> None:
        """If the settings have its URL; a wrong one is an error."""
        self.login()
        key = quote(self.failed.pk, safe="")
        links = {RECORDS: "", GROUPS: "groups", page_of(self.failed): f"key?stored={key}"}
        for url in links:
            self.assertNotIn("leases-board", self.client.get(url).content.decode())
        with self.settings(CELERY_LEASES={**settings.CELERY_LEASES, "board_url": "/ops"}):
            for url, link in links.items():
                self.assertIn(f'href="/ops/{link}"', self.client.get(url).content.decode())
        with self.settings(CELERY_LEASES={"board_url": "javascript:alert(1)"}):
            self.assertRaises(LeaseConfigurationError, self.client.get, GROUPS)

    def test_the_staff_come_to_the_board_by_their_session(self) -> None:
        """To look with the permissions to view, to change with those of all actions."""
        board = TestClient(leases_board(app, staff))
        self.assertEqual(board.get("/upkeep").status_code, 403)
        User.objects.create_user("ann", password="secret")
        self.client.login(username="ann", password="secret")
        every = [name.removeprefix("celery_leases.") for name in CHANGE_PERMISSIONS]
        for permissions, status, button in (
            (None, 403, False),
            ([], 200, False),
            (every, 200, True),
        ):
            if permissions is not None:
                self.login(*permissions)
            board.cookies.set("sessionid", self.client.cookies["sessionid"].value)
            page = board.get("/upkeep")
            self.assertEqual(page.status_code, status)
            self.assertEqual("<button" in page.text, button)
        self.client.logout()
        self.assertEqual(board.get("/upkeep").status_code, 403)

    def test_only_the_filters_of_the_list_can_be_looked_up(self) -> None:
        """What the pages leave out cannot be guessed by the rows that a lookup finds."""
        self.login()
        for query, code in (
            *(("state=failed&task=refund&started=day", 200), ("crashed=yes", 200)),
            *(("message__contains=hunter2", 400), ("result__regex=h", 400), ("error=x", 400)),
        ):
            with self.subTest(query=query):
                self.assertEqual(self.client.get(f"{RECORDS}?{query}").status_code, code)

    def test_the_list_shows_keys_without_a_count(self) -> None:
        """Its filters and its search find them."""
        self.login()
        with CaptureQueriesContext(
            connection,
        ) as queries:
            text = self.client.get(RECORDS).content.decode()
        self.assertIn("refund:2", text)
        self.assertIn("charge:1", text)
        self.assertFalse([query for query in queries if "COUNT(" in query["sql"].upper()])
        for query, found in (
            ("state=failed", {"refund:2"}),
            ("q=charge", {"charge:1"}),
            ("q=harge", set()),
            ("task=orders.tasks.charge", {"charge:1"}),
            ("started=hour", {"charge:1", "refund:2"}),
            ("crashed=yes", set()),
        ):
            text = self.client.get(f"{RECORDS}?{query}").content.decode()
            self.assertEqual(
                {key for key in ("charge:1", "refund:2") if f">{key}</a>" in text}, found, query
            )

    def test_a_key_whose_process_died_is_abandoned_everywhere(self) -> None:
        """In the list, on the page that asks, and for the filter, as the command line says."""
        self.login("release_leaserecord")
        died = "UPDATE celery_leases_records SET state = 'running', finished_at = NULL, lease_until = %s"
        for lease_until, state in ((1, "abandoned"), (2**62, "running")):
            with connection.cursor() as cursor:
                cursor.execute(f"{died} WHERE stored_key = %s", [lease_until, self.failed.pk])
            listed = self.client.get(RECORDS).content.decode()
            self.assertIn(f'<td class="field-state_now">{state}</td>', listed)
            self.assertEqual("so far" in listed, state == "running")
            self.assertIn(f"orders.tasks.refund, {state})", self.post("release", self.failed))
            for wanted in ("abandoned", "running"):
                found = self.client.get(f"{RECORDS}?state={wanted}").content.decode()
                self.assertEqual(">refund:2</a>" in found, wanted == state, wanted)

    def test_running_keys_are_listed_if_the_lease_store_does_not_answer(self) -> None:
        """The page says that it does not know which of them are abandoned."""
        self.login()
        with connection.cursor() as cursor:
            cursor.execute("UPDATE celery_leases_records SET state = 'running'")
        gone = mock.patch.object(admin_records, "held", side_effect=StoreUnavailable("away", None))
        with gone:
            for query in ("", "?state=running", "?state=abandoned"):
                text = self.client.get(f"{RECORDS}{query}").content.decode()
                self.assertIn("It is not known which running keys are abandoned: away", text)
                self.assertIn(">refund:2</a>", text)

    def test_a_page_leads_to_the_next_one(self) -> None:
        """As long as there is one."""
        self.login()
        from celery_leases.django.admin_records import LeaseRecordAdmin

        before, LeaseRecordAdmin.list_per_page = LeaseRecordAdmin.list_per_page, 1
        try:
            first = self.client.get(RECORDS).content.decode()
            second = self.client.get(f"{RECORDS}?p=2").content.decode()
        finally:
            LeaseRecordAdmin.list_per_page = before
        self.assertIn('href="?p=2" rel="next"', first)
        self.assertNotIn('rel="previous"', first)
        self.assertIn('rel="prev"', second)
        self.assertNotIn('rel="next"', second)

    def test_the_page_of_a_record_shows_what_happened(self) -> None:
        """Its state, its attempts, its error; and no button for what the user may not do."""
        self.login("retry_leaserecord")
        text = self.client.get(page_of(self.failed)).content.decode()
        for said in (
            "Failed for good",
            "order 2 was not charged",
            "Attempts",
            "It is not retried until",
        ):
            self.assertIn(said, text)
        self.assertIn('value="retry"', text)
        self.assertNotIn('value="forget"', text)
        self.assertIn("Done", self.client.get(page_of(self.done)).content.decode())

    def test_pages_have_nothing_that_a_content_security_policy_refuses(self) -> None:
        """No script, style or handler stands in them."""
        self.login("retry_leaserecord", "operate_leasegroup")
        asked = self.client.post(RECORDS, {"action": "retry", "_selected_action": [self.failed.pk]})
        closing = self.client.post(GROUPS, {"action": "close", "group": "openai"})
        for response in (
            self.client.get(RECORDS),
            self.client.get(page_of(self.failed)),
            asked,
            closing,
        ):
            self.assertEqual(response.status_code, 200)
            refused = re.findall(REFUSED, response.content.decode())
            self.assertEqual(refused, [])

    def test_a_retry_is_asked_counted_done_and_noted(self) -> None:
        """Nothing happens before the answer."""
        self.login("retry_leaserecord")
        self.assertIn("Yes, retry", self.post("retry", self.failed))
        self.failed.refresh_from_db()
        self.assertEqual(self.failed.state, "failed")
        self.assertIn("No message of these keys is stored", self.post("retry", self.failed))
        done = self.confirmed("retry", self.failed, publish="yes")
        self.assertIn("Retry: 1 key.", done)
        self.assertIn("1 key: no message was published: call the task again", done)
        self.assertIn("orders.tasks.refund.delay(…)", done)
        self.failed.refresh_from_db()
        self.assertEqual(self.failed.state, "pending")
        entry = LogEntry.objects.get()
        self.assertEqual((entry.object_id, entry.object_repr), (self.failed.pk, "refund:2"))
        self.assertIn("Retry", entry.get_change_message())

    def test_an_action_that_fails_for_one_key_is_reported_and_done_for_the_others(self) -> None:
        """A key that is done is not retried."""
        self.login("retry_leaserecord")
        text = self.confirmed("retry", self.failed, self.done)
        self.assertIn("Retry: 1 key.", text)
        self.assertIn("charge:1 is done, there is nothing to retry", text)
        self.assertEqual(LogEntry.objects.count(), 1)

    def test_a_key_that_changes_before_the_confirmation_stays_unchanged(self) -> None:
        """Another operator was faster."""
        self.login("forget_leaserecord")
        asked = self.post("forget", self.failed)
        seen = re.findall(r'name="seen" value="([^"]+)"', asked)
        LeaseClient.from_app(app, eager=False).retry("refund:2", task=refund.name)
        text = self.post("forget", self.failed, confirmed="yes", seen=seen)
        self.assertIn("refund:2 has changed meanwhile", text)
        self.assertFalse(LogEntry.objects.exists())

    def test_a_key_that_has_changed_since_its_page_was_shown_needs_no_confirmation(self) -> None:
        """Its own page and the list send the version that they showed."""
        actions = ("retry", "release", "forget", "resolve")
        self.login(*(f"{name}_leaserecord" for name in actions))
        shown = [self.client.get(url).content.decode() for url in (page_of(self.failed), RECORDS)]
        own, listed = [re.findall(r'name="seen" value="([^"]+)"', page) for page in shown]
        self.assertEqual((len(own), len(listed)), (1, 2))
        for seen in (own, listed):
            self.assertIn("Yes, forget", self.post("forget", self.failed, seen=seen))
        LeaseClient.from_app(app, eager=False).retry("refund:2", task=refund.name)
        for seen in (own, listed):
            for what in ("retry", "release", "forget", "resolve_done", "resolve_retry"):
                text = self.post(what, self.failed, seen=seen)
                self.assertIn("refund:2 has changed meanwhile", text)
                self.assertNotIn("Yes, ", text)

    def test_a_second_answer_is_about_what_the_first_page_showed(self) -> None:
        """A result that was no JSON is asked for again, but not of a key that has changed."""
        self.login("resolve_leaserecord")
        seen = re.findall(r'name="seen" value="([^"]+)"', self.post("resolve_done", self.failed))
        LeaseClient.from_app(app, eager=False).retry("refund:2", task=refund.name)
        answer = {"confirmed": "yes", "seen": seen, "result": "{"}
        self.assertIn("has changed meanwhile", self.post("resolve_done", self.failed, **answer))
        self.failed.refresh_from_db()
        self.assertEqual(self.failed.state, "pending")

    def test_a_key_that_changes_just_before_it_is_resolved_is_left_alone(self) -> None:
        """Between the last look and the write."""
        self.login("resolve_leaserecord")
        look, came = LeaseClient._changeable, []

        def looked(client: LeaseClient, *asked: Any, **more: Any) -> Any:
            if not came:
                came.append(True)
                client.retry("refund:2", task=refund.name)
            return look(client, *asked, **more)

        for what in ("resolve_done", "resolve_retry"):
            came.clear()
            with mock.patch.object(LeaseClient, "_changeable", looked):
                text = self.confirmed(what, self.failed)
            self.assertIn("refund:2 has changed meanwhile", text)
            self.failed.refresh_from_db()
            self.assertEqual((came, self.failed.state), ([True], "pending"))
            self.assertFalse(LogEntry.objects.exists())
            with on_the_database():
                refund.apply((2,))
            self.failed.refresh_from_db()

    def test_forget_makes_a_key_as_good_as_new(self) -> None:
        """It is not in the list any more."""
        self.login("forget_leaserecord")
        self.assertIn("Forget: 2 keys.", self.confirmed("forget", self.failed, self.done))
        self.assertEqual(charge.lease_status(1).state, "absent")
        self.assertNotIn(">charge:1</a>", self.client.get(RECORDS).content.decode())

    def test_resolve_writes_the_result(self) -> None:
        """If it is not JSON, the page asks for it again."""
        self.login("resolve_leaserecord")
        self.assertIn(
            "The result is not JSON", self.confirmed("resolve_done", self.failed, result="{")
        )
        self.assertIn(
            "Resolve: the work is done: 1 key.",
            self.confirmed("resolve_done", self.failed, result='{"a": 1}'),
        )
        self.assertEqual(refund.lease_status(2).result, {"a": 1})

    def test_actions_need_a_post_and_a_permission(self) -> None:
        """Cross-site requests are refused, and pages need the permission to view."""
        self.login("view_leaserecord")
        selected = {"action": "retry", "_selected_action": self.failed.pk, "confirmed": "yes"}
        for what in ("retry", "release", "forget", "resolve_done", "resolve_retry"):
            self.assertEqual(
                self.client.post(RECORDS, {**selected, "action": what}).status_code, 403
            )
        self.assertEqual(
            self.client.post(GROUPS, {"action": "open", "group": "g"}).status_code, 403
        )
        self.login("retry_leaserecord", "operate_leasegroup")
        self.client.get(RECORDS, selected)
        self.client.get(GROUPS, {"action": "close", "group": "g", "confirmed": "yes"})
        self.client.handler.enforce_csrf_checks = True
        self.assertEqual(self.client.post(RECORDS, selected).status_code, 403)
        self.assertEqual(
            self.client.post(GROUPS, {"action": "open", "group": "g"}).status_code, 403
        )
        self.failed.refresh_from_db()
        self.assertEqual(self.failed.state, "failed")
        self.assertFalse(LeaseClient.from_app(app, eager=False).groups())
        stranger = User.objects.create_user("stranger", password="secret", is_staff=True)
        self.client.force_login(stranger)
        for url in (RECORDS, GROUPS, page_of(self.failed)):
            self.assertEqual(self.client.get(url).status_code, 403, url)

    def test_rows_are_not_added_edited_or_deleted(self) -> None:
        """Not even by a superuser."""
        self.client.force_login(User.objects.create_superuser("root", password="secret"))
        self.assertEqual(self.client.get(f"{RECORDS}add/").status_code, 403)
        self.assertEqual(self.client.post(page_of(self.failed), {"state": "done"}).status_code, 403)
        self.assertEqual(
            self.client.post(f"{page_of(self.failed)[: -len('change/')]}delete/").status_code, 403
        )
        self.assertNotIn("delete_selected", self.client.get(RECORDS).content.decode())

    def test_groups_are_closed_and_opened(self) -> None:
        """Each with a page that asks, and an entry in the log."""
        self.login("operate_leasegroup")
        self.assertIn("All groups are open", self.client.get(GROUPS).content.decode())
        closing = {
            "action": "close",
            "group": "openai:gpt",
            "span": "15m",
            "why": "the contract is renewed",
        }
        self.assertIn("Close: 1 group?", self.client.post(GROUPS, closing).content.decode())
        self.assertFalse(LeaseClient.from_app(app, eager=False).groups())
        text = self.client.post(
            GROUPS, {**closing, "confirmed": "yes"}, follow=True
        ).content.decode()
        self.assertIn("closed for 15 minutes", text)
        self.assertIn("the contract is renewed", text)
        wrong = self.client.post(
            GROUPS, {**closing, "span": "soon", "confirmed": "yes"}
        ).content.decode()
        self.assertIn("soon", wrong)
        self.client.post(GROUPS, {"action": "open", "group": "openai:gpt", "confirmed": "yes"})
        self.assertFalse(LeaseClient.from_app(app, eager=False).groups())
        self.assertEqual([entry.object_id for entry in LogEntry.objects.all()], ["openai:gpt"] * 2)
