"""Until when a lease may be believed by the clock of the one who holds it.

All times are seconds of one local, never stepping clock. A lease is counted from the moment its
request was *sent*, as the store counts from a later one (etcd and client-go count from the reply,
and so believe too long), and loses a margin for clocks that run at different rates.
"""

from __future__ import annotations

RATE_MARGIN = 0.01
FIXED_MARGIN = 0.002
RENEWALS_PER_TTL = 3
BELIEVED_AT_LEAST = 1.0
"""Seconds for which a row's lock, once seen, is believed at least, however short the ttl is."""

LOOKS_PER_TTL = 10
AWAITED_AT_MOST = 2.0


def hard_deadline(sent: float, ttl: float) -> float:
    """When the lease must be taken for gone: the send time plus *ttl*, less 1 % and 2 ms."""
    return sent + ttl - (ttl * RATE_MARGIN + FIXED_MARGIN)


def stop_deadline(hard: float, ttl: float) -> float:
    """When the body must stop, so that it has ended by *hard*: a sixth of the ttl earlier, at most 5 s."""
    return hard - min(ttl / 6, 5.0)


def renewal_due(sent: float, ttl: float) -> float:
    """When to renew next after a success sent at *sent*."""
    return sent + ttl / RENEWALS_PER_TTL


def renewal_retry(now: float, ttl: float) -> float:
    """When to try again after a renewal failed at *now*: much sooner than the next regular one."""
    return now + min(ttl / 12, 1.0)


def call_timeout(ttl: float) -> float:
    """How long one call of the renewer to the lease store may take, in seconds."""
    return min(ttl / 10, 2.0)


def lock_believed(ttl: float) -> float:
    """For how long, once seen, a lock on the row by the body's own transaction stands for a renewal, in seconds."""
    return max(ttl / RENEWALS_PER_TTL, BELIEVED_AT_LEAST)


def lock_looked_at(ttl: float) -> float:
    """How soon to look again whether the row is still locked, in seconds."""
    return min(max(ttl / LOOKS_PER_TTL, 0.2), 1.0)


def answer_awaited(ttl: float) -> float:
    """For how long a lease in doubt is not given up, as the store is being asked, in seconds."""
    return min(ttl / RENEWALS_PER_TTL, AWAITED_AT_MOST)
