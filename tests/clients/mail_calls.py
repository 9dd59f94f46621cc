"""Mail by smtplib."""

from typing import Any
from urllib.parse import urlsplit

from tests.clients.expectations import (
    ERROR,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    REFUSED,
    UNAUTHORIZED,
    UNREACHABLE,
    cases,
)
from tests.clients.other_servers import mail_server
from tests.clients.servers import name_servers_away, never_speaks, patience, refuses


def smtplib(url: str) -> Any:
    """One mail to one recipient, after a login."""
    import smtplib as library

    where = urlsplit(url)
    with library.SMTP(
        where.hostname or "", where.port or 25, timeout=patience(), local_hostname="here"
    ) as client:
        client.login("somebody", "made-up")
        return client.sendmail(
            "us@example.com", "them@example.com", "Subject: Hello\r\n\r\nHello\r\n"
        )


SMTPLIB = cases(
    "smtplib",
    smtplib,
    {
        "421, at once": (mail_server(CONNECT="421 too many connections"), RATE_LIMITED),
        "421, later": (mail_server(MAIL="421 too many messages"), RATE_LIMITED),
        "421, to the recipient": (mail_server(RCPT="421 too many messages"), RATE_LIMITED),
        "535": (mail_server(AUTH="535 authentication failed"), UNAUTHORIZED),
        "550, sender": (mail_server(MAIL="550 not you"), REFUSED),
        "550, recipient": (mail_server(RCPT="550 no such user"), REFUSED),
        "554, content": (mail_server(DATA="554 spam"), REFUSED),
        "450, greylisted": (mail_server(RCPT="450 come again"), ERROR.of("SMTPRecipientsRefused")),
        "452, full": (mail_server(DATA="452 no space left"), ERROR.of("SMTPDataError")),
        "disconnects": (mail_server(MAIL=None), OUTCOME_UNKNOWN),
        "disconnects after the content": (mail_server(CONTENT=None), OUTCOME_UNKNOWN),
        "disconnects at once": (mail_server(CONNECT=None), OUTCOME_UNKNOWN),
        "does not answer": (never_speaks, OUTCOME_UNKNOWN),
        "refuses the connection": (refuses, UNREACHABLE),
        "name servers away": (name_servers_away, UNREACHABLE),
    },
)
