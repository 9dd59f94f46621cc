"""The Lua scripts for leases and marks in Redis, each one atomic step on the keys of one task key.

They run on everything from Redis 6.2 to Valkey 9, so they use none of ``SET NX GET``, ``IFEQ`` and
``DELEX``. A lease value is the owner token, a blank, and the holder as JSON; scripts compare token
and blank, and never parse the JSON. A cooling key has the same value after the prefix ``cooling:``,
so no comparison with the owner's token matches it. A key of another type than string, which another
program wrote, counts as held. Any other error of a command, such as a refusal by the ACL, ends the
script. All times are milliseconds.

The gate of a cooldown group has three keys: ``trips`` exists unless the gate is open, and holds the
number of consecutive closings, a blank, and the reason as JSON. ``closed`` exists while no body may
start. ``probe`` is the probe's slot, in the form of a lease.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

EPOCH_MS: Final = 30 * 86_400_000
"""How long a store remembers since when it has had its data; afterwards it counts as new.

The value of the epoch key is the word ``up`` and the server's replication id. The id changes when a
replica is promoted or a server restarts from its disk: either may have the key but lack the latest
leases. Without the right to call ``INFO`` the id is not compared. A script that takes a lease sets
a missing key. Only :data:`AGE` compares the id, because ``INFO`` costs more than the rest of such a
script.
"""


@dataclass(frozen=True)
class Script:
    """A script, the number of its keys, and the name the server caches it under."""

    text: str
    keys: int

    @cached_property
    def sha(self) -> str:
        """The SHA-1 of the text, which is how ``EVALSHA`` finds it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def called(self) -> bytes:
        """``EVALSHA`` of this script up to its keys, as Redis' protocol has it."""
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
"""``get`` a key: its value, ``false`` without one, a table where it is no string."""

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

LOOK_AT_GATE: Final = """
local function look(trips, closed, probe)
    local tally, slot = get(trips), get(probe)
    if type(tally) ~= 'string' then return nil end
    if type(slot) ~= 'string' then slot = '' end
    return {tally, math.max(redis.call('PTTL', closed), 0), slot, math.max(redis.call('PTTL', probe), 0)}
end
local function probes(gate) return gate and string.sub(gate[3], 1, #ARGV[1]) == ARGV[1] end
"""
"""``look`` returns a gate's tally, how long it stays closed, the slot's value, and how long that
lasts; ``nil`` for an open gate.

It uses ``get``. ``probes`` says whether the token in ``ARGV[1]`` holds the slot.
"""

_BEGIN_EPOCH = f"""
local function history()
    local info = redis.pcall('INFO', 'replication')
    return type(info) == 'string' and string.match(info, 'master_replid:(%w+)')
end
local function begin_epoch(key, id) redis.call('SET', key, 'up ' .. (id or '1'), 'PX', {EPOCH_MS}) end
"""

ACQUIRE: Final = Script(
    _OURS
    + _COOLING
    + LOOK_AT_GATE
    + _BEGIN_EPOCH
    + f"""
local ttl = tonumber(ARGV[3])
local gate = KEYS[3] and look(KEYS[3], KEYS[4], KEYS[5])
if not ours and cooling then
    return {{'cooling', string.sub(found, {len(COOLING)} + 1), redis.call('PTTL', KEYS[1])}}
end
if not ours and found then
    if type(found) ~= 'string' then found = '' end
    return {{'held', found, redis.call('PTTL', KEYS[1])}}
end
if not get(KEYS[2]) then begin_epoch(KEYS[2], history()) end
if ours then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', math.max(ttl, redis.call('PTTL', KEYS[1])))
    if not probes(gate) then return {{'acquired', 0, 1}} end
    if gate[4] < ttl then redis.call('PEXPIRE', KEYS[5], ttl) end
    return {{'acquired', 1, 1}}
end
if gate then
    if gate[2] > 0 or gate[3] ~= '' and not probes(gate) then return {{'shut', gate[1], gate[2], gate[3], gate[4]}} end
    redis.call('SET', KEYS[5], ARGV[2], 'PX', ttl)
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ttl)
return gate and {{'acquired', 1, 0}} or 1
""",
    keys=2,
)
"""KEYS: lease, epoch. ARGV: token and blank, value, ttl.

Returns 1 if the key was free and there is no gate or an open one. Otherwise a word and details:
``acquired``, 1 with the probe's slot, 1 if the token held the lease before; ``held``, the value,
for how long; ``cooling``, the earlier value, for how long; ``shut``, the result of ``look``.
"""

ACQUIRE_IN_GROUP: Final = replace(ACQUIRE, keys=5)
"""The same for a claim request with a group; KEYS: lease, epoch, trips, closed and probe of its
gate.
"""

AGE: Final = Script(
    GET
    + _BEGIN_EPOCH
    + f"""
local epoch, id = get(KEYS[1]), history()
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
"""KEYS: epoch. Returns the age of the store."""

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
"""KEYS: lease. ARGV: token and blank, ttl. Returns a value of ``RenewalResult``."""

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
"""KEYS: lease. ARGV: token and blank, value, ttl. Returns 1 when the lease is ours."""

RELEASE: Final = Script(
    _OURS
    + """
if ours then return redis.call('DEL', KEYS[1]) end
return 0
""",
    keys=1,
)
"""KEYS: lease. ARGV: token and blank. Returns 1 when it was deleted."""

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
"""KEYS: lease. ARGV: token and blank, how long. Returns 1 when the key is cooling after the token's
attempt.
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
"""KEYS: lease. Returns 1 when it was cooling, and was deleted."""

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
"""KEYS: mark. ARGV: 1 if a value is expected, that value, the new value, ttl. Returns 1 when it was
set.
"""
