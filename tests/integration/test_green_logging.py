"""Log records of OS threads in a greenlet process, where logging uses locks of greenlets."""

import subprocess
import sys
import textwrap

import pytest

LINES = 1000

PROGRAM = """
    import sys, time
    {library}
    import logging
    from celery_leases.concurrency import os_threads
    from celery_leases.events import LeaseAcquired, LeaseRenewed
    from celery_leases.signals import Announcer, lease_renewed

    class Slow(logging.Handler):
        seen = {{"renewed": 0, "received": 0}}

        def emit(self, record):
            self.seen["renewed"] += "renewed" in record.getMessage()
            sum(range(3000))  # long enough to lose the interpreter in it

    logging.basicConfig(level=logging.DEBUG, handlers=[Slow()])
    of = dict(task="t", key="k", call_id="c")
    announcer = Announcer()
    announcer.observe(LeaseAcquired(**of, fence=1, attempt=1))

    @lease_renewed.connect(weak=False)
    def receive(**_):
        logging.getLogger("receiver").info("received")
        Slow.seen["received"] += 1

    def renew():
        for _ in range({lines}):
            announcer.observe(LeaseRenewed(**of, remaining=1.0))

    os_threads.start_thread(renew)
    while min(Slow.seen.values()) < {lines}:
        logging.getLogger("body").info("at work")
        time.sleep(0.001)
    print(Slow.seen)
"""

PATCHED = {
    "gevent": "import gevent.monkey; gevent.monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}


@pytest.mark.parametrize("library", PATCHED)
def test_a_log_line_of_a_renewing_thread_holds_up_no_greenlet(library: str) -> None:
    """A real thread inside a greenlet's lock would stop them all."""
    pytest.importorskip(library)
    program = textwrap.dedent(PROGRAM).format(library=PATCHED[library], lines=LINES)
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str({"renewed": LINES, "received": LINES}), done.stderr
