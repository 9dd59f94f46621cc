"""The state of a group: how many of its bodies run, when the next one may begin, and whether a
failure has closed it. Pure.

A body of a group with a limit holds a slot, which is a lease: it has the attempt's owner token,
expires by itself, and is renewed together with the lease of the key. A rate keeps two begins apart.
Workers with waiting calls register the time of the oldest one, so that a call that came later waits
for its turn. After the time for which a failure has closed it, the limit of any group is one:
the attempt that takes the slot is the probe. All times are milliseconds by the clock of the store,
except where a name says otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery_leases.failures.actions import Reason
from celery_leases.groups.group import Closed, ClosedGroup, Closing, closed_group_from, reason_json
from celery_leases.value_class import value_class

AHEAD: Final = 400.0
"""A call whose turn by the rate comes within this time is admitted now, and waits in its process:
so bodies begin evenly, however seldom the workers ask.
"""
LEAD: Final = 150.0
"""A turn comes no sooner than after this time if another body began within :data:`BUSY`: the claim
and the way to the body take some time, and a late begin would come too close to the next one.
"""
BUSY: Final = 1_000.0
OVERTAKING: Final = 2_000.0
"""A call may begin before those that came up to so much earlier and wait in another worker. Without
it, each end of a body would wait until another worker has asked.
"""
PLACE_TTL: Final = 3_000.0
"""For how long the place of a worker in the waiting list counts unless the worker asks again."""
BEGIN_KEPT: Final = 3_600_000.0
"""For how long a begin counts at least, because the next call may have a longer pause."""
MANY: Final = 10**9
"""The room of a group without a limit."""


@value_class(frozen=True, slots=True)
class Ask:
    """What a call asks of its group.

    ``limit``: how many bodies may run; 0 without a limit. ``pause``: the time between two begins; 0
    without a rate. ``since``: when the call came first; 0 if it comes now. ``worker``: the name of
    its worker, whose own place in the waiting list does not matter for it.
    """

    limit: int = 0
    pause: float = 0.0
    since: float = 0.0
    worker: str = ""


NOTHING: Final = Ask()
"""What a call of a group without limit and rate asks of it."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The state of a group, as a store has it.

    ``held``: by owner token, when the slot expires, and the limit of its holder, 0 without one.
    ``began`` and ``pause``: the last begin, and the pause after it. ``places``: by worker, since
    when its oldest call waits, and until when that counts. ``closed``: ``None`` if the group is
    open.
    """

    held: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    began: float = 0.0
    pause: float = 0.0
    places: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    closed: Closed | None = None

    def at(self, now: float) -> Slots:
        """Without what has expired by *now*, and without times that are too late: the clock of the
        store was set back.
        """
        held = {token: slot for token, slot in self.held.items() if slot[0] > now}
        places = {
            worker: place
            for worker, place in self.places.items()
            if now < place[1] <= now + PLACE_TTL
        }
        closed = self.closed if self.closed is not None and self.closed.counts > now else None
        began = min(self.began, now + AHEAD)
        return replace(self, held=held, places=places, closed=closed, began=began)

    @property
    def expires_at(self) -> float:
        """From when on nothing of it counts."""
        ends = [slot[0] for slot in self.held.values()]
        ends += [place[1] for place in self.places.values()]
        if self.began:
            ends.append(self.began + max(self.pause, BEGIN_KEPT))
        if self.closed is not None:
            ends.append(self.closed.counts)
        return max(ends, default=0.0)

    @property
    def limit(self) -> int | None:
        """The smallest limit of the bodies that run; ``None`` without one."""
        return min((limit for _, limit in self.held.values() if limit), default=None)

    def closed_group(self, group: str, now: float) -> ClosedGroup | None:
        """*group*; ``None`` if it is open. Nothing of the state has expired."""
        if self.closed is None:
            return None
        until, _ = self.held.get(self.closed.alone, (now, 0))
        return closed_group_from(
            group, self.closed, (self.closed.ends - now) / 1000, (until - now) / 1000
        )

    def probes(self, token: str, now: float) -> bool:
        """Whether *token* has the only slot, since the time of the closing is over."""
        closed = self.closed
        alone = closed is not None and closed.ends <= now and closed.alone == token
        return alone and token in self.held


NO_SLOTS: Final = Slots()


@dataclass(frozen=True, slots=True)
class Room:
    """How many calls may begin now, of those that came as early as the asking one.

    ``wait``: seconds until the rate lets the next one begin, if the group has a rate. ``running``:
    how many slots are held; ``limit``: the smallest limit that counts, 0 without one. ``now``: the
    time of the store, in milliseconds.
    """

    places: int
    wait: float
    running: int
    limit: int
    now: float


@dataclass(frozen=True, slots=True)
class Taken:
    """The slots after a call was admitted, whose body may begin in ``starts_in`` seconds.
    ``probe``: the limit of the group is one.
    """

    slots: Slots
    starts_in: float
    probe: bool = False


def room(slots: Slots, ask: Ask, now: float) -> Room:
    """How many calls may begin now. Of several limits and rates of one group, the smallest
    counts.
    """
    slots = slots.at(now)
    places, limit, begins = MANY, 0, now
    if ask.limit:
        limit = min(ask.limit, slots.limit or ask.limit)
        places = limit - len(slots.held)
    if ask.pause:
        gap = max(ask.pause, slots.pause)
        lead = LEAD if now - slots.began < BUSY else 0.0
        begins = max(now + lead, slots.began + gap)
        places = min(places, math.floor((now + AHEAD - begins) / gap) + 1)
    if slots.closed is not None:
        places = min(places, int(may_begin(slots, "", now)))
    since = ask.since or now
    before = sum(
        worker != ask.worker and came < since - OVERTAKING
        for worker, (came, _) in slots.places.items()
    )
    wait = (begins - now) / 1000
    return Room(max(0, places - before), wait, len(slots.held), limit, now)


def may_begin(slots: Slots, token: str, now: float) -> bool:
    """Whether the group lets the attempt with *token* begin: it is open, or its time is over, and
    no other attempt has the only slot. Nothing of the state has expired.
    """
    closed = slots.closed
    return closed is None or (
        closed.ends <= now and (closed.alone == token or closed.alone not in slots.held)
    )


def take(
    group: str, slots: Slots, ask: Ask, token: str, ttl: float, now: float
) -> Taken | Room | ClosedGroup:
    """The slots once the attempt with *token* has what it asks for, or why it does not get it.

    An attempt that has a slot keeps it: the reply to its first try may have been lost. *ttl* is in
    seconds.
    """
    slots = slots.at(now)
    if not may_begin(slots, token, now):
        closed_group = slots.closed_group(group, now)
        assert closed_group is not None  # an open group lets it begin
        return closed_group
    if token in slots.held:
        starts_in = max(0.0, slots.began - now) / 1000
        slots = with_slot(slots, token, ttl, ask.limit, now)
        return Taken(slots, starts_in, slots.probes(token, now))
    found = room(slots, ask, now)
    if found.places <= 0:
        return found
    if slots.closed is not None:
        slots = replace(slots, closed=replace(slots.closed, alone=token))
    if ask.limit or slots.closed is not None:
        slots = with_slot(slots, token, ttl, ask.limit, now)
    if ask.pause:
        slots = replace(slots, began=now + found.wait * 1000, pause=ask.pause)
    if ask.since and slots.places.get(ask.worker, (0.0, 0.0))[0] == ask.since:
        slots = with_place(slots, replace(ask, since=0.0), now)  # its worker had it in the list
    return Taken(slots, found.wait, slots.closed is not None)


def full_group(group: str, slots: Slots, now: float) -> ClosedGroup | None:
    """Why calls of *group* wait: it is closed, or in the form of one that was closed 0 times
    what shows that they wait for their turn; ``None`` if nothing does.
    """
    slots = slots.at(now)
    if slots.closed is not None:
        return slots.closed_group(group, now)
    running, limit = len(slots.held), slots.limit
    if limit and running >= limit:
        return ClosedGroup(
            group, 0, 0.0, Reason.GROUP_FULL, message=f"{running} of {limit} calls run"
        )
    wait = slots.began + slots.pause - now
    if wait > 0:
        message = "as many have begun as its rate allows"
        return ClosedGroup(group, 0, wait / 1000, Reason.GROUP_RATE, message=message)
    return None


def close(slots: Slots, closing: Closing, token: str, now: float) -> Slots:
    """The slots after *closing*; *token*: the owner token of the attempt that failed, whose slot is
    freed.

    A longer time replaces the current one, a shorter one does not. Only the failure of a probe
    counts one closing more: attempts that had begun before the group closed count none.
    """
    slots = slots.at(now)
    before = slots.closed
    in_a_row = 1 if before is None else before.in_a_row + slots.probes(token, now)
    wait = closing.wait(in_a_row) * 1000
    slots = without_slot(slots, token)
    if before is not None and now + wait <= before.ends:
        return slots
    # The closings in a row no longer count after a quiet time.
    counts = max(now + wait + closing.policy.quiet * 1000, before.counts if before else 0.0)
    alone = before.alone if before is not None else ""
    return replace(slots, closed=Closed(in_a_row, now + wait, counts, reason_json(closing), alone))


def opened(slots: Slots, token: str | None, now: float) -> Slots | None:
    """The slots with an open group, and without the slot of *token*; ``None`` if the group was
    open, or if *token* is given and is not the probe.
    """
    slots = slots.at(now)
    if slots.closed is None or (token is not None and not slots.probes(token, now)):
        return None
    return replace(without_slot(slots, token or ""), closed=None)


def with_slot(slots: Slots, token: str, ttl: float, limit: int, now: float) -> Slots:
    """The slots once that of *token* lasts another *ttl* seconds; a longer time is not cut.

    A slot that the store has lost is written again, because the body runs.
    """
    until = max(now + ttl * 1000, slots.held.get(token, (0.0, 0))[0])
    return replace(slots, held={**slots.held, token: (until, limit)})


def without_slot(slots: Slots, token: str) -> Slots:
    """The slots without that of *token*."""
    return replace(slots, held={name: slot for name, slot in slots.held.items() if name != token})


def with_place(slots: Slots, ask: Ask, now: float) -> Slots:
    """The slots once the worker of *ask* has its place in the waiting list; without a time in *ask*
    it has none. A worker without a name takes no place.
    """
    if not ask.worker:
        return slots
    places = {worker: place for worker, place in slots.places.items() if worker != ask.worker}
    if ask.since:
        places[ask.worker] = (ask.since, now + PLACE_TTL)
    return replace(slots, places=places)


# -- the stored form ------------------------------------------------------------------------------


def dump(slots: Slots) -> str:
    """The slots as JSON."""
    closed = slots.closed
    fields = {
        "held": slots.held,
        "began": slots.began,
        "pause": slots.pause,
        "places": slots.places,
        "closed": closed and {name: getattr(closed, name) for name in Closed.__slots__},
    }
    return json.dumps({name: value for name, value in fields.items() if value})


def load(text: str | None) -> Slots:
    """The slots in the JSON that :func:`dump` or the scripts of Redis have written; none if it
    cannot be read.
    """
    if not text:
        return NO_SLOTS
    try:
        found: Any = json.loads(text)
        closed = found.get("closed")
        return Slots(
            {
                str(name): (float(until), int(limit))
                for name, (until, limit) in _pairs(found, "held")
            },
            float(found.get("began") or 0.0),
            float(found.get("pause") or 0.0),
            {
                str(name): (float(came), float(ends))
                for name, (came, ends) in _pairs(found, "places")
            },
            closed
            and Closed(
                int(closed["in_a_row"]),
                float(closed["ends"]),
                float(closed["counts"]),
                str(closed["why"]),
                str(closed.get("alone") or ""),
            ),
        )
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return NO_SLOTS


def _pairs(found: Any, name: str) -> Any:
    return (found.get(name) or {}).items()
