"""Tasks that charge customers through the payment provider of :mod:`tests.apps.provider`.

PROVIDER is its URL; VERIFY_AFTER and LATER are how old an intent must be before it is looked up, in
seconds. If FAILPOINTS is a directory, a process dies at the steps that are armed there: ``before
intent``, ``after intent``, ``after reply`` (before it is recorded), ``after noting``, ``before
complete``, ``after complete`` (before the commit), ``after commit`` and ``before release``. During
the call itself the provider kills the process.
"""

import json
import os
import time
from dataclasses import replace
from http.client import HTTPConnection
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.pool import NullPool

from celery_leases import (
    Failures,
    LeasedTask,
    RetryLater,
    Snooze,
    Uncertain,
    current_lease,
    results,
)
from celery_leases.attempt import run
from celery_leases.rules import CooldownPolicy, Rules
from celery_leases.stores.sql.effects import SqlEffectStore
from tests.apps.failpoints import reach_for
from tests.apps.leased import app, note, wait_for
from tests.integration.rate_limited_server import Answered

__all__ = ["app"]

URL = make_url(os.environ.get("LEASES_DATABASE_URL", "sqlite://"))
VERIFY_AFTER = float(os.environ.get("VERIFY_AFTER", "0.5"))
STEPS = ("before intent", "after intent", "after reply", "after noting")
STEPS += ("before complete", "after complete", "after commit", "before release")


NOBODY = "http://127.0.0.1:1"


def request(method, path, body=None, headers=None, timeout=30.0, url=None):
    """Send one request to the provider; returns status, headers and reply."""
    connection = HTTPConnection(urlsplit(url or os.environ["PROVIDER"]).netloc, timeout=timeout)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def charged(customer, key, timeout=30.0, url=None):
    """Charge *customer* and return the reply; raises as client libraries do."""
    body = json.dumps({"customer": customer, "pid": os.getpid()})
    status, headers, reply = request(
        "POST", "/charges", body, {"Idempotency-Key": key}, timeout, url
    )
    if status != 200:
        raise Answered(status, {name.lower(): value for name, value in headers.items()})
    return json.loads(reply)


def looked_up(key):
    """The charge under *key*, or ``None``."""
    status, _, reply = request("GET", f"/charges?key={key}")
    return json.loads(reply) if status == 200 else None


def unsure(key):
    """Look it up without a definite answer."""
    looked_up(key)
    raise Uncertain("the provider has lost its memory")


def id_of(reply):
    """The reference of a charge."""
    return reply["id"]


WAYS: dict[str, Any] = {
    "dedupe": {"uncertain": "rerun"},
    "verify": {"verify": looked_up, "verify_after": VERIFY_AFTER},
    "later": {"verify": looked_up, "verify_after": float(os.environ.get("LATER", "3"))},
    "unsure": {"verify": unsure, "verify_after": 0.0},
    "stop": {},
}


_engine = create_engine(URL, poolclass=NullPool)
if URL.get_backend_name() == "sqlite":
    event.listen(
        _engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None)
    )
    event.listen(_engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))

INVOICE = text("INSERT INTO invoices (name, reference, fence) VALUES (:name, :reference, :fence)")


def reply_of(customer, key, pause=0.0):
    """Charge, and die between the reply and its record if a test has armed that."""
    time.sleep(pause)
    reply = charged(customer, key)
    time.sleep(pause)
    reach_for("after reply", customer)
    return reply


@app.task(
    base=LeasedTask, bind=True, lease_key="invoice:{name}", lease_failures=Failures(crashes=50)
)
def invoice(self, name, way, pause=0.0, gate=None):
    """Charge once and write one invoice; pauses *pause* seconds around each step."""
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if gate:
        wait_for(gate)
    time.sleep(pause)
    reach_for("before intent", name)
    try:
        charge = self.lease.effect(
            "charge", lambda key: reply_of(name, key, pause), reference=id_of, **WAYS[way]
        )
    except BaseException as error:
        note("raised", name=name, error=type(error).__name__)
        raise
    note("charge", name=name, reference=charge.reference, saved=charge.saved)
    time.sleep(pause)
    with _engine.begin() as connection:
        connection.execute(
            INVOICE, {"name": name, "reference": charge.reference, "fence": self.lease.fence}
        )
        reach_for("before complete", name)
        result = self.lease.complete({"charge": charge.reference}, connection)
        reach_for("after complete", name)
        time.sleep(pause)
    reach_for("after commit", name)
    time.sleep(pause)
    note("end", name=name)
    return result


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="flagged:{name}",
    lease_on_lost="flag",
    lease_failures=Failures(crashes=50),
)
def flagged(self, name, way, gate=None):
    """Charge, without being interrupted when the lease is lost."""
    return _charge(self, name, way, gate)


@app.task(
    base=LeasedTask, bind=True, lease_key="interrupted:{name}", lease_failures=Failures(crashes=50)
)
def interrupted(self, name, way, gate=None):
    """Charge, and be interrupted when the lease is lost."""
    return _charge(self, name, way, gate)


def _charge(self, name, way, gate):
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    if gate:
        wait_for(gate)
    try:
        charge = self.lease.effect(
            "charge", lambda key: charged(name, key), reference=id_of, **WAYS[way]
        )
    except BaseException as error:
        note("raised", name=name, error=type(error).__name__)
        raise
    note("charge", name=name, reference=charge.reference, saved=charge.saved)
    return {"charge": charge.reference, "saved": charge.saved}


def _soon(seconds):
    return CooldownPolicy(seconds, jitter=0)


def _run_number(name):
    journal = Path(os.environ["JOURNAL"])
    lines = map(json.loads, journal.read_text().splitlines()) if journal.exists() else ()
    return sum(line["what"] == "begin" and line.get("name") == name for line in lines)


def _retry(self, seconds):
    raise self.retry(countdown=seconds)


def _snooze(_, seconds):
    raise Snooze(seconds)


def _later(_, seconds):
    raise RetryLater(seconds)


def _fail(_, *words):
    raise ValueError(*words)


def _die(*_):
    os.kill(os.getpid(), 9)


def _wait(_, gate):
    wait_for(gate)


AFTER: dict[str, Any] = {
    "ok": lambda _: None,
    "retry": _retry,
    "snooze": _snooze,
    "later": _later,
    "fail": _fail,
    "die": _die,
}
AFTER |= {"wait": _wait}
REPLIES = {
    "reply": lambda reply: reply,
    "object": lambda _: object(),
    "large": lambda _: "x" * 5000,
    "id": id_of,
}


REFERENCES: dict[str, Any] = {
    "id": id_of,
    "none": None,
    "fixed": lambda _: "fixed",
    "raises": itemgetter("no such thing"),
}


def _pay(
    self,
    name,
    after=(),
    *,
    way="stop",
    reply="reply",
    reference="id",
    timeout=30.0,
    names=("charge",),
    away=(),
):
    """Charge under each of *names*; run n does step n of *after*, and is refused if in *away*."""
    run = _run_number(name)
    url = NOBODY if run in away else None
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    charges = []
    for effect in names:
        charge = self.lease.effect(
            effect,
            lambda key: REPLIES[reply](charged(name, key, timeout, url)),
            reference=REFERENCES[reference],
            **WAYS[way],
        )
        note(
            "charge",
            name=name,
            effect=effect,
            reference=charge.reference,
            saved=charge.saved,
            value=charge.value,
        )
        charges.append(charge.reference)
    word, *arguments = after[run] if run < len(after) else ["ok"]
    AFTER[word](self, *arguments)
    return {"charges": charges}


# The default rules, with shorter times.
RULES = (
    Rules.default()
    .on(exc="builtins.TimeoutError", to="200ms")
    .on(exc="ConnectionRefusedError", to="200ms")
)
RULES = RULES.on(status=500, to="200ms")
vars(results)["RESULT_MAX"] = 1000
# With "always" the next attempt finds the charge of the previous one.
FAILURES = Failures(RULES, cooldown=_soon(0.3), resume="always")
PAYS = {"base": LeasedTask, "bind": True, "lease_failures": FAILURES}


@app.task(**PAYS, lease_key="pay:{name}", max_retries=5)
def pay(self, name, *args, **kwargs):
    """See :func:`_pay`."""
    return _pay(self, name, *args, **kwargs)


@app.task(**PAYS, lease_key="pays:{name}", lease_runs="each")
def pays(self, name, *args, **kwargs):
    """See :func:`_pay`; each call runs."""
    return _pay(self, name, *args, **kwargs)


@app.task(
    **PAYS
    | {
        "lease_failures": replace(FAILURES, cooldown=_soon(3), resume="never"),
        "lease_key": "stops:{name}",
    }
)
def stops(self, name, *args, **kwargs):
    """See :func:`_pay`; the caller gets the failure."""
    return _pay(self, name, *args, **kwargs)


if "FAILPOINTS" in os.environ:
    _begin, _finish = SqlEffectStore.begin, SqlEffectStore.finish
    _release = run.Execution._release

    def _begin_and_die(self, record, *args, **kwargs):
        begun = _begin(self, record, *args, **kwargs)
        reach_for("after intent", record.key.partition(":")[2])
        return begun

    def _finish_and_die(self, *args, **kwargs):
        noted = _finish(self, *args, **kwargs)
        reach_for("after noting", current_lease.key.partition(":")[2])
        return noted

    def _release_and_die(self, *args, **kwargs):
        reach_for("before release", self.call.key.key.partition(":")[2])
        _release(self, *args, **kwargs)

    SqlEffectStore.begin = _begin_and_die
    SqlEffectStore.finish = _finish_and_die
    run.Execution._release = _release_and_die
