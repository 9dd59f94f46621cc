"""Deletes what a drill has written: its queues and messages, its records and its leases."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from celery import Celery

from celery_leases.attempt.process import Process
from celery_leases.decide.copies import callbacks_mark, waiter_mark
from celery_leases.keys import stored_key
from celery_leases.ops.drill.worker import HOSTNAME, TASK
from celery_leases.record_filters import RecordFilter
from celery_leases.stores.interfaces import MarkStore
from celery_leases.worker.takeover import prefix_of

SCAN_COUNT = 1000


def delete_queues(app: Celery, queues: Sequence[str]) -> None:
    """Delete *queues*, their exchanges, and their unacknowledged messages.

    On Redis all queues share one hash of unacknowledged messages. It is scanned, and only messages
    of *queues* are deleted.
    """
    with app.connection_for_write() as connection, connection.channel() as channel:
        if hasattr(channel, "unacked_key"):
            from celery_leases.stores.redis.workers import Workers

            _delete_unacknowledged(channel, queues)
            Workers(channel.pool, prefix_of(channel)).forget_all(HOSTNAME)
        for name in queues:
            queue = app.amqp.queues[name].bind(channel)
            queue.declare()  # kombu knows the bindings only of queues that this process has declared
            queue.delete()
            if connection.transport.driver_type == "amqp" and queue.exchange.name == name:
                channel.exchange_delete(name)
            app.amqp.queues.pop(name, None)


def _delete_unacknowledged(channel: Any, queues: Sequence[str]) -> None:
    """Delete them from kombu's hash in Redis, whose values are ``[message, exchange, key]``."""
    with channel.conn_or_acquire() as client:
        cursor = 0
        while True:
            # kombu adds its global prefix to the names in HDEL and ZREM, but not in HSCAN.
            cursor, found = client.hscan(
                channel.global_keyprefix + channel.unacked_key, cursor, count=SCAN_COUNT
            )
            for tag, message in found.items():
                if json.loads(message)[2] in queues:
                    client.zrem(channel.unacked_index_key, tag)
                    client.hdel(channel.unacked_key, tag)
            if not cursor:
                return


def delete_keys(process: Process, calls: Collection[tuple[str, str]]) -> None:
    """Delete the records, leases and marks of *calls*, which are pairs of a key and a call id.

    Leases are deleted although workers may hold them.
    """
    from celery_leases.stores.sql.leases import DatabaseLeaseStore

    records, leases = process.records, process.leases
    keys = {stored_key(TASK, key) for key, _ in calls}
    for stored in keys:
        records.reset(stored, keep=True)  # raise the fence first, so that late outcomes are refused
        if (holder := leases.holder(stored)) is not None:
            leases.release(stored, holder.token)
        leases.end_cooldown(stored)
    for key, call in calls:
        for mark in (waiter_mark(call, 0), callbacks_mark(call)):
            _expire(process.leases, stored_key(TASK, key), mark)
    if isinstance(leases, DatabaseLeaseStore):
        leases.delete_marks([*keys])
    for key in {key for key, _ in calls}:
        # One second more, in case the database's clock was set back.
        unmoved = RecordFilter(task=TASK, prefix=key, unmoved_since=records.now() + 1_000_000)
        records.delete_unmoved(unmoved, SCAN_COUNT)


def _expire(marks: MarkStore, stored: str, mark: str) -> None:
    if (found := marks.mark(stored, mark)) is not None:
        marks.swap_mark(stored, mark, found, "", 0.001)
