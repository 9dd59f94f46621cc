"""Views that start the work of a key and show its status."""

from unittest import mock

from django.test import TestCase

from celery_leases import LeasedTask
from celery_leases.django.web import submit
from orders.models import Order
from orders.tasks import charge, index
from orders.tests import Eager

TASK = "orders.tasks.charge"
SHOP = {"Authorization": "shop"}


class SubmitTests(Eager, TestCase):
    """A double click, a transaction, an error."""

    def test_a_repeated_request_gets_the_result(self) -> None:
        """The first one is told that its call is queued, and where to look."""
        Order.objects.create(number=901)
        with self.captureOnCommitCallbacks(execute=True):
            first = self.client.post("/orders/901")
        self.assertEqual((first.status_code, first.json()["message"]), (202, "Queued"))
        self.assertEqual(first["Location"], f"/leases/charge:901?task={TASK}")
        self.assertEqual(first["Retry-After"], "2")
        shown = self.client.get(first["Location"], headers=SHOP)
        self.assertEqual((shown.status_code, shown.json()["state"]), (200, "done"))
        again = self.client.post("/orders/901")
        self.assertEqual((again.status_code, again.json()["result"]["order"]), (200, 901))
        self.assertEqual(Order.objects.get(number=901).charges, 1)

    def test_eight_clicks_on_a_running_key_publish_one_message(self) -> None:
        """The others are told that it runs."""
        clicks, published = [], []

        def click(*given: object, **_: object) -> object:
            published.append(given)
            while len(clicks) < 8:
                clicks.append(self.client.post("/orders/902").json()["message"])
            return Order.objects.none()

        with (
            mock.patch.object(Order.objects, "filter", side_effect=click),
            self.captureOnCommitCallbacks(execute=True),
        ):
            self.client.post("/orders/902")
        self.assertEqual((len(published), clicks), (1, ["Running (attempt 1)"] * 8))

    def test_a_call_is_published_after_the_commit(self) -> None:
        """And not at all after a rollback, or if nothing was committed."""
        for query in ("", "?session"):
            with mock.patch.object(LeasedTask, "apply_async") as published:
                sent = self.client.post(f"/atomic/903{query}")
                self.assertEqual(sent.status_code, 202)
                published.assert_not_called()
            Order.objects.all().delete()
        for query in ("?fail", "?fail&session"):
            with self.captureOnCommitCallbacks(execute=True) as callbacks:
                self.client.post(f"/atomic/904{query}")
            self.assertEqual(callbacks, [])
            self.assertEqual(charge.lease_status(904).state, "absent")
        with self.captureOnCommitCallbacks(execute=True):
            self.client.post("/atomic/905")
        self.assertEqual(Order.objects.get(number=905).charges, 1)

    def test_the_status_is_that_of_the_call(self) -> None:
        """If calls of the key replace each other."""
        with self.captureOnCommitCallbacks(execute=True):
            where = submit(index, (906,))["Location"]
        self.assertEqual(self.client.get(where, headers=SHOP).json()["result"], 906)
        other = self.client.get(f"{where}-another", headers=SHOP).json()
        self.assertEqual((other["state"], other["result"]), ("pending", None))

    def test_an_error_is_a_problem(self) -> None:
        """Whatever raised it."""
        refused = self.client.post("/keyed")
        self.assertEqual(refused.status_code, 400)
        self.assertEqual(refused["Content-Type"], "application/problem+json")
        with (
            mock.patch.object(LeasedTask, "lease_status", side_effect=unavailable),
            self.assertLogs("celery_leases", "ERROR"),
        ):
            sent = self.client.post("/orders/901")
        self.assertEqual((sent.status_code, sent.json()["code"]), (503, "unavailable"))
        self.assertNotIn("secret", sent.content.decode())


class StatusTests(Eager, TestCase):
    """Who may see what."""

    def test_the_authoriser_decides_whether_the_key_exists_or_not(self) -> None:
        """It is a coroutine here, which must not be taken for a permission."""
        charge.delay(906)
        for key in ("charge:906", "charge:907"):
            self.assertEqual(self.client.get(f"/leases/{key}").status_code, 403)
            self.assertEqual(self.client.get(f"/leases/{key}", headers=SHOP).status_code, 200)

    def test_only_get_is_answered(self) -> None:
        """A status changes nothing."""
        self.assertEqual(self.client.post("/leases/charge:1", headers=SHOP).status_code, 405)

    def test_a_stored_key_is_unknown(self) -> None:
        """It would be another key than the one that was authorised."""
        for key in (f"t:{TASK}|charge:1", f"/billing/1?task={TASK}"):
            self.assertEqual(self.client.get(f"/leases/{key}", headers=SHOP).status_code, 404)


def unavailable(*_: object) -> None:
    """The lease store does not answer."""
    from celery_leases.errors import StoreUnavailable

    raise StoreUnavailable("secret host does not answer", False)
