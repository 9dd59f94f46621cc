"""Bugs planted in the library, one at a time, and how many seeds it takes to find each.

``python -m tests.simulation.planted [NAME …]`` applies them while the library is imported; no file
is changed.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from tests.reliability.runs import record, recorded

MOST_SEEDS = 20_000


@dataclass(frozen=True)
class Bug:
    """*old* is the text of *module*, once, that *new* replaces."""

    name: str
    module: str
    old: str
    new: str


RUN, RENEWAL = "celery_leases.attempt.run", "celery_leases.attempt.renewal"
CLAIM, BEFORE = "celery_leases.decide.claim", "celery_leases.decide.before_run"
RESCHEDULING, PUBLISHER = "celery_leases.worker.rescheduling", "celery_leases.worker.publisher"
EFFECTS = "celery_leases.body.effects"

AFTER_RUN, CHILD_EXIT = "celery_leases.decide.after_run", "celery_leases.worker.child_exit"
STATEMENTS, ROWS = "celery_leases.stores.sql.record_statements", "celery_leases.stores.sql.rows"
TAKEOVER, FETCHING = "celery_leases.worker.takeover", "celery_leases.worker.fetching"
REQUEST, RECORDS = "celery_leases.worker.request", "celery_leases.stores.sql.records"
DATABASE = "celery_leases.stores.sql.database"
DEADLINES, WAITING = "celery_leases.deadlines", "celery_leases.decide.waiting"
LATEST = "celery_leases.decide.latest"

BUGS = (
    # -- the lease, as its holder sees it
    Bug(
        "a lease counts beyond its end",
        DEADLINES,
        "return hard - min(ttl / 6, 5.0)",
        "return hard + ttl",
    ),
    Bug(
        "a renewal prolongs too much",
        DEADLINES,
        "return sent + ttl - (ttl",
        "return sent + ttl + (ttl",
    ),
    Bug(
        "a deadline counts from the reply",
        RENEWAL,
        "held_lease.extended(sent, ttl)\n            if self._observer",
        "held_lease.extended(self._clock.now(), ttl)\n            if self._observer",
    ),
    Bug(
        "a lost body is not interrupted",
        RENEWAL,
        "        if held_lease.interrupt is not None:\n            held_lease.interrupt()",
        "        pass",
    ),
    Bug(
        "a lost lease is revived by a late reply",
        "celery_leases.attempt.held_lease",
        "        if self.lost is None:\n            self._extend_to",
        "        self.lost = None\n        if True:\n            self._extend_to",
    ),
    Bug(
        "a lease is not renewed",
        DEADLINES,
        "return sent + ttl / RENEWALS_PER_TTL",
        "return sent + 10 * ttl",
    ),
    Bug(
        "a renewal that failed is not repeated",
        DEADLINES,
        "return now + min(ttl / 12, 1.0)",
        "return now + 10 * ttl",
    ),
    Bug(
        "lease.check() succeeds until the deadline of a lost lease",
        "celery_leases.attempt.held_lease",
        "        if self.lost is None and self._clock.now() < self.own_stop:\n            return",
        "        if self._clock.now() < self.own_stop:\n            return",
    ),
    Bug(
        "a lost lease counts until its deadline",
        "celery_leases.attempt.held_lease",
        "        if self.lost is not None:\n            return False\n        now",
        "        now",
    ),
    Bug(
        "a lease is renewed although the task says no",
        RUN,
        "renew=options.renew, max_hold",
        "renew=True, max_hold",
    ),
    Bug(
        "a lease that is not renewed does not end for its holder",
        "celery_leases.attempt.held_lease",
        "self._renew_until = self._hold_until if renew else sent",
        "self._renew_until = self._hold_until",
    ),
    Bug(
        "saved progress is not given to the next attempt",
        "celery_leases.progress",
        'if saved.get("generation") != generation:',
        "if True:",
    ),
    Bug(
        "the outcome of an attempt wipes its progress",
        "celery_leases.stores.sql.record_statements",
        "func.coalesce(progress, columns.progress)",
        "progress",
    ),
    Bug(
        "a call whose outcome is unknown waits for an operator, although it may be repeated",
        "celery_leases.effect",
        'return RepeatCall() if uncertain == "rerun" else AskOperator()',
        "return AskOperator()",
    ),
    Bug(
        "each attempt makes a call with an idempotency key of its own",
        EFFECTS,
        "reply = arguments.call(effect.idempotency_key)",
        'reply = arguments.call(f"{effect.idempotency_key}:{self.record.fence}")',
    ),
    # -- the claim
    Bug(
        "a row is taken over although its store was emptied",
        CLAIM,
        "return Refusal.EMPTIED if emptied < row.lease_ttl else None",
        "return None",
    ),
    Bug(
        "the fence is not raised", CLAIM, '"fence": max(row.fence + 1, now),', '"fence": row.fence,'
    ),
    Bug(
        "a finished call is forgotten once another one has the row",
        CLAIM,
        "return call_id in row.finished_calls or (row.state is State.DONE and row.call_id == call_id)",
        "return row.state is State.DONE and row.call_id == call_id",
    ),
    Bug(
        "a crash of a call wipes the count of another one",
        "celery_leases.decide.attempt_history",
        "counts = {**(row.other_crashes or {}), str(row.crashed_call): row.crashes}",
        "counts: dict[str, int] = {}",
    ),
    Bug(
        "a claim does not compare the row",
        STATEMENTS,
        'where(columns.stored_key == bindparam("for_key"), *as_seen)',
        'where(columns.stored_key == bindparam("for_key"), *as_seen[:0])',
    ),
    Bug(
        "a running row is free",
        CLAIM,
        "row.lease_remaining > 0 and row.owner not in call.prior:\n        return Refusal.HELD",
        "row.lease_remaining > 0 and row.owner not in call.prior:\n        return None",
    ),
    Bug(
        "a call does not wait for the end of its burst",
        LATEST,
        "min(debounce - burst.quiet_for, -overdue)",
        "min(0.5 - burst.quiet_for, -overdue)",
    ),
    Bug(
        "the wait for a newer call does not begin again when a run has ended",
        LATEST,
        "        waited = min(waited, (record.now - record.finished_at) / MICROSECONDS)\n    if waited",
        "        pass\n    if waited",
    ),
    Bug(
        "the wait for a newer call does not begin again when that is published",
        LATEST,
        "        waited = min(waited, burst.quiet_for)",
        "        pass",
    ),
    Bug(
        "calls that come fast do not leave the newest a second after a run",
        LATEST,
        "        overdue = min(overdue, (record.now - record.finished_at) / MICROSECONDS - quiet)",
        "        pass",
    ),
    Bug(
        "a call does not wait for a newer one",
        LATEST,
        "    if waited >= PATIENCE:\n        return None",
        "    return None",
    ),
    Bug(
        "a newer call is waited for three times as long",
        LATEST,
        "    if waited >= PATIENCE:\n        return None",
        "    if waited >= 3 * PATIENCE:\n        return None",
    ),
    Bug(
        "a revoked attempt counts as a crash in a row",
        "celery_leases.decide.attempt_history",
        "if attempt.ended is Ended.TERMINATED and attempt.error in _NO_CRASH:",
        "if False:",
    ),
    Bug(
        "progress of a call ends the crashes of another one",
        RUN,
        "if state.progressed and not crashes_of_another_call(call, record):",
        "if state.progressed:",
    ),
    Bug(
        "a call without an order is answered by any run",
        CLAIM,
        "return 0 < call.order <= row.order",
        "return 0 <= call.order <= row.order",
    ),
    Bug(
        "a call with an order counts from its second arrival",
        "celery_leases.worker.delivery",
        "if self.redelivered and order:",
        "if False:",
    ),
    Bug(
        "the cooldowns of a key do not grow",
        "celery_leases.decide.after_failure",
        "number = closed.cooldowns + 1",
        "number = closed.cooldowns or 1",
    ),
    Bug(
        "the retries of a key do not wait longer",
        "celery_leases.decide.after_failure",
        "number = closed.quick_retries + 1",
        "number = closed.quick_retries or 1",
    ),
    Bug(
        "a call that waits for its time is not refused",
        CLAIM,
        "return Refusal.NOT_DUE if is_waiting(call.call_id, row) else None",
        "return None",
    ),
    Bug(
        "done work is run again by another call",
        CLAIM,
        "        return Refusal.DONE\n",
        "        return None\n",
    ),
    Bug(
        "done work is run again by its own call",
        CLAIM,
        "        return Refusal.FINISHED\n",
        "        return None\n",
    ),
    Bug(
        "a held key is run all the same",
        RUN,
        "        if answer.holder is not None:\n            return self._key_is_held(answer.holder, waited)",
        "        if answer.holder is not None:\n            return self._acquired(sent, waited)",
    ),
    Bug(
        "a body begins although the claim took longer than the lease",
        RUN,
        "        if process.clock.now() >= held_lease.own_stop:\n            self._close_unrun(0.0)",
        "        if False:\n            self._close_unrun(0.0)",
    ),
    Bug(
        "an older call keeps the order of the newest",
        CLAIM,
        '"order": call.order or (row.order if stands else 0),',
        '"order": max(call.order, row.order),',
    ),
    # -- the outcome
    Bug(
        "the outcome of retry() is not written again after an error",
        RUN,
        "isinstance(ending, Returned | Raised | Snoozed | ControlFlow)",
        "isinstance(ending, Returned | Raised | Snoozed)",
    ),
    Bug(
        "an outcome is written without fence and owner",
        STATEMENTS,
        """        table.c.fence == given("for_fence", table.c.fence.type),
        table.c.owner == given("for_owner", table.c.owner.type),
""",
        """        given("for_fence", table.c.fence.type) != -1,
        given("for_owner", table.c.owner.type) != "",
""",
    ),
    Bug(
        "the lease is released before the record is written",
        RUN,
        "        settled = self._until_settled(ending, partial(process.records.settle",
        "        self._free()\n        settled = self._until_settled(ending, partial(process.records.settle",
    ),
    Bug(
        "a cooldown is half as long",
        ROWS,
        "int(wait * MICROSECONDS)",
        "int(wait * MICROSECONDS / 2)",
    ),
    Bug(
        "a call whose lease was lost has failed",
        AFTER_RUN,
        'return again_soon(f"the lease was lost: {reason}", rand)',
        "return Return(None)",
    ),
    Bug(
        "a call whose lease was lost does not run again",
        AFTER_RUN,
        "ended=Ended.LOST, reason=reason, resumes=call.reschedulable)",
        "ended=Ended.LOST, reason=reason, state=State.DONE)",
    ),
    Bug(
        "a call that was refused an outcome is forgotten",
        RUN,
        "            refused = self._outcome_refused(ending)\n",
        "            refused = Return(None)\n",
    ),
    Bug(
        "the main process closes the row of another attempt",
        CHILD_EXIT,
        "    if not record.is_attempt(State.RUNNING, ended.token):\n        if ended.pid:",
        "    if record.state is not State.RUNNING:\n        if ended.pid:",
    ),
    Bug(
        "a call whose transaction was rolled back has succeeded",
        RUN,
        """            ending = self._not_committed(ending, "the body returned after complete(), but")
""",
        "            pass\n",
    ),
    Bug(
        "a body that raises after its commit has failed",
        RUN,
        "            if done is not None and done.is_attempt(State.DONE, record.owner, record.fence):\n",
        "            if isinstance(ending, Returned):\n",
    ),
    # -- calls that Celery ends
    Bug(
        "a revoked call that waited seems to wait for ever",
        REQUEST,
        "if revoked and not before and ",
        "if False and ",
    ),
    Bug(
        "a call that was refused before its start seems to wait for ever",
        REQUEST,
        "            child_exit.close_ended(self._ended(ExitCause.ERROR, 0, error))\n",
        "            pass\n",
    ),
    Bug(
        "the row of a call that has ended by its time limit runs on",
        REQUEST,
        "                child_exit.close_dead(self._ended(cause, pid))\n",
        "                pass\n",
    ),
    # -- workers and callers
    Bug(
        "the messages of a dead worker are not returned",
        TAKEOVER,
        "            if page:\n",
        "            if False:\n",
    ),
    Bug(
        "what a worker has registered is kept as long as its lease",
        TAKEOVER,
        "workers.renew(self._name, self._ttl, DAY, added",
        "workers.renew(self._name, self._ttl, self._ttl, added",
    ),
    Bug(
        "a message that a dead worker had not registered is not returned",
        TAKEOVER,
        "in chain(pages, self._unregistered(workers, channel, ended)):\n",
        "in pages:\n",
    ),
    Bug(
        "an acknowledgement that failed is dropped",
        TAKEOVER,
        "        written = workers.renew(",
        "        self._to_acknowledge.clear()\n        written = workers.renew(",
    ),
    Bug(
        "kombu returns what another worker has got",
        FETCHING,
        'fetched = getattr(message, "fetched_at", "")',
        'fetched = ""',
    ),
    Bug(
        "a message is known by the time at which its fetch is read",
        FETCHING,
        "message.fetched_at = self._sent_at",
        "message.fetched_at = time.time()",
    ),
    Bug(
        "a fetched message is not noted",
        FETCHING,
        'self._next if queues and "EVAL" not in self._refused else ""',
        '""',
    ),
    Bug(
        "a message stays lost if the reply to its fetch was lost",
        FETCHING,
        "                self._unanswered()\n            raise",
        "                pass\n            raise",
    ),
    Bug(
        "a queued call that another caller has got is withdrawn",
        "celery_leases.stores.sql.outbox",
        "table.c.state == State.PENDING, table.c.ended.is_(None), not_taken)",
        "table.c.state == State.PENDING, table.c.ended.is_(None))",
    ),
    Bug(
        "a call in a transaction that is rolled back is published",
        "celery_leases.outbox.calls",
        """    transaction.join(key.key)
    other = _write_record(process, transaction, call)
""",
        """    transaction.join(key.key)
    other = _write_record(process, transaction, call)
    publish = Signature.from_dict({"task": task.name, "args": args, "options": {"task_id": call_id}}, app=app)
    publish.apply_async()
""",
    ),
    Bug(
        "a claim takes the ttl of the call before it",
        CLAIM,
        "    ttl, retention = call.options.ttl, call.options.retention or None\n",
        "    ttl, retention = row.lease_ttl if row else call.options.ttl, call.options.retention\n",
    ),
    Bug(
        "a call that has begun is refused because of another one",
        WAITING,
        "waits = call.started or call.options.latest_runs",
        "waits = call.options.latest_runs",
    ),
    # -- groups, and operators
    Bug(
        "the slot of a body that has completed its call is not renewed",
        "celery_leases.attempt.held_lease",
        "        if self.slot is None:\n            self._renew_until = -math.inf",
        "        if True:\n            self._renew_until = -math.inf",
    ),
    Bug(
        "a slot is not renewed",
        RENEWAL,
        "slot=held_lease.slot,",
        "slot=None,",
    ),
    Bug(
        "a slot is not given back",
        RUN,
        "            if self._may_have_slot:\n",
        "            if False:\n",
    ),
    Bug(
        "a call loses its place when it is rescheduled",
        WAITING,
        "since = (call.ask or NOTHING).since or float(round(room.now))",
        "since = float(round(room.now))",
    ),
    Bug(
        "the place of a copy counts from its arrival",
        "celery_leases.worker.waiting_calls",
        "in_group.wait_since(request, header.since)",
        "in_group.wait_since(request, None)",
    ),
    Bug(
        "a call takes its turn before older ones of other workers",
        "celery_leases.groups.slots",
        "return Room(max(0, places - before), wait,",
        "return Room(max(0, places), wait,",
    ),
    Bug(
        "a turn by the rate comes too early",
        "celery_leases.groups.slots",
        "begins = max(now + lead, slots.began + gap)",
        "begins = now + lead",
    ),
    Bug(
        "a body begins before its turn",
        RUN,
        "                if self._begins_at:  # by the rate of its group\n",
        "                if False:\n",
    ),
    Bug(
        "an operator takes a key that is done meanwhile",
        "celery_leases.client",
        'compared = exact or what == "release"',
        "compared = exact",
    ),
    # -- messages
    Bug(
        "the last copy of a call is dropped",
        PUBLISHER,
        "if latest > header.copy and not newest:",
        "if latest >= header.copy and not newest:",
    ),
    Bug(
        "a copy is marked before it is published",
        PUBLISHER,
        "        self._publish(task, replace(header, copy=copy), delay)\n        # The mark",
        """        marks.swap_mark(stored_key, mark, noted, str(copy), delay + 2 * ttl)
        self._publish(task, replace(header, copy=copy), delay)
        # The mark""",
    ),
    Bug(
        "a delivery ends although its copy was not confirmed",
        RESCHEDULING,
        """            if may_be_returned(before, limit):
                self._requeue(call, again, str(error))
            why""",
        "            return True\n            why",
    ),
    # -- effects
    Bug(
        "an effect is called before its intent is committed",
        EFFECTS,
        "        begun = self._begin(name, key, arguments)\n",
        "        arguments.call(key)\n        begun = self._begin(name, key, arguments)\n",
    ),
    Bug(
        "an effect with an unknown outcome is called again",
        EFFECTS,
        "        if found is None:\n            return self._call(ours, arguments)",
        "        if True:\n            return self._call(ours, arguments)",
    ),
    Bug(
        "the intent of an effect is withdrawn after its call failed",
        EFFECTS,
        "if not doubted and self._was_executed(error, outside) is False:",
        "if not doubted:",
    ),
    Bug(
        "an effect is called by a holder that has lost its lease",
        EFFECTS,
        "            self.held_lease.check()  # committing the intent may have taken long",
        "            pass",
    ),
    Bug(
        "an effect without verify is repeated",
        "celery_leases.effect",
        'return RepeatCall() if uncertain == "rerun" else AskOperator()',
        'return RepeatCall() if uncertain == "stop" else AskOperator()',
    ),
    Bug(
        "the reply of an effect is not written",
        EFFECTS,
        "accepted = self._retrying(lambda: self.process.effects.finish(effect, text, reference))",
        "accepted = True",
    ),
    # -- records that expire
    Bug(
        "a purge deletes a row that was claimed meanwhile",
        RECORDS,
        "delete(records).where(records.c.stored_key.in_(old), over)",
        "delete(records).where(records.c.stored_key.in_(old))",
    ),
    Bug(
        "a purge deletes the effects of a call that has the row",
        RECORDS,
        "over = and_(effects.c.expires_at <= self.database.now, ~present)",
        "over = effects.c.expires_at <= self.database.now",
    ),
    Bug(
        "the effects of a purged row are left",
        RECORDS,
        "        self.database.count(gone, {})\n",
        "",
    ),
    Bug(
        "the retention of a success counts from the claim",
        STATEMENTS,
        "                else_=now + keep,",
        "                else_=columns.started_at + keep,",
    ),
    Bug(
        "a row that runs for longer than its retention counts as absent",
        ROWS,
        '"expires_at": row["expires_at"] if state is not State.RUNNING else None,',
        '"expires_at": row["expires_at"],',
    ),
    Bug(
        "an expired record answers calls until it is purged",
        "celery_leases.record",
        "return self.expires_at is not None and self.expires_at <= self.now",
        "return False",
    ),
    # -- what a reviewer proposed
    Bug(
        "the failures of a key are not counted",
        "celery_leases.decide.after_failure",
        'failures=closed.failures + (action.scope == "key"),',
        "failures=closed.failures,",
    ),
    Bug(
        "a copy of a call takes over the row that the call holds",
        CLAIM,
        "row.lease_remaining > 0 and row.owner not in call.prior:",
        "row.lease_remaining > 0 and row.call_id != call.call_id:",
    ),
    Bug(
        "arrivals decide which of two calls with an order is newer",
        CLAIM,
        "or (by_arrival and call.arrived <= row.arrived)",
        "or call.arrived <= row.arrived",
    ),
    Bug(
        "the row of a key that cools down is given to the next queued call",
        "celery_leases.outbox.calls",
        "(_has_no_open_call(record) and not record.waits)",
        "_has_no_open_call(record)",
    ),
    Bug(
        "an effect is verified while its call may be under way",
        "celery_leases.effect",
        "return VerifyLater(early) if early > 0 else Verify()",
        "return Verify()",
    ),
    Bug(
        "a call waits for longer than the lease that it waits for",
        BEFORE,
        "min(2.0 ** min(call.reschedules, 20), max(1.0, holder.remaining)) + jitter(facts)\n    if",
        "2.0 ** min(call.reschedules, 20) + jitter(facts)\n    if",
    ),
    Bug(
        "a revoke ends whichever call waits for the key",
        AFTER_RUN,
        "if not (final and waits and row.call_id == call.call_id):",
        "if not (final and waits):",
    ),
    Bug(
        "a renewal shortens an extended lease",
        "celery_leases.stores.sql.leases",
        ".values(lease_until=later_of(records.c.lease_until, until))",
        ".values(lease_until=until)",
    ),
    Bug(
        "an outcome without progress deletes the saved one",
        STATEMENTS,
        "func.coalesce(progress, columns.progress)",
        "progress",
    ),
    Bug(
        "another call runs a second before the end of a retry's countdown",
        WAITING,
        "if record.call_id == call_id and record.ended is Ended.RETRIED else 0.0",
        "if record.ended is Ended.RETRIED else 0.0",
    ),
    Bug(
        "the end of a call that waits ends the wait of its key",
        AFTER_RUN,
        "        retry_after=row.waits or None,\n",
        "",
    ),
    Bug(
        "a call that has begun early begins again when its countdown ends",
        "celery_leases.worker.waiting_calls",
        "            entry.fun, entry.args = _nothing, ()\n",
        "            pass\n",
    ),
    Bug(
        "a worker acknowledges what another one has got",
        TAKEOVER,
        "done = {tag: delivery.fetched for",
        'done = {tag: "" for',
    ),
    Bug(
        "a retry that is delivered again is taken for an earlier message",
        CLAIM,
        "and row.retries > call.retries:\n",
        "and row.retries >= call.retries > 0:\n",
    ),
    Bug(
        "a row is taken over although the database was away",
        CLAIM,
        "return Refusal.LAPSED if late else None",
        "return None",
    ),
    Bug(
        "a takeover does not ask whether the database has been answering",
        DATABASE,
        "            if not _memory[0]:\n                return NEVER",
        "            if not _memory[0]:\n                return ALWAYS",
    ),
    Bug(
        "a claim that the database executed late counts its own answer",
        DATABASE,
        "        return until\n\n    def failed",
        "        return self.takeover_until(at)\n\n    def failed",
    ),
    Bug(
        "a late answer counts for no time",
        DATABASE,
        "return until if now is None else min(until, now - late, now - before)",
        "return until",
    ),
    Bug(
        "a late answer counts for less than the time of grace",
        DATABASE,
        "since, late, before = at, 0, late",
        "since, late, before = at, 0, 0",
    ),
    Bug(
        "a gap between two answers does not end what was known of the database",
        DATABASE,
        "return sent - last > SILENCE or self._failed >= last",
        "return self._failed >= last",
    ),
    Bug(
        "what the main process has seen of the database counts for ever",
        DATABASE,
        "if sent - last > SILENCE or answering < self.grace:",
        "if answering < self.grace:",
    ),
    Bug(
        "the database has been answering once it has answered twice",
        DATABASE,
        "if self._broken(sent) or answering < self.grace:",
        "if self._broken(sent) or not answering:",
    ),
    Bug(
        "the row of a retry keeps the number of the attempt before",
        AFTER_RUN,
        "retries = record.retries + (ended is Ended.RETRIED)",
        "retries = record.retries",
    ),
    Bug(
        "a crash that was none still counts",
        "celery_leases.decide.attempt_history",
        'changes["crashes"] = row.crashes - 1',
        'changes["crashes"] = row.crashes',
    ),
    Bug(
        "the end of a call hides how its latest attempt ended",
        RECORDS,
        "attempt_history.with_attempt_aside(row) if outcome.unrun else row",
        "row",
    ),
    Bug(
        "an outcome counts a crash again that was none",
        RUN,
        "if record.history and attempt_history.has_suspicions(record):\n"
        "            self.record = record = self._with_known_ends()\n        outcome",
        "if record.crashed_at is not None:\n"
        "            self.record = record = self._with_known_ends()\n        outcome",
    ),
    Bug(
        "a body is retried once too often",
        "celery_leases.decide.after_failure",
        "if counts.quick_retries < retries:",
        "if counts.quick_retries <= retries:",
    ),
    Bug(
        "a caller relies on a queued call that is withdrawn meanwhile",
        "celery_leases.stores.sql.outbox",
        "values(publish_at=self._table.c.started_at)\n        return self.database.count(own, {}) == 1",
        "values(publish_at=self._table.c.started_at)\n        return self.database.count(own, {}) >= 0",
    ),
    Bug(
        "a call forgets that it has begun when it is rescheduled again",
        RESCHEDULING,
        "started=self.header.started or again.started,",
        "started=again.started,",
    ),
    Bug(
        "an attempt that is refused its outcome forgets that its call has begun",
        RUN,
        "            self.call = replace(call, started=True)",
        "            self.call = call",
    ),
    Bug(
        "an effect belongs to what several calls share, although each of them runs",
        EFFECTS,
        "each_runs=options.reruns,",
        "each_runs=options.each_runs,",
    ),
    Bug(
        "a body that waits for its turn counts as begun already",
        "celery_leases.groups.slots",
        "began=now + found.wait * 1000, pause=ask.pause)",
        "began=now, pause=ask.pause)",
    ),
    Bug(
        "the probe of a group without a limit has no slot",
        "celery_leases.groups.slots",
        "if ask.limit or slots.closed is not None:",
        "if ask.limit:",
    ),
    Bug(
        "of two limits of a group, that of the call counts",
        "celery_leases.groups.slots",
        "places = limit - len(slots.held)",
        "places = ask.limit - len(slots.held)",
    ),
    Bug(
        "a lost message of a retry is published with the number of the attempt before",
        "celery_leases.outbox.calls",
        'options["retries"] = record.retries',
        'options.setdefault("retries", record.retries)',
    ),
    Bug(
        "a message that is delivered again counts as the first one",
        "celery_leases.worker.delivery",
        "self.received_header is not None or self.redelivered or request.retries > 0",
        "self.received_header is not None or request.retries > 0",
    ),
    Bug(
        "calls without a limit all begin once the time of a closed group is over",
        "celery_leases.stores.sql.cooldown_groups",
        '"new_limited_until": int(new.closed.counts * 1000)',
        '"new_limited_until": int(new.closed.ends * 1000)',
    ),
    Bug(
        "a claim replaces a message that is not published yet",
        CLAIM,
        "if row.publish_at is None and call.message is not None:",
        "if call.message is not None:",
    ),
    Bug(
        "a key has one crash more than it may",
        AFTER_RUN,
        "if outcome.crashes < call.options.failures.crashes:",
        "if outcome.crashes <= call.options.failures.crashes:",
    ),
    Bug(
        "a worker requeues what another one has got",
        TAKEOVER,
        "return_message(message.channel, delivery.tag, delivery.fetched,",
        'return_message(message.channel, delivery.tag, "",',
    ),
    Bug(
        "a worker that connects again returns what another one has got",
        TAKEOVER,
        "return_message(channel, delivery.tag, delivery.fetched,",
        'return_message(channel, delivery.tag, "",',
    ),
    Bug(
        "the failure of a probe counts no closing of its group",
        "celery_leases.groups.slots",
        "    slots = slots.at(now)\n    before = slots.closed\n",
        "    slots = without_slot(slots.at(now), token)\n    before = slots.closed\n",
    ),
    Bug(
        "each failure counts a closing of its group",
        "celery_leases.groups.slots",
        "before.in_a_row + slots.probes(token, now)",
        "before.in_a_row + 1",
    ),
    Bug(
        "a failure shortens the time for which its group is closed",
        "celery_leases.groups.slots",
        "if before is not None and now + wait <= before.ends:",
        "if before is not None and now + wait == before.ends:",
    ),
    Bug(
        "a probe that is snoozed opens its group",
        RUN,
        "        return outcome.ended is Ended.RETURNED\n",
        "        return True\n",
    ),
    Bug(
        "a probe that is retried soon opens its group",
        "celery_leases.decide.after_failure",
        "return outcome.state is State.PENDING or failure.ambiguous or unrelated",
        "return failure.ambiguous or unrelated",
    ),
    Bug(
        "a call that has failed for good is forgotten once another one has the row",
        "celery_leases.decide.after_failure",
        "                finished=failed_for_good(call, record, failure),\n",
        "",
    ),
    Bug(
        "the failure of a call ends the crashes of another one",
        "celery_leases.decide.after_failure",
        "if not crashes_of_another_call(call, record):",
        "if True:",
    ),
    Bug(
        "a call that has failed keeps its key for its arguments",
        CLAIM,
        "free = ours or row.failure_delivered or call.options.reruns",
        "free = ours or call.options.reruns",
    ),
    Bug(
        "a call that has failed, and runs again by itself, does not keep its key",
        CLAIM,
        "free = ours or row.failure_delivered or call.options.reruns",
        "free = ours or row.ended is Ended.FAILED or call.options.reruns",
    ),
    Bug(
        "a key whose queued call was revoked is given to no other call",
        AFTER_RUN,
        "return stopped or record.ended in (*CALLER_HAS_FAILURE, Ended.CRASHED)",
        "return record.ended in (*CALLER_HAS_FAILURE, Ended.CRASHED)",
    ),
    # -- the limit of a quorum queue
    Bug(
        "a message is returned once too often",
        WAITING,
        "return limit is None or returns < limit",
        "return limit is None or returns <= limit",
    ),
    Bug(
        "a call fails although its message can be returned",
        WAITING,
        "return limit is None or returns < limit",
        "return limit is None or returns < limit - 1",
    ),
    Bug(
        "the returns that a queue has counted are not read",
        "celery_leases.worker.routes",
        "return count if isinstance(count, int) else 0",
        "return 0",
    ),
    Bug(
        "the message of a call of which a copy runs is returned once too often",
        RESCHEDULING,
        """        if may_be_returned(*self._requeue_count(call)):
            self._requeue(call, again, "a copy""",
        """        if True:
            self._requeue(call, again, "a copy""",
    ),
    Bug(
        "the message of a retry is returned once too often",
        "celery_leases.worker.delivery",
        "if not may_be_returned(*before):",
        "if False:",
    ),
    # -- ends that only Celery knows
    Bug(
        "a call that its body ignores waits for another message",
        "celery_leases.worker.body_exceptions",
        "return ControlFlow(error, runs_again=False, ended=Ended.IGNORED)",
        "return ControlFlow(error, runs_again=True, ended=Ended.IGNORED)",
    ),
    Bug(
        "a call whose body returns its message is rejected for good",
        "celery_leases.worker.body_exceptions",
        "case Reject() if error.requeue:",
        "case Reject() if error.requeue is None:",
    ),
    Bug(
        "a failed call runs again because its message comes again",
        "celery_leases.worker.delivery",
        "failure_fence=None\n            if header.failure_fence == 0 and self.redelivered\n"
        "            else header.failure_fence",
        "failure_fence=header.failure_fence",
    ),
    Bug(
        "a lost lease is written again for its ttl, although it was extended",
        RENEWAL,
        "held_lease.lasts(self._clock.now())",
        "held_lease.call.options.ttl",
    ),
    Bug(
        "what may have been done runs again by itself",
        "celery_leases.decide.after_failure",
        "    if action.ambiguous and not options.failures.idempotent:\n        return False\n",
        "",
    ),
    Bug(
        "a record with failures expires before their counts begin anew",
        AFTER_RUN,
        "retention = max(call.options.retention, call.options.failures.cooldown.quiet)",
        "retention = call.options.retention",
    ),
    Bug(
        "the time of a group's store is that of an answer that was read late",
        "celery_leases.worker.waiting_calls",
        "if took <= LONGEST_ANSWER:",
        "if took <= math.inf:",
    ),
    Bug(
        "a message of a call that another one has followed expires although it is done",
        "celery_leases.worker.delivery",
        "record.call_id == call.call_id or call.call_id in record.finished_calls",
        "record.call_id == call.call_id",
    ),
    Bug(
        "what keeps crashing goes on for ever once the store has evicted a key",
        "celery_leases.decide.attempt_history",
        "return not known and row.crashes < 3 * most",
        "return not known",
    ),
    Bug(
        "an attempt whose outcome could not be written counts as a crash",
        RUN,
        "again = replace(again, started=True, prior=self.record.owner)",
        "again = replace(again, started=True)",
    ),
    Bug(
        "a probe that runs is forgotten when its group is closed for longer",
        "celery_leases.groups.slots",
        'alone = before.alone if before is not None else ""',
        'alone = ""',
    ),
    Bug(
        "a failure of what a key depends on counts as its own",
        "celery_leases.decide.after_failure",
        'failures=closed.failures + (action.scope == "key"),',
        "failures=closed.failures + 1,",
    ),
    Bug(
        "a revoked call that cools down seems to wait for ever",
        AFTER_RUN,
        "waits = row.state in (State.PENDING, State.COOLING) and (row.resumes or row.queued)",
        "waits = row.state is State.PENDING and (row.resumes or row.queued)",
    ),
    Bug(
        "a fence is the time of the database",
        CLAIM,
        '"fence": max(row.fence + 1, now),',
        '"fence": now,',
    ),
    Bug(
        "a claim that failed after one without a reply leaves no open row",
        RUN,
        "failures > 0 and not isinstance(error, RecordUnreadable)",
        "False",
    ),
    Bug(
        "a message that comes again expires although its call has begun",
        REQUEST,
        'if self.delivery_info.get("redelivered") or HEADER in',
        "if HEADER in",
    ),
)
"""Each breaks a promise of docs/explanation/guarantees.md."""


class Planting(MetaPathFinder):
    """Imports the module of a bug with the bug in it."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._bug.module:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = PlantedLoader(name, spec.origin, self._bug)
        return spec


class PlantedLoader(SourceFileLoader):
    """Compiles a source with a bug in it, and caches nothing."""

    def __init__(self, name: str, path: str, bug: Bug) -> None:
        super().__init__(name, path)
        self._bug = bug

    def get_code(self, fullname: str) -> Any:
        text = planted(self._bug)
        return compile(text, self.path, "exec", dont_inherit=True)


def planted(bug: Bug) -> str:
    """The text of the module with the bug; raises ``ValueError`` if the place is not there once."""
    root = Path(__file__).parents[2]
    text = (root / Path(*bug.module.split("."))).with_suffix(".py").read_text()
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: {text.count(bug.old)} places in {bug.module}")
    return text.replace(bug.old, bug.new)


def seeds_to_find(bug: Bug, most: int = MOST_SEEDS) -> tuple[int, str] | None:
    """How many seeds it takes to find *bug*, and what showed it; ``None``: not found."""
    sys.meta_path.insert(0, Planting(bug))
    from tests.simulation.search import collect_seldom, first_failure

    collect_seldom()
    found = first_failure(range(1, most + 1))
    return (found.seed, str(found.violation)) if found is not None else None


def main(names: list[str], most: int = MOST_SEEDS) -> int:
    """Search each bug in a process of its own; returns how many were not found.

    *names*: only bugs whose name contains one of these. ``--record`` writes what was found, and
    ``--seconds=60`` searches each bug for so long at most.
    """
    missed, found = 0, recorded("planted").get("bugs", {})
    keep = "--record" in names
    limits = [name.partition("=")[2] for name in names if name.startswith("--seconds=")]
    seconds = float(limits[0]) if limits else None
    names = [name for name in names if not name.startswith("--")]
    for bug in BUGS:
        if names and not any(name in bug.name for name in names):
            continue
        command = [
            *(sys.executable, "-m", "tests.simulation.planted", "--one"),
            bug.name,
            str(most),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            line, failed = f"not found within {seconds:g} s", True
        else:
            line = "".join((done.stdout or done.stderr).strip().splitlines()[-1:])
            failed = done.returncode != 0
        missed += failed
        print(f"{bug.name}: {line}", flush=True)
        found[bug.name] = line
        if keep:
            record("planted", {"most": most, "bugs": found})
    return missed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        chosen = next(bug for bug in BUGS if bug.name == sys.argv[2])
        result = seeds_to_find(chosen, int(sys.argv[3]))
        print("not found" if result is None else f"seed {result[0]}, {result[1].splitlines()[0]}")
        sys.exit(result is None)
    sys.exit(main(sys.argv[1:]))
