"""Log lines that ask for attention: each ends with a stable code, and each code has an advice."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

NOTICES: Final[Mapping[str, str]] = {
    # calls and their messages
    "did-not-begin": "give the process memory, file descriptors or threads; the delivery is not lost",
    "delivery-returned": "look at the broker; it delivers the message again (docs/how-to/rabbitmq.md#delivery-limit)",
    "not-rescheduled": "look at the broker, which did not confirm the copy; it is tried again",
    "raised-and-resumes": "nothing at WARNING; at ERROR no rule knows the exception: mend it, or write a rule",
    "raised-after-retry": "mend the end of the body; the call goes on in the message that it has published",
    "header-ignored": "find out who publishes such messages; the call runs without that header",
    "order-of-own-clock": "look at the lease store; the newest call was determined by the publisher's clock",
    "errback-lost": "mend the errback or the broker, and do its work by hand",
    "mark-not-set": "nothing if it is rare: a superfluous copy of the call may be delivered",
    "mark-unreadable": "delete the Redis key, or find out which program writes it",
    "waiting-not-read": "report it: waiting calls begin at the end of their countdown only",
    # stored messages
    "no-relay": "run `leases relay` every minute, or let beat do it (docs/how-to/enqueue.md)",
    "not-published": "look at the broker; the next relay or rescue publishes the message",
    "not-rescuable": "pass arguments that JSON does not change; the call runs all the same",
    "revoke-not-stored": "look at the result backend; callers of that call wait in vain",
    "stored-message-unreadable": "run `leases forget` for the key, and call the task again",
    # records, effects and leases
    "outcome-not-written": "look at the records database; the outcome is tried for a minute",
    "outcome-shortened": "return a result that the database accepts; the state is written",
    "reply-not-stored": "return a reply that the database accepts, or pass reference=",
    "column-unreadable": "repair the column by hand; its value counts as empty",
    "key-not-released": "nothing: the key is free when its lease ends",
    "record-not-updated": "look at the records database; `leases show` says where the key stands",
    # workers and their surroundings
    "workers-not-registered": "give the broker's user the rights in docs/reference/stores.md#users-and-acls",
    "worker-not-renewed": "look at the broker; another worker may return this one's messages",
    "no-delayed-delivery": "give the broker's user the rights of Celery's delayed delivery",
    "metrics-not-counted": "install celery-leases[metrics], and name a directory that exists",
    "gauges-unreadable": "look at the records database",
    "receiver-raised": "mend the receiver of the signal; the task was not affected",
    "rule-function-wrong": "mend the function that was given to Rules.use",
    "not-classified": "report it with its traceback; the error counted as unknown",
    "request-failed": "look at the error: the client got an answer with a status from 500",
    # the board
    "wrong-password": "nothing if a person has mistyped; else look for who tries passwords",
    "host-refused": "give the public URL with --origin, or use a password file",
    "origin-refused": "name the origin that browsers see with --origin",
    "authoriser-failed": "mend the function that was given as the authoriser",
    "board-error": "look at the traceback; what was changed before it stays changed",
}
"""The codes, and what to do: docs/reference/warnings.md shows them with their texts."""


class NoticeLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines end with the ``code=`` that they are given, if any."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """The format of the line with its code, and what logging knows."""
        code = kwargs.pop("code", None)
        return (f"{msg} ({code})" if code is not None else msg), kwargs


logger: Final = NoticeLogger(logging.getLogger("celery_leases"))
