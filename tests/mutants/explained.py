"""Mutations that no test can notice, each with the reason: they change nothing that is promised."""

from __future__ import annotations

from typing import Final

_BY_REASON: Final[dict[str, tuple[str, ...]]] = {
    "it differs at one moment of the clock only, and the next look is soon": (
        (
            "attempt.held_lease HeldLease.interrupted_recently: self._clock.now() - self._interrupted_at"
            " < CLEANUP_TIME  ->  self._clock.now() - self._interrupted_at <= CLEANUP_TIME"
        ),
        (
            "attempt.held_lease HeldLease.needs_renewer: self._seen_locked > self._renewed"
            "  ->  self._seen_locked >= self._renewed"
        ),
        (
            "attempt.held_lease HeldLease.stop_deadline: self._seen_locked <= self._renewed"
            "  ->  self._seen_locked < self._renewed"
        ),
        "attempt.held_lease HeldLease.needs_row_lock: now >= self.own_stop  ->  now > self.own_stop",
        (
            "attempt.renewal Renewer._wait_for_renewal: self._clock.now() < until"
            "  ->  self._clock.now() <= until"
        ),
        "attempt.renewal Renewer.close: self._clock.now() < until  ->  self._clock.now() <= until",
        (
            "attempt.run Execution._acquired: process.clock.now() >= held_lease.own_stop"
            "  ->  process.clock.now() > held_lease.own_stop"
        ),
        (
            "attempt.run Execution._key_is_held: waited < READ_PAUSES * READ_PAUSE"
            "  ->  waited <= READ_PAUSES * READ_PAUSE"
        ),
        (
            "attempt.run Execution.acquire: process.clock.now() + verdict.delay > call.begin_by"
            "  ->  process.clock.now() + verdict.delay >= call.begin_by"
        ),
        (
            "stores.sql.record_statements RecordStatements._is_closed: groups.c.limited_until > self._now"
            "  ->  groups.c.limited_until >= self._now"
        ),
        "attempt.run retrying: clock.now() + pause > until()  ->  clock.now() + pause >= until()",
    ),
    "it writes again what is written": (
        ("attempt.run Execution._burst: noted > burst.newest  ->  noted >= burst.newest"),
        (
            "attempt.run Execution.acquire: burst.newest > call.order > 0"
            "  ->  burst.newest >= call.order > 0"
        ),
    ),
    "an order is a time, in microseconds": ("attempt.run Execution.acquire: 0  ->  1",),
    "never reached": (
        (
            "attempt.run Execution._report_verdict: raise AssertionError("
            "f'{verdict} does not end a delivery')  ->  pass"
        ),
        (
            "decide.before_run _answer_in_record: raise AssertionError("
            "f'the record has no answer where the refusal is {refusal}')  ->  pass"
        ),
    ),
    "only what is reported": (
        (
            "attempt.run Execution._after_unknown_error: logger.error(code='did-not-begin')"
            "  ->  logger.error()"
        ),
        (
            "attempt.run Execution._after_unknown_error: logger.error(exc_info=error)"
            "  ->  logger.error()"
        ),
        (
            "attempt.run Execution._until_settled.<locals>.repeatable: "
            "logger.error(code='outcome-not-written')  ->  logger.error()"
        ),
        (
            "attempt.run Execution._until_settled.<locals>.repeatable: logger.error(exc_info=error)"
            "  ->  logger.error()"
        ),
        (
            "attempt.run Execution._until_settled.<locals>.repeatable: "
            "not failures and (not isinstance(error, StoreUnavailable))"
            "  ->  not failures or not isinstance(error, StoreUnavailable)"
        ),
        ("attempt.run Execution._until_settled.<locals>.repeatable: not failures  ->  failures"),
        (
            "attempt.run Execution._until_settled.<locals>.repeatable: "
            "not isinstance(error, StoreUnavailable)  ->  isinstance(error, StoreUnavailable)"
        ),
        "stores.sql.rows _warn: logger.warning(code='column-unreadable')  ->  logger.warning()",
    ),
    "the longest wait is shorter in any case": (
        "decide.after_run settle_pause: 10  ->  11",
        "decide.after_run store_pause: 10  ->  11",
        "decide.before_run _follow: 20  ->  21",
        "decide.before_run _held: 20  ->  21",
        "decide.latest until_turn: 20  ->  21",
        "decide.waiting countdown_until_free: 20  ->  21",
        "decide.waiting not_due_yet: 20  ->  21",
        "decide.waiting publish_retry_pause: 10  ->  11",
        "decide.waiting publish_retry_time: 10  ->  11",
        "decide.waiting while_full: 20  ->  21",
    ),
    "a bound of which 0.1 % more is as good": (
        "attempt.run Execution._holders_may_live: 1000000.0  ->  1000001.0",
    ),
    "the quiet time of each policy is at least a day": (
        "decide.after_failure _quiet: 0.0  ->  1.0",
    ),
    "no time is later than for ever": (
        "attempt.run Execution._claimed: call.begin_by < math.inf  ->  call.begin_by <= math.inf",
    ),
    "it is written before it is read": (
        "attempt.held_lease BodyState.__init__: self._locking = False  ->  pass",
        "attempt.held_lease BodyState.__init__: self.published_retries: int | None = None  ->  pass",
        "attempt.held_lease BodyState.__init__: self.replacement: Any = None  ->  pass",
        "attempt.held_lease BodyState.__init__: False  ->  True",
        "attempt.held_lease HeldLease.__init__: 0  ->  1",
        "attempt.held_lease HeldLease.__init__: self.fence = 0  ->  pass",
    ),
    "the clock of a system is past both": ("attempt.held_lease HeldLease.__init__: 0.0  ->  1.0",),
    "both have one length": (
        "stores.sql.rows column_values: True  ->  False",
        "stores.sql.rows column_values: zip(strict=True)  ->  zip()",
        "stores.sql.rows details_of: True  ->  False",
        "stores.sql.rows details_of: zip(strict=True)  ->  zip()",
    ),
    "the document has no time of the end": ("stores.sql.rows settle_parameters: 0  ->  1",),
    "a statement is compiled when it is first used": (
        (
            "stores.sql.record_statements RecordStatements.usual: self._dialect.reads_or_inserts"
            "  ->  not self._dialect.reads_or_inserts"
        ),
    ),
    "a store answers each renewal": (
        "attempt.renewal Renewer._renew: True  ->  False",
        "attempt.renewal Renewer._renew: zip(strict=True)  ->  zip()",
    ),
}

EXPLAINED: Final[dict[str, str]] = {
    f"celery_leases.{name}": reason for reason, names in _BY_REASON.items() for name in names
}
"""By the name of the mutation."""
ON_POSTGRESQL: Final = tuple(
    f"celery_leases.stores.sql.record_statements {function}:"
    for function in (
        "bindparam_of",
        "RecordStatements._claims",
        "RecordStatements._given",
        "RecordStatements._insert_or_read_statement",
        "RecordStatements._successes",
        "RecordStatements.insert_or_read_again",
    )
)
"""How the names begin of the mutations of what PostgreSQL alone needs: tests/contract notices them.
"""


def reason_of(name: str) -> str:
    """The reason why no test without a server notices a mutation; empty if there is none."""
    on_server = "the contracts notice it on PostgreSQL" if name.startswith(ON_POSTGRESQL) else ""
    return EXPLAINED.get(name, on_server)
