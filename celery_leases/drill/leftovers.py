"""Deletes what a drill has written: its queues with their messages, its records and its leases."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from celery import Celery

from celery_leases.drill.task import TASK
from celery_leases.protocol.filters import RecordFilter
from celery_leases.protocol.keys import stored_key
from celery_leases.protocol.message_copies import callbacks_mark, waiter_mark
from celery_leases.protocol.ports import MarkStore
from celery_leases.worker.app_components import AppParts

SCANNED_AT_ONCE = 1000


def delete_queues(app: Celery, queues: Sequence[str]) -> None:
    """Delete *queues*, their exchanges, and what dead workers have left unacknowledged of them.

    On Redis the latter is in a hash that all queues share; it is walked, and nothing of another
    queue is touched.
    """
    with app.connection_for_write() as connection, connection.channel() as channel:
        if hasattr(channel, "unacked_key"):
            _delete_unacknowledged(channel, queues)
        for name in queues:
            queue = app.amqp.queues[name].bind(channel)
            queue.declare()  # a process knows the bindings of queues that it has declared
            queue.delete()
            if connection.transport.driver_type == "amqp" and queue.exchange.name == name:
                channel.exchange_delete(name)
            app.amqp.queues.pop(name, None)


def _delete_unacknowledged(channel: Any, queues: Sequence[str]) -> None:
    """Of kombu's Redis transport: a message is ``[message, exchange, routing key]`` by its tag."""
    with channel.conn_or_acquire() as client:
        cursor = 0
        while True:
            # kombu puts its global prefix before the names in HDEL and ZREM, and not in HSCAN.
            cursor, found = client.hscan(
                channel.global_keyprefix + channel.unacked_key, cursor, count=SCANNED_AT_ONCE
            )
            for tag, message in found.items():
                if json.loads(message)[2] in queues:
                    client.zrem(channel.unacked_index_key, tag)
                    client.hdel(channel.unacked_key, tag)
            if not cursor:
                return


def delete_keys(parts: AppParts, calls: Collection[tuple[str, str]]) -> None:
    """Delete the records, the leases and the marks of *calls*, pairs of a key and a call's id,
    whoever holds them.
    """
    from celery_leases.stores.sql.leases import DatabaseLeaseStore

    records, leases = parts.records, parts.leases
    keys = {stored_key(TASK, key) for key, _ in calls}
    for stored in keys:
        records.reset(stored, keep=True)  # first the fence: a late outcome is refused
        if (holder := leases.holder(stored)) is not None:
            leases.release(stored, holder.token)
        leases.end_cooldown(stored)
    for key, call in calls:
        for mark in (waiter_mark(call, 0), callbacks_mark(call)):
            _expire(parts.marks, stored_key(TASK, key), mark)
    if isinstance(leases, DatabaseLeaseStore):
        leases.delete_marks([*keys])
    for key in {key for key, _ in calls}:
        # A second on top, for a clock that has moved.
        unmoved = RecordFilter(task=TASK, prefix=key, unmoved_since=records.now() + 1_000_000)
        records.delete_unmoved(unmoved, SCANNED_AT_ONCE)


def _expire(marks: MarkStore, stored: str, mark: str) -> None:
    if (found := marks.mark(stored, mark)) is not None:
        marks.swap_mark(stored, mark, found, "", 0.001)
