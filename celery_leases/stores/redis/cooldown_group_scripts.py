"""The Lua scripts for the state of groups. The first key of each are the slots of a group."""

from __future__ import annotations

from typing import Final

from celery_leases.groups.slots import PLACE_TTL
from celery_leases.stores.redis.lease_scripts import GET, TAKE_SLOT, Script

_SLOTS: Final = GET + TAKE_SLOT

CLOSE: Final = Script(
    _SLOTS
    + """
local now, token, lasts = time_in_ms(), ARGV[1], tonumber(ARGV[6])
local slots = read_slots(KEYS[1], now)
local before = slots.closed or {in_a_row = 0, ends = 0, counts = 0}
local state = {before.in_a_row, before.ends > now and 1 or 0, probes(slots, token, now) and 1 or 0}
for place, each in ipairs(state) do if each ~= tonumber(ARGV[1 + place]) then return 0 end end
if before.ends > now + lasts then return 0 end
slots.closed = {
    in_a_row = tonumber(ARGV[5]), ends = now + lasts, counts = math.max(now + tonumber(ARGV[7]), before.counts),
    why = ARGV[8], alone = before.alone,
}
slots.held[token] = nil
write_slots(KEYS[1], slots, now)
redis.call('SET', KEYS[2], ARGV[9], 'PX', ARGV[10])
return 1
""",
    keys=2,
)
"""KEYS: slots, history. ARGV: token; the expected number of closings in a row (0: open); 1 if the
group is expected to be closed; 1 if the token is expected to be the probe; the new number; for how
long the group is closed, and for how long that number counts; why; the history and its TTL. Returns
1 if the script closed the group; 0 if the group is not as expected, or is closed for longer.

The reason is not compared, so failures that differ only in their message do not conflict.
"""

OPEN: Final = Script(
    _SLOTS
    + """
local now = time_in_ms()
local slots = read_slots(KEYS[1], now)
if not slots.closed or ARGV[1] ~= '' and not probes(slots, ARGV[1], now) then return 0 end
slots.closed, slots.held[ARGV[1]] = nil, nil
write_slots(KEYS[1], slots, now)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
""",
    keys=2,
)
"""KEYS: slots, history. ARGV: token, the history and its TTL. Returns 0 unless the token was the
probe; without a token the group is opened in any case.
"""

TAKE: Final = Script(
    _SLOTS
    + """
return take_slot(KEYS[1], ARGV[1], ARGV[2] == '1', tonumber(ARGV[3]),
    tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7])
""",
    keys=1,
)
"""The group's part of ``ACQUIRE_IN_GROUP``, on another node of a cluster. ARGV: token, 1 if it held
the lease before, ttl, limit, pause, since, worker. Returns the result of ``take_slot``.
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

_READ: Final = (
    _SLOTS
    + """
local function text(key)
    local found = get(key)
    return type(found) == 'string' and found
end
"""
)

READ_SLOTS: Final = Script(_READ + "return {text(KEYS[1]), time_in_ms()}", keys=1)
"""Returns the slots as JSON, and the time."""

READ_WITH_HISTORY: Final = Script(
    _READ + "return {text(KEYS[1]), time_in_ms(), text(KEYS[2])}", keys=2
)
"""KEYS: slots, history. Returns the same, and the history."""
