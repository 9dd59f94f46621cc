"""A group under attack: heartbeats that fail, outcomes that are late, slots that are freed twice or
by others, a store that loses its state, failures that close the group, and operators.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.group import Closing
from celery_leases.groups.slots import (
    NO_SLOTS,
    Ask,
    Slots,
    Taken,
    close,
    dump,
    load,
    opened,
    take,
    with_slot,
    without_slot,
)

NOW = 1_800_000_000_000.0
TTL = 15.0
POLICY = CooldownPolicy(5.0, cap=60.0)
ATTACKS = [
    *("take", "take", "take", "renew", "renew", "end", "free again", "free as another"),
    *("fail", "succeed", "operator opens", "operator closes", "late failure"),
]
STEPS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from(ATTACKS), st.floats(0, 9_000)),
    max_size=80,
)


class Group:
    """The state of a group, and the bodies that run by the promises: each until its slot ends."""

    def __init__(self, limit: int) -> None:
        self.slots, self.now, self.limit = NO_SLOTS, NOW, limit
        self.until: dict[str, float] = {}
        self.probes: set[str] = set()

    def step(self, name: str, attack: str) -> None:
        """One attempt, or an attacker with its token, does something."""
        runs = name in self.until
        token = name if attack != "free as another" else f"{name}-before"
        match attack:
            case "take" if not runs:
                self.take(name)
            case "renew" if runs:  # if it fails, the body ends with its slot
                self.slots = with_slot(self.slots, name, TTL, self.limit, self.now)
                self.until[name] = self.now + TTL * 1000
            case "end":
                self.end(name)
                self.slots = without_slot(self.slots, name)
            case "free again" | "free as another" if not runs or token != name:
                self.slots = without_slot(self.slots, token)
            case "fail" if runs:
                self.slots = close(self.slots, Closing(POLICY, "limited"), name, self.now)
                self.end(name)
            case "succeed" if runs:
                new = opened(self.slots, name, self.now)
                assert (new is not None) <= (name in self.probes), "only the probe opens"
                self.slots = without_slot(new or self.slots, name)
                self.end(name)
            case "late failure" | "operator closes":
                closing = Closing(POLICY, "limited")
                self.slots = close(self.slots, closing, f"{name}-before", self.now)
            case "operator opens":
                self.slots = opened(self.slots, None, self.now) or self.slots
                self.probes.clear()  # its body is one of many now

    def take(self, name: str) -> None:
        """An attempt asks for a slot."""
        closed = self.slots.at(self.now).closed
        answer = take("g", self.slots, Ask(self.limit), name, TTL, self.now)
        if not isinstance(answer, Taken):
            return
        assert closed is None or closed.ends <= self.now, "no body begins in a closed group"
        assert answer.probe == (closed is not None)
        self.slots, self.until[name] = answer.slots, self.now + TTL * 1000
        if answer.probe:
            assert not self.probes, "there is one probe"
            self.probes.add(name)

    def end(self, name: str) -> None:
        """The body of *name* has ended."""
        self.until.pop(name, None)
        self.probes.discard(name)


@given(STEPS, st.integers(0, 3))
def test_neither_the_limit_nor_the_probe_is_ever_exceeded(steps, limit) -> None:
    """A group without a limit, 0 here, has at most one probe at a time."""
    group = Group(limit)
    group.step("a", "late failure")
    group.now += POLICY.longest(1) * 1000
    for name, attack, passed in steps:
        group.now += passed
        for each in [each for each, until in group.until.items() if until <= group.now]:
            group.end(each)
        group.step(name, attack)
        group.slots = load(dump(group.slots))
        assert not limit or len(group.until) <= limit


@given(STEPS, st.floats(-3_600_000, 3_600_000))
def test_a_clock_that_steps_ends_no_slot_of_a_renewed_body(steps, ahead) -> None:
    """Of a store whose clock steps back, a slot lasts longer, and never shorter than by the
    step.
    """
    slots = with_slot(Slots(), "a", TTL, 1, NOW)
    for number, (_, _, passed) in enumerate(steps[:10]):
        now = NOW + number + min(passed, 100) + (ahead if number % 2 else 0.0)
        slots = with_slot(slots, "a", TTL, 1, now)
        answer = take("g", slots, Ask(1), "b", TTL, now)
        assert not isinstance(answer, Taken), "the slot was renewed a moment ago by this clock"


def test_a_store_that_lost_its_state_has_as_many_again_until_the_renewals() -> None:
    """The window that the guarantees name."""
    slots = NO_SLOTS
    for token in "abc":
        answer = take("g", slots, Ask(3), token, TTL, NOW)
        assert isinstance(answer, Taken)
        slots = answer.slots
    lost = replace(NO_SLOTS)
    answer = take("g", lost, Ask(3), "d", TTL, NOW + 1)
    assert isinstance(answer, Taken), "the window"
    lost = answer.slots
    for token in "abc":
        lost = with_slot(lost, token, TTL, 3, NOW + 2)
    assert not isinstance(take("g", lost, Ask(3), "e", TTL, NOW + 3), Taken)
    lost = without_slot(lost, "d")
    assert not isinstance(take("g", lost, Ask(3), "e", TTL, NOW + 4), Taken)
