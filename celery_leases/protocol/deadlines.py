"""Until when the holder of a lease may rely on it, by its own clock.

All times are seconds of one local clock that never steps. A lease counts from the time its request
was *sent*, because the store counts from a later time (etcd and client-go count from the reply, and
so rely on a lease for too long). A margin is subtracted for clocks that run at different rates.
"""

from __future__ import annotations

RATE_MARGIN = 0.01
FIXED_MARGIN = 0.002
RENEWALS_PER_TTL = 3
SHORTEST_LOCK_TRUST = 1.0
"""The least seconds for which a row's lock counts after it was seen, however short the ttl is."""

LONGEST_LOCK_TRUST_AFTERWARDS = 5.0
"""The most seconds for which it counts once its transaction is over, however long the ttl is."""

LONGEST_CONNECTION_TIMEOUT = 10.0
"""The most seconds to wait for a connection that others use, however long the lease lasts."""


def hard_deadline(sent: float, ttl: float) -> float:
    """When the lease must be considered lost: the send time plus *ttl*, less 1 % and 2 ms."""
    return sent + ttl - (ttl * RATE_MARGIN + FIXED_MARGIN)


def stop_deadline(hard: float, ttl: float) -> float:
    """When the body must stop, so that it has ended by *hard*: a sixth of the ttl earlier, at most
    5 s.
    """
    return hard - min(ttl / 6, 5.0)


def renewal_due(sent: float, ttl: float) -> float:
    """When to renew next after a success sent at *sent*."""
    return sent + ttl / RENEWALS_PER_TTL


def renewal_batch_window(ttl: float) -> float:
    """How many seconds before its time a lease is renewed together with one that is due now.

    So leases that began at different times are soon renewed by the same calls.
    """
    return ttl / 30


def renewal_retry(now: float, ttl: float) -> float:
    """When to try again after a renewal failed at *now*: much sooner than the next regular one."""
    return now + min(ttl / 12, 1.0)


def call_timeout(ttl: float) -> float:
    """How long one call of the renewer to the lease store may take, in seconds."""
    return min(ttl / 10, 2.0)


def connection_timeout(ttl: float, remaining: float | None = None) -> float:
    """How long a call may wait for a connection that others use, in seconds.

    Half of the *remaining* time until the body must stop, so that time is left to use the
    connection; but always as long as :func:`call_timeout`, which ends before the lease does.
    Without a lease yet, a third of its *ttl*.
    """
    allowed = ttl / RENEWALS_PER_TTL if remaining is None else max(remaining / 2, call_timeout(ttl))
    return min(allowed, LONGEST_CONNECTION_TIMEOUT)


def lock_counts_for(ttl: float, *, still: bool = True) -> float:
    """For how many seconds a lock on the row by the body's own transaction counts as a renewal
    after it was seen.

    *still*: whether that transaction is open, as far as known. A transaction that is over has no
    lock, and the next look shows the state of the row.
    """
    believed = max(ttl / RENEWALS_PER_TTL, SHORTEST_LOCK_TRUST)
    return believed if still else min(believed, LONGEST_LOCK_TRUST_AFTERWARDS)
