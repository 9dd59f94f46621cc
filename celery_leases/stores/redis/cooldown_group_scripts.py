"""The Lua scripts for the gates of cooldown groups. KEYS of each: trips, closed and probe of a
gate, and its history.
"""

from __future__ import annotations

from typing import Final

from celery_leases.groups.slots import PLACE_TTL
from celery_leases.stores.redis.lease_scripts import GET, READ_GATE, TAKE_SLOT, Script

_READ_GATE: Final = GET + READ_GATE

READ: Final = Script(_READ_GATE + "return read_gate(KEYS[1], KEYS[2], KEYS[3]) or false", keys=3)
"""Returns the result of ``read_gate``; ``false`` for an open gate."""

READ_WITH_HISTORY: Final = Script(
    _READ_GATE
    + """
local past = get(KEYS[4])
return {read_gate(KEYS[1], KEYS[2], KEYS[3]) or false, type(past) == 'string' and past}
""",
    keys=4,
)
"""Returns the result of :data:`READ`, and the history; ``false`` without a history."""

CLOSE: Final = Script(
    _READ_GATE
    + """
local gate = read_gate(KEYS[1], KEYS[2], KEYS[3])
local trips = gate and (string.match(gate[1], '^[1-9]%d*') or '1') or '0'
local closed_for, mine = gate and gate[2] or 0, holds_probe(gate)
local as_seen = trips == ARGV[2] and (closed_for > 0) == (ARGV[3] == '1') and (mine and '1' or '0') == ARGV[4]
if not as_seen or closed_for > tonumber(ARGV[6]) then return 0 end
redis.call('SET', KEYS[2], '1', 'PX', ARGV[6])
redis.call('SET', KEYS[1], ARGV[5], 'PX', math.max(tonumber(ARGV[7]), redis.call('PTTL', KEYS[1])))
if mine then redis.call('DEL', KEYS[3]) end
redis.call('SET', KEYS[4], ARGV[8], 'PX', ARGV[9])
return 1
""",
    keys=4,
)
"""ARGV: token and space; the expected trips (0: open); 1 if the gate is expected to be closed; 1 if
the token is expected to hold the probe slot; the new value of ``trips``; the TTLs of ``closed`` and
``trips``; the history and its TTL. Returns 1 if the script closed the gate; 0 if the gate is not
as expected, or is closed for longer.

The reason is not compared, so failures that differ only in their message do not conflict.
"""

OPEN: Final = Script(
    _READ_GATE
    + """
local gate = read_gate(KEYS[1], KEYS[2], KEYS[3])
if ARGV[1] ~= '' and (not holds_probe(gate) or gate[2] > 0) then return 0 end
redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
return redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
""",
    keys=4,
)
"""ARGV: token and space, the history and its TTL. Returns 0 unless the gate was half-open and the
token held its probe slot; without a token the gate is opened in any case.
"""

ENTER: Final = Script(
    _READ_GATE
    + """
local gate, ttl = read_gate(KEYS[1], KEYS[2], KEYS[3]), tonumber(ARGV[3])
if not gate then return {'open'} end
if ARGV[4] == '1' then
    if not holds_probe(gate) then return {'open'} end
    if gate[4] < ttl then redis.call('PEXPIRE', KEYS[3], ttl) end
    return {'probe'}
end
if gate[2] > 0 or gate[3] ~= '' and not holds_probe(gate) then return {'shut', gate[1], gate[2], gate[3], gate[4]} end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ttl)
return {'probe'}
""",
    keys=3,
)
"""The gate's part of ``ACQUIRE_IN_GROUP``, after ``ACQUIRE`` took the lease on another node of a
cluster.

ARGV: token and space, value, ttl, 1 if the token held the lease before. Returns ``open``; or
``probe`` if the token holds the probe slot; or ``shut`` and the result of ``read_gate``.
"""

_SLOTS: Final = GET + TAKE_SLOT

TAKE: Final = Script(
    _SLOTS
    + """
local starts_in, room = take_slot(KEYS[1], ARGV[1], tonumber(ARGV[2]),
    tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6])
if not starts_in then return {'full', unpack(room)} end
return {'taken', starts_in}
""",
    keys=1,
)
"""The slot's part of ``ACQUIRE_WITH_SLOT``, on another node of a cluster. KEYS: the slots. ARGV:
token, ttl, limit, pause, since, worker. Returns ``taken``, and in how many milliseconds the body
may begin; or ``full`` and the room.
"""

RENEW_SLOT: Final = Script(
    _SLOTS
    + """
local now = time_in_ms()
local slots = read_slots(KEYS[1], now)
local mine = slots.held[ARGV[1]]
slots.held[ARGV[1]] = {math.max(now + tonumber(ARGV[2]), mine and mine[1] or 0), tonumber(ARGV[3])}
write_slots(KEYS[1], slots, now)
return 1
""",
    keys=1,
)
"""KEYS: the slots. ARGV: token, ttl, limit. A slot that is missing is written again."""

RELEASE_SLOT: Final = Script(
    _SLOTS
    + """
local now = time_in_ms()
local slots = read_slots(KEYS[1], now)
slots.held[ARGV[1]] = nil
write_slots(KEYS[1], slots, now)
return 1
""",
    keys=1,
)
"""KEYS: the slots. ARGV: token."""

ROOM: Final = Script(
    _SLOTS
    + f"""
local now, worker, since = time_in_ms(), ARGV[4], tonumber(ARGV[3])
local slots = read_slots(KEYS[1], now)
if worker ~= '' then
    slots.places[worker] = since > 0 and {{since, now + {PLACE_TTL}}} or nil
    write_slots(KEYS[1], slots, now)
end
return (room_in(slots, now, tonumber(ARGV[1]), tonumber(ARGV[2]), since, worker))
""",
    keys=1,
)
"""KEYS: the slots. ARGV: limit, pause, since, worker. Returns the room for this worker, whose place
in the waiting list is written, or removed if since is 0. A worker without a name takes no place.
"""

READ_SLOTS: Final = Script(
    _SLOTS + "return {get(KEYS[1]), time_in_ms()}",
    keys=1,
)
"""Returns the slots as JSON, and the time."""
