"""Django's admin in a real Chromium, under a content security policy.

``LEASES_PICTURES=docs/pictures`` takes the screenshot of docs/how-to/django.md again.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_django_project import PROJECT, SETTINGS, manage_with
from tests.support.browser import Browser
from tests.support.process import GuardedProcess

PREPARE = """
from django.contrib.auth.models import User
from django.core.management import call_command
from shop.celery import app
call_command("migrate", verbosity=0)
User.objects.create_superuser("ann", password="secret")
app.conf.task_always_eager = app.conf.leases_eager_stores = True
from orders.models import Order
from orders.tasks import charge, refund
for number in (1841, 1842, 1843):
    Order.objects.create(number=number)
    charge.apply((number,))
refund.apply((1842,))
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[GuardedProcess]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    settings = json.dumps({"MORE_APPS": ["django.contrib.staticfiles"]})
    manage_with(url, **{SETTINGS: settings})("shell", "-c", PREPARE)
    command = ["manage.py", "runserver", "--insecure", "--noreload", "127.0.0.1:0"]
    process = GuardedProcess(
        [sys.executable, "-u", *command],
        log=tmp_path / "site.log",
        cwd=PROJECT,
        env={**os.environ, "SHOP_DATABASE_URL": url, SETTINGS: settings},
    )
    yield process
    process.end()


def test_a_person_retries_a_failed_key(
    site: GuardedProcess, browser: Browser, tmp_path: Path
) -> None:
    address = site.wait_for_log(r"server at (http://127\.0\.0\.1:\d+/)", 60)[1]
    browser.open(f"{address}admin/celery_leases/leaserecord/")
    browser.write("#id_username", "ann")
    browser.write("#id_password", "secret")
    browser.click("input[type=submit]")
    browser.reads("charge:1843")
    browser.reads("By state")
    browser.driver.find_element("link text", "refund:1842").click()
    browser.reads("Failed for good")
    browser.reads("order 1842 was not charged")
    browser.picture(
        Path(os.environ.get("LEASES_PICTURES", tmp_path)) / "django-admin.png", 1200, 840
    )
    retry = 'button[name="action"][value="retry"]'
    browser.click(retry)
    browser.reads("Retry: 1 key.")
    browser.click(".submit-row input[type=submit]")
    browser.find(".messagelist .success")
    browser.open(f"{address}admin/celery_leases/leaserecord/?state=pending")
    browser.reads("refund:1842")
    assert browser.problems() == []
