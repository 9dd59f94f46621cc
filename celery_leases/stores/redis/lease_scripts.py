"""The Lua scripts for leases and marks in Redis. Each is one atomic step on the keys of one task
key.

They run on Redis 6.2 to Valkey 9, so they use none of ``SET NX GET``, ``IFEQ`` and ``DELEX``. All
times are milliseconds.

The value of a lease is the owner token, a space, and the holder as JSON. Scripts compare token and
space, and never parse the JSON. The value of a cooling key is the same with the prefix
``cooling:``, so it never matches an owner token. A key that is not a string was written by another
program and counts as held. Any other error of a command, such as one of the ACL, ends the script.

The state of a group is one key, with the JSON that :func:`celery_leases.groups.slots.load` reads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from celery_leases.groups.slots import AHEAD, BEGIN_KEPT, BUSY, LEAD, MANY, OVERTAKING, PLACE_TTL

EPOCH_MS: Final = 30 * 86_400_000
"""The TTL of the epoch key, which records since when the server has had its data. Without the key
the server counts as new.

The value of the epoch key is the word ``up`` and the server's replication id. The id changes when a
replica is promoted and when a server restarts from its disk: both may have the key but lack the
latest leases. If the user may not call ``INFO``, the id is not compared. A script that takes a
lease sets the key if it is missing. Only :data:`AGE` compares the id, because ``INFO`` takes longer
than the rest of such a script.
"""


@dataclass(frozen=True)
class Script:
    """A Lua script and the number of its keys."""

    text: str
    keys: int

    @cached_property
    def sha(self) -> str:
        """The SHA-1 of the text, by which ``EVALSHA`` names the script."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def called(self) -> bytes:
        """The beginning of an ``EVALSHA`` of this script, up to its keys, in Redis' protocol."""
        keys = str(self.keys)
        return f"$7\r\nEVALSHA\r\n${len(self.sha)}\r\n{self.sha}\r\n${len(keys)}\r\n{keys}\r\n".encode()


COOLING: Final = "cooling:"
"""The prefix of the value of a key that is cooling down."""

GET: Final = """
local function get(key)
    local found = redis.pcall('GET', key)
    if type(found) == 'table' and not string.find(tostring(found.err), 'WRONGTYPE', 1, true) then
        error(tostring(found.err))
    end
    return found
end
"""
"""``get`` returns the value of a key, ``false`` for a missing key, and a table for a key that is
not a string.
"""

_OURS = (
    GET
    + """
local found = get(KEYS[1])
local ours = type(found) == 'string' and string.sub(found, 1, #ARGV[1]) == ARGV[1]
"""
)

_COOLING = f"""
local cooling = type(found) == 'string' and string.sub(found, 1, {len(COOLING)}) == '{COOLING}'
"""

_BEGIN_EPOCH = f"""
local function replication_id()
    local info = redis.pcall('INFO', 'replication')
    return type(info) == 'string' and string.match(info, 'master_replid:(%w+)')
end
local function begin_epoch(key, id) redis.call('SET', key, 'up ' .. (id or '1'), 'PX', {EPOCH_MS}) end
"""

TAKE_SLOT: Final = f"""
local function time_in_ms()
    local time = redis.call('TIME')
    return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function read_slots(key, now)
    local found = get(key)
    local readable, slots = pcall(cjson.decode, type(found) == 'string' and found or '{{}}')
    if not readable or type(slots) ~= 'table' then slots = {{}} end
    local began = math.min(tonumber(slots.began) or 0, now + {AHEAD})
    local state = {{held = {{}}, places = {{}}, began = began, pause = tonumber(slots.pause) or 0}}
    for token, slot in pairs(slots.held or {{}}) do if slot[1] > now then state.held[token] = slot end end
    for worker, place in pairs(slots.places or {{}}) do
        if place[2] > now and place[2] <= now + {PLACE_TTL} then state.places[worker] = place end
    end
    if slots.closed and slots.closed.counts > now then state.closed = slots.closed end
    return state
end
local function write_slots(key, slots, now)
    local ends = slots.began > 0 and slots.began + math.max(slots.pause, {BEGIN_KEPT}) or 0
    for _, slot in pairs(slots.held) do ends = math.max(ends, slot[1]) end
    for _, place in pairs(slots.places) do ends = math.max(ends, place[2]) end
    if slots.closed then ends = math.max(ends, slots.closed.counts) end
    if ends <= now then return redis.call('DEL', key) end
    redis.call('SET', key, cjson.encode(slots), 'PX', math.ceil(ends - now))
end
local function may_begin(slots, token, now)
    local closed = slots.closed
    return not closed or closed.ends <= now and (closed.alone == token or not slots.held[closed.alone])
end
local function probes(slots, token, now)
    local closed = slots.closed
    return closed and closed.ends <= now and closed.alone == token and slots.held[token]
end
local function room_in(slots, now, limit, pause, since, worker)
    local places, running, begins = {MANY}, 0, now
    for _, slot in pairs(slots.held) do
        running = running + 1
        if limit > 0 and slot[2] > 0 then limit = math.min(limit, slot[2]) end
    end
    if limit > 0 then places = limit - running end
    if pause > 0 then
        local gap = math.max(pause, slots.pause)
        local lead = now - slots.began < {BUSY} and {LEAD} or 0
        begins = math.max(now + lead, slots.began + gap)
        places = math.min(places, math.floor((now + {AHEAD} - begins) / gap) + 1)
    end
    if slots.closed then places = math.min(places, may_begin(slots, '', now) and 1 or 0) end
    if since == 0 then since = now end
    for name, place in pairs(slots.places) do
        if name ~= worker and place[1] < since - {OVERTAKING} then places = places - 1 end
    end
    return {{math.max(0, places), tostring(begins - now), running, limit, now}}, begins
end
local function take_slot(key, token, ours, ttl, limit, pause, since, worker)
    if limit == 0 and pause == 0 and not get(key) then return {{'taken', 0, 0}} end
    local now = time_in_ms()
    local slots = read_slots(key, now)
    local closed, mine = slots.closed, slots.held[token]
    if ours and not mine and limit == 0 and pause == 0 then return {{'taken', 0, 0}} end
    if not ours and not may_begin(slots, token, now) then return {{'shut', cjson.encode(slots), now}} end
    local starts_in = math.max(0, slots.began - now)
    if not mine then
        local room, begins = room_in(slots, now, limit, pause, since, worker)
        if room[1] <= 0 then return {{'full', unpack(room)}} end
        starts_in = begins - now
        if closed then closed.alone = token end
        if pause > 0 then slots.began, slots.pause = begins, pause end
        local place = slots.places[worker]
        if since > 0 and place and place[1] == since then slots.places[worker] = nil end
    end
    if limit > 0 or closed or mine then
        slots.held[token] = {{math.max(now + ttl, mine and mine[1] or 0), limit}}
    end
    write_slots(key, slots, now)
    return {{'taken', math.ceil(starts_in), probes(slots, token, now) and 1 or 0}}
end
"""
"""``take_slot`` returns ``taken``, in how many milliseconds the body may begin, and 1 if the
attempt is the probe; or ``full`` and the room; or ``shut``, the slots and the time. It does what
:func:`celery_leases.groups.slots.take` does, with the same names. *ours*: the token holds the
lease, so a closing is too late.
"""


def _acquire(*, in_group: bool) -> str:
    """The script that takes a lease; *in_group*, also what it needs of its group."""
    take = """
local taken = take_slot(KEYS[3], string.sub(ARGV[1], 1, -2), ours, ttl,
    tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7])
if taken[1] ~= 'taken' then return taken end
local starts_in, probe = taken[2], taken[3]
"""
    return (
        _OURS
        + _COOLING
        + _BEGIN_EPOCH
        + (TAKE_SLOT if in_group else "")
        + f"""
local ttl = tonumber(ARGV[3])
if not ours and cooling then
    return {{'cooling', string.sub(found, {len(COOLING)} + 1), redis.call('PTTL', KEYS[1])}}
end
if not ours and found then
    if type(found) ~= 'string' then found = '' end
    return {{'held', found, redis.call('PTTL', KEYS[1])}}
end
if not get(KEYS[2]) then begin_epoch(KEYS[2], replication_id()) end
{take if in_group else "local starts_in, probe = 0, 0"}
redis.call('SET', KEYS[1], ARGV[2], 'PX', ours and math.max(ttl, redis.call('PTTL', KEYS[1])) or ttl)
if not ours and starts_in == 0 and probe == 0 then return 1 end
return {{'acquired', starts_in, probe, ours and 1 or 0}}
"""
    )


ACQUIRE: Final = Script(_acquire(in_group=False), keys=2)
"""KEYS: lease, epoch. ARGV: token and space, value, ttl.

Returns 1 if the key was free and the body may begin at once. Otherwise a word and details:

* ``acquired``: in how many milliseconds the body may begin; 1 if the attempt is the probe; 1 if the
  token held the lease before
* ``held``: the value of the lease; its TTL
* ``cooling``: the value of the lease before the cooldown; the TTL
"""

ACQUIRE_IN_GROUP: Final = Script(_acquire(in_group=True), keys=3)
"""The same for a call with a group. A further key: the slots of the group. Further ARGV: limit,
pause, since, worker. Further words are those of ``take_slot``: ``full`` and ``shut``.
"""

AGE: Final = Script(
    GET
    + _BEGIN_EPOCH
    + f"""
local epoch, id = get(KEYS[1]), replication_id()
local life = string.match(type(epoch) == 'string' and epoch or '', '^up (%w+)$')
if not life or id and life ~= id then
    begin_epoch(KEYS[1], id)
    return 0
end
local left = redis.call('PTTL', KEYS[1])
return left < 0 and {EPOCH_MS} or {EPOCH_MS} - left
""",
    keys=1,
)
"""KEYS: epoch. Returns for how long the server has had its data."""

EVICTED: Final = Script(
    """
local function fact(section, pattern)
    local info = redis.pcall('INFO', section)
    return type(info) == 'string' and string.match(info, pattern)
end
if fact('memory', 'maxmemory_policy:noeviction') then return 0 end
return tonumber(fact('stats', 'evicted_keys:(%d+)') or 0)
""",
    keys=1,
)
"""KEYS: any key, for its server. Returns how many keys the server has evicted, if it may evict
more. If the user may not call ``INFO``, it returns 0.
"""

RENEW: Final = Script(
    _OURS
    + """
if not found then return 'missing' end
if not ours then return 'other' end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 'ours'
""",
    keys=1,
)
"""KEYS: lease. ARGV: token and space, ttl. Returns a value of ``RenewalResult``."""

REASSERT: Final = Script(
    _OURS
    + """
if ours then
    if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
    return 1
end
if found then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
""",
    keys=1,
)
"""KEYS: lease. ARGV: token and space, value, ttl. Returns 1 if the token holds the lease now."""

RELEASE: Final = Script(
    _OURS
    + """
if ours then return redis.call('DEL', KEYS[1]) end
return 0
""",
    keys=1,
)
"""KEYS: lease. ARGV: token and space. Returns 1 if the lease was deleted."""

COOL: Final = Script(
    _OURS
    + f"""
if ours then
    redis.call('SET', KEYS[1], '{COOLING}' .. found, 'PX', ARGV[2])
    return 1
end
local begin = '{COOLING}' .. ARGV[1]
return type(found) == 'string' and string.sub(found, 1, #begin) == begin and 1 or 0
""",
    keys=1,
)
"""KEYS: lease. ARGV: token and space, length of the cooldown. Returns 1 if the key is cooling after
the token's attempt.
"""

END_COOLDOWN: Final = Script(
    GET
    + "local found = get(KEYS[1])"
    + _COOLING
    + """
return cooling and redis.call('DEL', KEYS[1]) or 0
""",
    keys=1,
)
"""KEYS: lease. Returns 1 if the key was cooling and was deleted."""

_BURST: Final = (
    GET
    + """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local found = get(KEYS[1])
local newest, first = string.match(type(found) == 'string' and found or '', '^(%d+) (%d+)$')
newest, first = tonumber(newest) or 0, tonumber(first) or 0
local function note(ttl) redis.call('SET', KEYS[1], string.format('%.0f %.0f', newest, first), 'PX', ttl) end
"""
)
"""``newest`` and ``first`` of :class:`~celery_leases.decide.latest.Burst`, in microseconds; 0 if
the key does not exist. ``note`` writes them.
"""

NEW_ORDER: Final = Script(
    _BURST
    + """
local order = tonumber(ARGV[1])
if order == 0 then order = math.max(now, newest + 1) end
if order > newest or newest == tonumber(ARGV[3]) then
    newest = order
    if first == 0 then first = order end
    note(ARGV[2])
end
return order
""",
    keys=1,
)
"""KEYS: mark. ARGV: the order of a call, or 0 for a new one; ttl; an order that a lower one may
replace, or 0. Returns the order.
"""

READ_BURST: Final = Script(_BURST + "return {now, newest, first}", keys=1)
"""KEYS: mark. Returns the time, and ``newest`` and ``first``."""

END_BURST: Final = Script(
    _BURST
    + """
if newest == 0 then return 0 end
first = newest > tonumber(ARGV[1]) and now or 0
note(ARGV[2])
return 1
""",
    keys=1,
)
"""KEYS: mark. ARGV: the order of the call whose run begins, ttl."""

SWAP_MARK: Final = Script(
    GET
    + """
local found = get(KEYS[1])
if found and found ~= ARGV[3] and not (ARGV[1] == '1' and found == ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
return 1
""",
    keys=1,
)
"""KEYS: mark. ARGV: 1 if a value is expected, the expected value, the new value, ttl. Returns 1 if
the mark was set or already had the new value.
"""
