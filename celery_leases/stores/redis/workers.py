"""The leases of workers in the broker's Redis, and the messages that each of them has not
acknowledged.

A sorted set has the workers by the end of their leases, on the server's clock in milliseconds. A
hash for each worker has its messages: the delivery tag, and when it was fetched. A worker whose
lease has ended gets another name before its messages are returned, so that it learns of that when
it comes back. Under this name, the worker that returns the messages holds a lease of its own. Both
names say when messages may have been fetched that were not registered any more: the first one ends
with the ttl, the second one with the time at which the lease has ended, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, cast

import redis

from celery_leases.stores.redis.lease_scripts import Script
from celery_leases.stores.redis.values import as_text

Fetched = bytes | float | str
"""When a message was fetched, in seconds since 1970, as kombu's index has it; ``""``: not known.

A message keeps its tag when it is returned and fetched again. This time is another one then, so it
tells whose delivery a worker ends, or has registered.
"""
Push = tuple[str, str, str]
"""A command of Redis, a queue, and the message that it pushes."""
Move = tuple[str, Fetched, Sequence[Push]]
"""A message that is to be returned: its tag, when it was fetched, and what is to be pushed."""

BATCH: Final = 10
"""Ended workers that one call returns, at most."""
_ENDED: Final = "!"
"""Separates the name of an ended worker from the time at which its lease has ended, in digits."""

CLOCKS_DIFFER: Final = 5.0
"""By how many seconds the clock of a worker, which kombu notes when it fetches a message, differs
from that of the server, at most.
"""
_UNANSWERED: Final = 60.0
"""Seconds for which kombu may wait for the reply to a fetch, while the worker renews its lease."""
_REGISTERED_AFTER: Final = 0.5
"""Seconds after which a living worker has registered a message that it has fetched."""

_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

ENTER: Final = Script(
    _NOW + "return redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])",
    keys=1,
)
"""KEYS: the workers. ARGV: the name of a new worker, its ttl."""

_IS_LATEST: Final = """
local function is_latest(index, tag, fetched)
    return fetched == '' or tonumber(fetched) == tonumber(redis.call('ZSCORE', index, tag) or '')
end
"""
"""Whether an unacknowledged message was fetched then for the last time."""

RENEW: Final = Script(
    _NOW
    + _IS_LATEST
    + f"""
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return false end
local ended = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now, 'LIMIT', 0, {BATCH})
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
local added = tonumber(ARGV[4])
for place = 5, 4 + added, 2 do redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 1]) end
local last = 5 + added + 2 * ARGV[5 + added]
for place = 6 + added, last, 2 do
    if is_latest(KEYS[4], ARGV[place], ARGV[place + 1]) then
        redis.call('HDEL', KEYS[3], ARGV[place])
        redis.call('ZREM', KEYS[4], ARGV[place])
    end
end
for place = last + 1, #ARGV do redis.call('HDEL', KEYS[2], ARGV[place]) end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return ended
""",
    keys=4,
)
"""KEYS: the workers, the messages of this worker, kombu's unacknowledged messages, kombu's index of
these. ARGV: its name, its ttl, how long its messages are kept, the number of the arguments that
follow for added messages (tag and time of the fetch), these, the number of acknowledged messages,
these, the tags of all ended messages. Returns the workers whose leases have ended; ``nil``, and
nothing was done, if the worker is not known.
"""

TAKE: Final = Script(
    _NOW
    + f"""
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score or tonumber(score) >= now then return false end
local name = ARGV[1]
if not string.find(name, '{_ENDED}%d+$') then
    local ended = string.format('{_ENDED}%.0f', score)
    name = name .. ended
    if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('RENAME', KEYS[2], KEYS[2] .. ended) end
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[1], now + ARGV[2], name)
return name
""",
    keys=2,
)
"""KEYS: the workers, the messages of an ended worker. ARGV: its name, the ttl of the lease on its
messages. Returns the name under which these are now; ``nil`` if its lease or that on its messages
has not ended.
"""

FETCHED: Final = Script(
    _NOW
    + f"""
local last = math.min(ARGV[2], now / 1000 - {_REGISTERED_AFTER})
return redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], string.format('%.3f', last), 'WITHSCORES')
""",
    keys=1,
)
"""KEYS: kombu's index of unacknowledged messages. ARGV: two times in seconds. Returns tag and
time of the fetch of messages that were fetched between these, except those that a worker may just
have fetched.
"""

_UNREGISTERED: Final = (
    _IS_LATEST
    + """
local workers = redis.call('ZRANGE', KEYS[1], 0, -1)
local function unregistered(index, tag)
    for _, worker in ipairs(workers) do
        local fetched = redis.call('HGET', KEYS[1] .. ':' .. worker, tag)
        if fetched and is_latest(index, tag, fetched) then return false end
    end
    return true
end
"""
)

UNREGISTERED: Final = Script(
    _UNREGISTERED
    + """
local found = {}
for _, tag in ipairs(ARGV) do
    local message = unregistered(KEYS[3], tag) and redis.call('HGET', KEYS[2], tag)
    if message then
        found[#found + 1] = tag
        found[#found + 1] = message
    end
end
return found
""",
    keys=3,
)
"""KEYS: the workers, kombu's unacknowledged messages, kombu's index of these. ARGV: tags. Returns
tag and message of those that no worker has registered.
"""

REGISTER: Final = Script(
    _UNREGISTERED
    + """
local added = {}
for place = 2, #ARGV, 2 do
    if unregistered(KEYS[3], ARGV[place]) then
        redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 1])
        added[#added + 1] = ARGV[place]
    end
end
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return added
""",
    keys=3,
)
"""KEYS: the workers, the messages of an ended worker, kombu's index of unacknowledged messages.
ARGV: how long these are kept, tag and time of the fetch of further messages. Adds those that no
worker has registered, and returns their tags.
"""

UNACKNOWLEDGED: Final = Script(
    _IS_LATEST
    + """
local found = {}
for _, tag in ipairs(ARGV) do
    local message, fetched = redis.call('HGET', KEYS[2], tag), redis.call('HGET', KEYS[1], tag)
    if not message or fetched and not is_latest(KEYS[3], tag, fetched) then
        redis.call('HDEL', KEYS[1], tag)
    elseif fetched then
        found[#found + 1] = {tag, redis.call('ZSCORE', KEYS[3], tag) or '', message}
    end
end
return found
""",
    keys=3,
)
"""KEYS: the messages of an ended worker, kombu's unacknowledged messages, kombu's index of these.
ARGV: tags. Returns tag, time of the fetch and message of those that are registered there; removes
the registrations of those that were acknowledged or fetched again.
"""

GIVE_BACK: Final = Script(
    _IS_LATEST
    + """
local returned, place = 0, 2
while place <= #ARGV do
    local tag, pushes = ARGV[place], 3 * ARGV[place + 2]
    if is_latest(KEYS[2], tag, ARGV[place + 1]) and redis.call('HDEL', KEYS[1], tag) == 1 then
        redis.call('ZREM', KEYS[2], tag)
        for push = place + 3, place + 2 + pushes, 3 do
            redis.call(ARGV[push], ARGV[1] .. ARGV[push + 1], ARGV[push + 2])
        end
        returned = returned + 1
    end
    place = place + 3 + pushes
end
return returned
""",
    keys=2,
)
"""KEYS: kombu's unacknowledged messages, kombu's index of these. ARGV: the prefix of all queues;
for each message: tag, time of the fetch, number of the pushes that follow, and for each of them
command, queue and message. Returns how many messages it has returned; kombu or another worker has
returned the others.
"""

FETCH: Final = Script(
    """
local last = #KEYS
for place = 1, last - 2 do
    local stored = redis.call('LINDEX', KEYS[place], -1)
    if stored then
        local read, message = pcall(cjson.decode, stored)
        local properties = read and type(message) == 'table' and message.properties
        local way = type(properties) == 'table' and properties.delivery_info
        if type(way) ~= 'table' or type(way.exchange) ~= 'string'
            or type(way.routing_key) ~= 'string' or type(properties.delivery_tag) ~= 'string' then
            return {}
        end
        local tag, names = properties.delivery_tag, cjson.encode({way.exchange, way.routing_key})
        redis.call('ZADD', KEYS[last], ARGV[1], tag)
        redis.call('HSET', KEYS[last - 1], tag, '[' .. stored .. ',' .. string.sub(names, 2))
        redis.call('RPOP', KEYS[place])
        return {KEYS[place], stored, tag}
    end
end
return false
""",
    keys=0,
)
"""KEYS: queues, kombu's unacknowledged messages, kombu's index of these. ARGV: the time in seconds.
Takes the oldest message of the first queue that has one, and notes it as kombu does. Returns queue,
message and tag; an empty list, and takes nothing, if the message lacks what the note needs;
``nil`` if all queues are empty.
"""

FORGET: Final = Script(
    """
redis.call('ZREM', KEYS[1], ARGV[1])
return redis.call('DEL', KEYS[2])
""",
    keys=2,
)
"""KEYS: the workers, the messages of this worker. ARGV: its name."""

LIST: Final = Script(
    _NOW
    + """
local found = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for place = 1, #found, 2 do
    found[place + 1] = tostring(found[place + 1] - now)
    found[place] = {found[place], redis.call('HLEN', KEYS[1] .. ':' .. found[place])}
end
return found
""",
    keys=1,
)
"""KEYS: the workers. Returns for each its name and the number of its messages, and after how many
milliseconds its lease ends.
"""


def own_name(name: str) -> str:
    """The name that a worker has given itself; *name* may be that of an ended one."""
    before, _, time = name.rpartition(_ENDED)
    return before if time.isdigit() else name


def name_of(host: str, pid: int, word: str, ttl: float) -> str:
    """The name that a worker gives itself; *word* is a new one for each lease."""
    return f"{host}/{pid}/{word}/{round(ttl * 1000)}"


def _fetched_between(ended: str) -> tuple[float, float]:
    """When a worker may have fetched messages that it has not registered, in seconds: before its
    lease ended, and after it renewed this for the last time, or sent a request without a reply.
    """
    name, _, end = ended.rpartition(_ENDED)
    ttl = name.rpartition("/")[2]
    since = int(end) - (int(ttl) if ttl.isdigit() else 0)
    return since / 1000 - CLOCKS_DIFFER - _UNANSWERED, int(end) / 1000 + CLOCKS_DIFFER


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker on a Redis broker: the number of leased messages that it has not acknowledged, and
    the seconds until its lease ends (negative: it has ended; ``None``: its messages are being
    returned).
    """

    name: str
    messages: int
    remaining: float | None


class Workers:
    """The leases of workers on the Redis of *pool*, a pool of redis-py, under keys that begin with
    *prefix*.

    Every method raises the errors of redis-py.
    """

    def __init__(self, pool: Any, prefix: str) -> None:
        self._client = redis.Redis(connection_pool=pool)
        self._workers = f"{prefix}:workers"

    def enter(self, name: str, ttl: float) -> None:
        """Give a new worker a lease of *ttl* seconds.

        If that fails, enter under another name: a request that arrives late must not revive a
        worker whose messages were returned.
        """
        self._eval(ENTER, self._workers, name, round(ttl * 1000))

    def renew(
        self,
        name: str,
        ttl: float,
        kept: float,
        added: Mapping[str, Fetched],
        ended: Sequence[str],
        acknowledged: Mapping[str, Fetched] = MappingProxyType({}),
        unacked: str = "unacked",
        index: str = "unacked_index",
    ) -> Sequence[str] | None:
        """Renew the lease of worker *name* for *ttl* seconds, and write which messages it has got,
        and when, and which have ended, and acknowledge some, unless they were fetched again;
        *unacked* and *index* are kombu's keys.

        Returns the names of workers whose leases have ended; ``None``, and does nothing, if the
        worker is not known: another one has taken its messages, or the broker was emptied. The
        messages of a dead worker are kept for *kept* seconds.
        """
        pairs = [part for pair in added.items() for part in pair]
        times = (round(ttl * 1000), round(kept * 1000))
        over = (len(acknowledged), *chain.from_iterable(acknowledged.items()), *ended)
        keys = (self._workers, self.messages(name), unacked, index)
        dead = self._eval(RENEW, *keys, name, *times, len(pairs), *pairs, *over)
        return None if dead is None else [as_text(one) for one in dead]

    def take(self, name: str, ttl: float) -> tuple[str, Sequence[str]] | None:
        """The messages of a worker whose lease has ended, the newest first, and the name under
        which they are now; ``None`` if it has not ended. For *ttl* seconds, no other caller gets
        them.
        """
        now = self._run(TAKE, name, name, round(ttl * 1000))
        if now is None:
            return None
        ended = as_text(now)
        return ended, [as_text(tag) for tag in self._client.hkeys(self.messages(ended))[::-1]]

    def fetched(self, ended: str, index: str) -> Mapping[str, Fetched]:
        """The tags of the messages that were fetched when the *ended* worker may have lived without
        registering them, the newest first, and when that was; *index* is kombu's key of the times
        at which messages were fetched.
        """
        found = self._eval(FETCHED, index, *_fetched_between(ended))
        return dict(zip(map(as_text, found[-2::-2]), found[::-2], strict=True))

    def unregistered(self, tags: Sequence[str], unacked: str, index: str) -> Mapping[str, bytes]:
        """Those of these messages that no worker has registered, by tag; *unacked* and *index* are
        kombu's keys.
        """
        found = self._eval(UNREGISTERED, self._workers, unacked, index, *tags)
        return dict(zip(map(as_text, found[::2]), found[1::2], strict=True))

    def register(
        self, ended: str, kept: float, added: Mapping[str, Fetched], index: str
    ) -> Sequence[str]:
        """Register messages for an *ended* worker, and return the tags of those that no other
        worker has registered meanwhile. They are kept for *kept* seconds.
        """
        pairs = chain.from_iterable(added.items())
        keys = (self._workers, self.messages(ended), index)
        found = self._eval(REGISTER, *keys, round(kept * 1000), *pairs)
        return [as_text(tag) for tag in found]

    def unacknowledged(
        self, ended: str, tags: Sequence[str], unacked: str, index: str
    ) -> Sequence[tuple[str, Fetched, bytes]]:
        """Which of these messages an *ended* worker has registered, and are not acknowledged: the
        tag, when it was fetched, and the message. *unacked* and *index* are kombu's keys.
        """
        found = self._eval(UNACKNOWLEDGED, self.messages(ended), unacked, index, *tags)
        return [(as_text(tag), fetched, message) for tag, fetched, message in found]

    def stored(self, tag: str, unacked: str) -> bytes | None:
        """An unacknowledged message; ``None`` if there is no such message."""
        return cast("bytes | None", self._client.hget(unacked, tag))

    def give_back(self, moves: Sequence[Move], unacked: str, index: str, prefix: str) -> int:
        """Return messages to queues whose keys begin with *prefix*, except those that somebody has
        returned since; return how many.
        """
        parts = (
            (tag, fetched, len(pushes), *chain.from_iterable(pushes))
            for tag, fetched, pushes in moves
        )
        given = (unacked, index, prefix, *chain.from_iterable(parts))
        return int(self._eval(GIVE_BACK, *given))

    def forget(self, name: str) -> None:
        """Remove a worker and its messages."""
        self._run(FORGET, name, name)

    def forget_all(self, beginning: str) -> None:
        """Remove all workers whose names begin so."""
        for name in map(as_text, self._client.zrange(self._workers, 0, -1)):
            if name.startswith(beginning):
                self.forget(name)

    def listed(self) -> Sequence[WorkerState]:
        """All workers."""
        found = self._eval(LIST, self._workers)
        states = []
        for (name, messages), left in zip(found[::2], found[1::2], strict=True):
            text = as_text(name)
            remaining = None if own_name(text) != text else float(left) / 1000
            states.append(WorkerState(own_name(text), int(messages), remaining))
        return states

    def messages(self, name: str) -> str:
        """The key of the messages of worker *name*."""
        return f"{self._workers}:{name}"

    def _run(self, script: Script, name: str, *args: Any) -> Any:
        return self._eval(script, self._workers, self.messages(name), *args)

    def _eval(self, script: Script, *args: Any) -> Any:
        return self._client.eval(script.text, script.keys, *args)
