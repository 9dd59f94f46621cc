"""How long the holder of a lease may rely on it, by its own clock. Pure.

All times are seconds of one local clock that never steps. A lease counts from the time at which its
request was *sent*, because the store starts to count later. (etcd and client-go count from the
reply, and so rely on a lease for too long.) A margin is subtracted for clocks that run at different
rates.
"""

from __future__ import annotations

import math

RATE_MARGIN = 0.01
FIXED_MARGIN = 0.002
RENEWALS_PER_TTL = 3
SHORTEST_LOCK_TRUST = 1.0
"""Seconds for which a row lock counts after it was seen, at least."""

LONGEST_LOCK_TRUST_AFTERWARDS = 5.0
"""Seconds for which a row lock counts once its transaction is over, at most."""

LONGEST_CONNECTION_TIMEOUT = 10.0
"""Seconds to wait for a free connection, at most."""


def hard_deadline(sent: float, ttl: float) -> float:
    """When the lease must be considered lost: the send time plus *ttl*, less 1 % and 2 ms."""
    return sent + ttl - (ttl * RATE_MARGIN + FIXED_MARGIN)


def ttl_until(hard: float, now: float) -> float:
    """The ttl to request at *now* so that the lease counts until *hard*."""
    return (hard - now + FIXED_MARGIN) / (1 - RATE_MARGIN)


def stop_deadline(hard: float, ttl: float) -> float:
    """When the body must stop, so that it has ended by *hard*: a sixth of the ttl earlier, at most
    5 s.
    """
    return hard - min(ttl / 6, 5.0)


def renewal_due(sent: float, ttl: float) -> float:
    """When to renew next, after a successful renewal that was sent at *sent*."""
    return sent + ttl / RENEWALS_PER_TTL


def renewal_batch_window(ttl: float) -> float:
    """How many seconds before it is due a lease is renewed together with another that is due now.

    In this way leases that began at different times are soon renewed by the same calls.
    """
    return ttl / 30


def renewal_retry(now: float, ttl: float) -> float:
    """When to renew again after a renewal failed at *now*: sooner than after a successful one."""
    return now + min(ttl / 12, 1.0)


def call_timeout(ttl: float) -> float:
    """Seconds that one call of the renewer to the lease store may take."""
    return min(ttl / 10, 2.0)


def connection_timeout(ttl: float, remaining: float | None = None) -> float:
    """Seconds that a call may wait for a free connection of the pool.

    Under a lease: half of the *remaining* time until the body must stop, which leaves time to use
    the connection, but at least :func:`call_timeout`. Before the lease is acquired: a third of its
    *ttl*.
    """
    allowed = ttl / RENEWALS_PER_TTL if remaining is None else max(remaining / 2, call_timeout(ttl))
    return min(allowed, LONGEST_CONNECTION_TIMEOUT)


def begin_by(received_at: float, hard: float | None, soft: float | None) -> float:
    """When the body of a delivery must have begun at the latest, by its time limits in seconds:
    at half of the lower one. Later it is rescheduled, and so gets its whole time again.
    """
    limit = min(hard or math.inf, soft or math.inf)
    return received_at + limit / 2


def lock_counts_for(ttl: float, *, still: bool = True) -> float:
    """Seconds for which a lock that the body's own transaction holds on the row counts as a
    renewal, after the lock was seen.

    *still*: the transaction is not known to be over. Once it is over the lock is gone, and the next
    renewal shows the state of the row.
    """
    trusted = max(ttl / RENEWALS_PER_TTL, SHORTEST_LOCK_TRUST)
    return trusted if still else min(trusted, LONGEST_LOCK_TRUST_AFTERWARDS)
