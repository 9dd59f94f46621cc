"""A payment provider in its own process: ``python -m tests.apps.provider LEDGER`` on 127.0.0.1.

``POST /charges`` with ``{"customer": …, "pid": …}`` and an ``Idempotency-Key`` charges the customer
and replies with the charge; ``GET /charges?key=…`` finds the last charge under a key, or answers
404. Each request and each charge is a line of the ledger. It is written with one ``os.write``, so
the ledger is complete whichever process dies.

``PUT /scripts/<customer>`` with ``{"dedupe": true, "steps": […]}`` sets the behaviour for one
customer: whether a key is charged only once (a repeated request gets the same reply), and what the
next requests do. After the last step, and without a script, it charges and replies at once. A step
may have

* ``status`` and ``headers``: reply with these, without a charge, or with ``charged`` after one,
* ``slow``: seconds between charge and reply; ``hold``: a file that must appear before the reply is
  sent,
* ``never``: charge, and send nothing until the client has gone,
* ``drop``: charge, and close the connection,
* ``kill``: charge, and SIGKILL the process that sent the request.

With ``PROVIDER_DEDUPE=1`` it dedupes unless a script says otherwise.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PATIENCE = 60.0


class Books:
    """All charges, and the scripts of the customers."""

    def __init__(self, ledger: str) -> None:
        self._fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._lock = threading.Lock()
        self._number = 0
        self._charges: dict[str, dict[str, Any]] = {}
        self._commands: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def note(self, what: str, **more: Any) -> None:
        os.write(
            self._fd, (json.dumps({"what": what, "t": time.monotonic()} | more) + "\n").encode()
        )

    def instruct(self, customer: str, script: dict[str, Any]) -> None:
        with self._lock:
            self._commands[customer] = script

    def next_step(self, customer: str) -> dict[str, Any]:
        with self._lock:
            steps = self._commands[customer].get("steps") or [{}]
            return dict(steps.pop(0)) if steps else {}

    def charge(self, customer: str, key: str) -> dict[str, Any]:
        """Charge unless the key is deduped and was charged before; returns the reply."""
        with self._lock:
            dedupe = self._commands[customer].get(
                "dedupe", os.environ.get("PROVIDER_DEDUPE") == "1"
            )
            if dedupe and key in self._charges:
                self.note("deduped", customer=customer, key=key, id=self._charges[key]["id"])
                return self._charges[key]
            self._number += 1
            reply = {"id": f"ch_{self._number}", "customer": customer, "key": key}
            self.note("charged", customer=customer, key=key, id=reply["id"])
            self._charges[key] = reply
            return reply

    def find(self, key: str) -> dict[str, Any] | None:
        with self._lock:
            found = self._charges.get(key)
            self.note("looked", key=key, found=found["id"] if found else None)
            return found


class Handler(BaseHTTPRequestHandler):
    """One request."""

    books: Books

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        customer, key = asked["customer"], self.headers["Idempotency-Key"]
        self.books.note("asked", customer=customer, key=key, pid=asked["pid"])
        step = self.books.next_step(customer)
        status = step.get("status", 200)
        reply = (
            self.books.charge(customer, key)
            if status == 200 or step.get("charged")
            else {"error": status}
        )
        if "kill" in step:
            os.kill(asked["pid"], signal.SIGKILL)
            return
        if "drop" in step or not self._waited(step):
            return
        try:
            self._answer(status, reply, step.get("headers") or {})
        except OSError:
            self.books.note("unheard", customer=customer, key=key)
        else:
            self.books.note("replied", customer=customer, key=key, status=status)

    def do_GET(self) -> None:
        (key,) = parse_qs(urlsplit(self.path).query)["key"]
        found = self.books.find(key)
        self._answer(200 if found else 404, found or {"error": 404})

    def do_PUT(self) -> None:
        script = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.books.instruct(unquote(self.path.rpartition("/")[2]), script)
        self._answer(200, {})

    def _waited(self, step: Mapping[str, Any]) -> bool:
        """Wait as the step says; returns whether to send a reply."""
        until = time.monotonic() + PATIENCE
        if "never" in step:
            select.select([self.connection], [], [], PATIENCE)  # readable once the client has gone
            return False
        while "hold" in step and not Path(step["hold"]).exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(step.get("slow", 0.0))
        return True

    def _answer(
        self, status: int, reply: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """Accepts as many clients at once as there are workers."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Ignore errors: clients are killed on purpose."""


if __name__ == "__main__":
    Handler.books = Books(sys.argv[1])
    server = Server(("127.0.0.1", 0), Handler)
    print(f"listening on {server.server_port}", flush=True)
    server.serve_forever()
