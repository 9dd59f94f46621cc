"""The checker, on histories written by hand: it accepts the good ones, and names the first wrong
note of the bad ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from celery_leases.events import Dropped
from tests.simulation.checker import violations
from tests.simulation.history import Note, Row
from tests.simulation.work import RETENTION

KEY = "once k"


class Story:
    """Writes a history of one key; each step takes a second."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.at = 0.0
        self.row: Row | None = None
        self.answers: dict[str, str | None] = {}
        self.values: dict[str, str] = {}
        self.held: list[str] = []
        self.effects: list[str] = []
        self.quiet = True
        self.late = False

    def note(self, what: str, **details: Any) -> Story:
        self.at += 1.0
        self.notes.append(Note(self.at, what, details))
        return self

    def wait(self, seconds: float) -> Story:
        self.at += seconds
        return self

    def write(self, pid: int | None = None, **changes: Any) -> Story:
        """Change the row."""
        empty = Row(KEY, "once", "running", 0, "", "c1", None, None, 0.0, resumes=False)
        old, self.row = self.row, replace(self.row or empty, **changes)
        by = int((self.row.owner or "-0").rpartition("-")[2], 16)
        return self.note("row", key=KEY, old=old, new=self.row, by="w0/c1", pid=pid or by)

    def call(
        self,
        call: str = "c1",
        task: str = "once",
        answer: str | None = "SUCCESS",
        *,
        own: bool = True,
    ) -> Story:
        """A confirmed call, and what its caller gets in the end."""
        self.answers[call] = answer
        if answer == "SUCCESS":
            self.values.setdefault(call, "r")
        return self.note("published", task=task, key=KEY, call=call, number=1, own=own)

    def claim(self, owner: str = "a", fence: int = 1, call: str = "c1", **changes: Any) -> Story:
        return self.write(state="running", owner=owner, fence=fence, call=call, **changes)

    def renew(self) -> Story:
        return self.write()

    def body(
        self, owner: str = "a", fence: int = 1, process: str = "w0/c1", **details: Any
    ) -> Story:
        who = {"key": KEY, "call": "c1", "fence": fence, "token": owner, "process": process}
        return self.note("body", **{**who, **details})

    def ends(self, owner: str = "a", ending: str = "") -> Story:
        given = {"token": owner, "ending": ending, "process": "w0/c1"}
        return self.note("body ended", key=KEY, call="c1", **given)

    def loses(self, owner: str = "a", process: str = "w0/c1") -> Story:
        return self.note("lost", key=KEY, token=owner, process=process)

    def done(self, result: str | None = "r", **changes: Any) -> Story:
        return self.write(state="done", result=result, **changes)

    def expires(self, number: int = 1, lasts: float = RETENTION) -> Story:
        """The outcome of a run, whose record expires."""
        return self.done(f"[0, {number}]", expires_at=self.at + 1.0 + lasts)

    def deleted(self) -> Story:
        """A purge deletes the row."""
        old, self.row = self.row, None
        return self.note("row", key=KEY, old=old, new=None, by="client", pid=10)

    def cools(self, seconds: float, **changes: Any) -> Story:
        until = self.at + 1.0 + seconds
        return self.write(state="cooling", retry_at=until, ended="failed", **changes)

    def run(self, owner: str = "a", fence: int = 1, call: str = "c1") -> Story:
        """A whole run."""
        ran = self.claim(owner, fence, call).body(owner, fence, call=call)
        return ran.ends(owner).done()

    def fails(self, fence: int) -> Story:
        """A run whose body asks for a cooldown, and the wait."""
        ran = self.claim("a", fence).body("a", fence).ends(ending="cooldown")
        return ran.cools(8, resumes=True).wait(8)

    def retries(self, fence: int, wait: float | None = None) -> Story:
        """A run whose body fails, and is retried quickly."""
        ran = self.claim(f"a{fence}", fence).body(f"a{fence}", fence).ends(f"a{fence}", "retry")
        until = self.at + 1.0 + (0.8 * 2 ** (fence - 1) if wait is None else wait)
        return ran.write(state="pending", ended="failed", retry_at=until).wait(until - self.at)

    def crashes(self, fence: int, call: str = "c1") -> Story:
        """A run whose process dies; its main process sees it."""
        process, pid = f"w0/c{fence}", 16 + fence
        ran = self.claim(f"a-{pid:x}", fence, call)
        ran.body(f"a-{pid:x}", fence, process, call=call)
        return ran.note("killed", process=process, pid=pid).write(
            99, state="pending", ended="crashed"
        )

    def released(self) -> Story:
        """An operator takes the key from its holder."""
        fence = (self.row.fence if self.row is not None else 0) + 1
        told = self.note("released", key=KEY)
        return told.write(99, state="pending", ended="released", owner="", fence=fence)

    def item(self, item: int, owner: str = "a") -> Story:
        return self.note("item", item=item, key=KEY, call="c1", fence=1, token=owner)

    def slots(
        self, *owners: str, until: float | None = None, alone: str = "", lasts: float = 9.0
    ) -> Story:
        """The group changes: who has slots, until when it is closed, and who is its probe."""
        held = dict.fromkeys(owners, self.at + lasts)
        given = {"closed_until": until, "alone": alone, "began": 0.0}
        return self.note("group", group="api", held=held, **given)

    def rejected(self, fence: int, seconds: float, call: str = "c1") -> Story:
        """A run whose dependency accepts no request, and the wait."""
        ran = self.claim("a", fence, call).body("a", fence, call=call).ends(ending="rejects")
        return ran.cools(seconds).wait(seconds)

    def charged(
        self, owner: str = "a", call: str = "c1", part: int = 0, process: str = "w0/c1"
    ) -> Story:
        """The outside world has executed an effect."""
        who = {"key": KEY, "call": call, "token": owner, "process": process}
        return self.note("charged", effect="e", part=part, **who)

    def holds(self, owner: str = "a", *, until: float) -> Story:
        """A process and the store know until when a lease lasts."""
        return self.note("holds", key=KEY, token=owner, until=until - 0.1, store_until=until)

    def refuses(self, call: str, task: str = "strict") -> Story:
        """A call gets an error because the key is held."""
        error = "k is held by call c1 on w0 for another 2 s"
        return self.note("event CallRefused", task=task, key="k", call_id=call, error=error)

    def waits(self, delay: float) -> Story:
        """A call is rescheduled because the key is held."""
        given = {"task": "once", "key": "k", "reason": "another call holds the key"}
        return self.note("event CallRescheduled", **given, delay=delay)

    def drops(self, call: str) -> Story:
        """A call ends without a result because the key is held."""
        given = {"task": "lazy", "key": "k", "call_id": call, "reason": Dropped.HELD_BY_OTHER}
        return self.note("event CallDropped", **given)

    def returns(self, why: str, *, once_more: bool = True) -> Story:
        """The queue takes the message back for the last time, and then discards it."""
        told = self.note("returned", call="c1", why=why)
        return told.note("discarded", call="c1", why=why) if once_more else told

    def cannot_wait(self) -> Story:
        """The call fails because the broker takes no copy."""
        error = "k: busy, and the call cannot be rescheduled: the broker accepts no copy of it"
        return self.note("event CallRefused", task="once", key="k", call_id="c1", error=error)

    def turn(self, owner: str, after: float = 0.0) -> Story:
        """An attempt gets its turn in the group with a rate, in so many seconds."""
        held, began = {owner: self.at + 9.0}, self.at + 1.0 + after
        given = {"closed_until": None, "alone": "", "began": began}
        return self.note("group", group="mail", held=held, **given)

    def listed(self, group: str, *owners: str, **since: float) -> Story:
        """The group changes: who has slots, and since when the oldest call of each worker waits."""
        held = dict.fromkeys(owners, self.at + 9.0)
        places = {worker: (at, self.at + 3.0) for worker, at in since.items()}
        given = {"closed_until": None, "alone": "", "began": 0.0, "places": places}
        return self.note("group", group=group, held=held, **given)

    def end(self) -> list[Note]:
        rows = [self.row] if self.row is not None else []
        return [
            *self.notes,
            Note(
                self.at + 1.0,
                "final",
                {
                    "rows": rows,
                    "held": self.held,
                    "effects": self.effects,
                    "answers": self.answers,
                    "values": self.values,
                    "quiet": self.quiet,
                    "late": self.late,
                },
            ),
        ]


def latest(*runs: int) -> Story:
    """Two calls of which only the newest runs, and whose run each of them gets."""
    made = Story()
    for number in (1, 2):
        made.note("calls", key=KEY, call=f"call-{number}").note(
            "ordered", call=f"call-{number}", order=number
        )
        made.call(f"call-{number}", task="latest")
    made.values = {f"call-{place + 1}": f"[{run}, 1]" for place, run in enumerate(runs)}
    return made.claim(call="call-2", task="latest").body().ends().done()


def estimated(*happens: str) -> Story:
    """The lease store does not answer the publisher of the first of two calls, which runs, and has
    the greater order.
    """
    made = Story()
    for what in happens:
        made.note(what, process="client", span=0.0 if what == "clock" else 5.0)
    for number, order in ((1, 9), (2, 8)):
        made.note("calls", key=KEY, call=f"call-{number}").wait(-1)
        made.note("ordered", call=f"call-{number}", order=order).call(f"call-{number}", "latest")
    made.values = {"call-1": "[1, 1]", "call-2": "[1, 1]"}
    return of_task("latest", made.claim(call="call-1").body(call="call-1").ends().done())


def progress(*given: int, confirmed: bool = True) -> Story:
    """Attempts that are given such progress, of which each saves the next number, and dies."""
    made = Story().call(task="saving", answer="FAILURE")
    for fence, value in enumerate(given, 1):
        token = f"a{fence}-{fence:x}"
        made.claim(token, fence).body(token, fence, f"w0/c{fence}")
        made.note("goes on", key=KEY, call="c1", token=token, value=value or None)
        made.note("saves", key=KEY, call="c1", token=token, value=value + 1)
        if confirmed:
            made.note("saved", key=KEY, call="c1", token=token, value=value + 1)
        made.note("killed", process=f"w0/c{fence}", pid=fence)
        made.write(99, state="pending", ended="crashed")
    made.claim("e-e", 9).body("e-e", 9).ends("e-e")
    return of_task("saving", made.write(state="failed", ended="failed"))


def unrenewed(seconds: float, *, happens: str = "", lost: bool = False) -> Story:
    """A body whose lease is not renewed, and which lasts so long, or loses its lease then."""
    made = called().claim().body()
    if happens:
        made.note(happens, key=KEY, token="a", process="w0/c1", seconds=15.0, span=seconds + 5.0)
        made.wait(-1)
    made.wait(seconds - 1)
    return of_task("unrenewed", (made.loses().wait(5) if lost else made).ends().done())


def given_another(ended: str | None, reason: str | None = None, **changes: Any) -> Story:
    """A caller gets the queued call of another one, which has ended so."""
    made = Story().note("calls", key=KEY, call="c1", number=0)
    made.call(task="queued", answer="REVOKED").note("revoked", call="c1").claim()
    made.write(state="pending", ended=ended, reason=reason, **changes)
    made.note("calls", key=KEY, call="c2", number=1).call(
        task="queued", answer="REVOKED", own=False
    )
    return of_task("queued", made)


def other_arguments(wait: float, **changes: Any) -> Story:
    """A call is refused for its arguments, so long after the call before has failed."""
    made = Story().call(task="compared", answer="FAILURE").claim().body().ends(ending="cooldown")
    made.cools(8, **changes).wait(wait).call("c2", "compared", "FAILURE")
    error = "k stands for an earlier call with other arguments; they differ in number"
    made.note("event CallRefused", task="compared", key="k", call_id="c2", error=error)
    return of_task("compared", made if not changes else made.run("b", 2))


def copied(*, again: bool = False, **changes: Any) -> Story:
    """The row of an attempt stays open, and the copy of its message takes it over."""
    given = {"call": "c1", "begun": True, "prior": ()}
    made = (
        Story()
        .note("delivers", **given, copy="", again=False)
        .note("tries", call="c1", process="w0/c1")
    )
    rescheduled = {"task": "once", "key": "k", "call_id": "c1", "reason": "no answer", "delay": 1.0}
    made.call().claim("a-a").note(
        "event CallRescheduled", **rescheduled, confirmed=True, by="w0/c1"
    )
    made.note("delivers", **given, copy="1 b", again=again).note(
        "tries", call="c1", process="w0/c1"
    )
    return made.claim("b-b", 2, **changes).body("b-b", 2).ends("b-b").done()


def unordered(first: int, *comes_again: int, ordered: int = 0, step: bool = False) -> Story:
    """Two calls of which only the newest runs, which is the one that arrives last; the first has
    the row. Messages of these numbers come again; one call has an order.
    """
    made, numbers = Story().note("clock", by=-20.0) if step else Story(), (first, 3 - first)
    for number in numbers:
        made.note("calls", key=KEY, call=f"call-{number}")
        if number == ordered:
            made.note("ordered", call=f"call-{number}", order=number)
        made.call(f"call-{number}", task="latest")
    for number in numbers:
        made.note("delivers", call=f"call-{number}", copy="", again=False, begun=False)
    for number in comes_again:
        made.note("delivers", call=f"call-{number}", copy="", again=True, begun=False)
    made.values = dict.fromkeys(made.answers, f"[{first}, 1]")
    return made.claim(call=f"call-{first}", task="latest").body().ends().done()


def burst(*pauses: float) -> Story:
    """Calls with these pauses before them, and a pause before the body of the last one."""
    made, calls = Story(), [f"call-{number}" for number in range(1, len(pauses))]
    for call, pause in zip(calls, pauses, strict=False):
        made.wait(pause).note("calls", key=KEY, call=call).call(call, task="debounced")
        made.note("ordered", call=call, order=made.at).wait(-1)
    made.wait(pauses[-1] - 1).claim(call=calls[-1]).body(call=calls[-1])
    made.values = dict.fromkeys(calls, f"[{len(calls)}, 1]")
    return of_task("debounced", made.ends().done())


def two_wait(*calls: str, after: float, happens: str = "", tried: bool = True) -> Story:
    """Two calls are made while another one runs for 20 s, and wait. So long *after* its end *calls*
    begin, one after the other.
    """
    made = Story()
    for number in (1, 2, 3):
        call = f"call-{number}"
        made.note("calls", key=KEY, call=call).note("ordered", call=call, order=number)
        made.call(call, task="latest")
        if tried or number == 1:
            made.note("tries", call=call, process="w0/c1")
        if number == 1:
            made.claim(call=call).body(call=call)
    made.wait(20).ends()
    if happens == "released":
        made.released().wait(-1)
    elif happens != "killed":  # the row stays as it is
        made.done()
    if happens and happens != "released":
        made.note(happens, key="latest k", process="w0/c1", pid=10, call="call-3").wait(-1)
    for number, call in enumerate(calls, 2):
        made.wait(after - 3).note("tries", call=call, process="w0/c1").claim(
            f"b{number}", number, call
        )
        made.body(f"b{number}", number, call=call).ends(f"b{number}").done()
        after = 3.0
    made.values = {f"call-{number}": f"[{number}, 1]" for number in (1, 2, 3)}
    if calls == ("call-3",):
        made.values["call-2"] = "[3, 1]"
    return of_task("latest", made)


def fast_calls(seconds: int, last: float = 0.0, task: str = "latest") -> Story:
    """A call is made each half a second, for so long. After *last* seconds more, the one before the
    newest begins.
    """
    made, calls = Story(), [f"call-{number}" for number in range(1, 2 * seconds + 1)]
    for place, call in enumerate(calls, 1):
        made.wait(-2.5).note("calls", key=KEY, call=call).note("ordered", call=call, order=place)
        made.call(call, task=task)
    made.wait(last - 1).note("tries", call=calls[-2], process="w0/c1").wait(-1).claim(
        call=calls[-2]
    )
    made.body(call=calls[-2]).ends().done()
    made.wait(20).note("tries", call=calls[-1], process="w0/c1").claim("b", 2, calls[-1])
    made.body("b", 2, call=calls[-1]).ends("b").done()
    made.values = {
        call: f"[{min(place, 2 * seconds - 1)}, 1]" for place, call in enumerate(calls, 1)
    }
    made.values[calls[-1]] = f"[{2 * seconds}, 2]"
    made.values |= dict.fromkeys(calls[:-2], f"[{2 * seconds - 1}, 1]")
    return of_task(task, made)


def waits_for_newer(
    *pauses: float, reason: str = "a newer call of the key runs instead", again: bool = False
) -> Story:
    """A call is rescheduled for a newer one which does not come, after so long in a worker each
    time; *again*: its message has come again before the last time.
    """
    made = Story().note("calls", key=KEY, call="c1").note("calls", key=KEY, call="c2").call()
    for place, pause in enumerate(pauses, 1):
        comes_again = again and place == len(pauses)
        made.note("delivers", call="c1", copy="", again=comes_again, begun=False)
        made.wait(pause - 1).note("tries", call="c1", process="w0/c1")
        why = reason if place == len(pauses) - 1 else "a newer call of the key runs instead"
        given = {"task": "latest", "key": "k", "call_id": "c1", "reason": why}
        made.note("event CallRescheduled", **given, delay=1.0)
    return of_task("latest", made.run())


def slow_publish() -> Story:
    """Two calls of a burst, of which the message of one comes long after its call."""
    made = Story().note("calls", key=KEY, call="call-1").note("calls", key=KEY, call="call-2")
    made.call("call-1", task="debounced").note("ordered", call="call-1", order=1).wait(2)
    made.claim(call="call-1").body(call="call-1").ends().done().wait(20)
    made.call("call-2", task="debounced").note("ordered", call="call-2", order=2).wait(-1)
    made.claim("b", 2, "call-2").body("b", 2, call="call-2").ends("b").done()
    made.values = {"call-1": "[1, 1]", "call-2": "[2, 2]"}
    return of_task("debounced", made)


def with_ends(*ends: tuple[str, ...]) -> Story:
    """A row that says one after the other how its attempts ended."""
    told = called().claim().body().ends()
    for each in ends:
        told.write(state="pending", ends=each)
    return told.run("b", 2)


def other_crashes(of: dict[str, int], then: dict[str, int], **changes: Any) -> Story:
    """A call has crashed, and the next one has the row."""
    told = Story().call("c2").claim(call="c2").body(call="c2")
    told.row = replace(told.row, crashes_of=of) if told.row is not None else None
    return of_task("each", told.ends().write(**{"state": "done", "crashes_of": then, **changes}))


def rescheduled(*places: float, then: Callable[[Story], Story] | None = None) -> Story:
    """A call waits for its turn in one message after the other, while the place of its worker says
    that it waits since these times; *then*: what happens before the last message.
    """
    made = Story().note("calls", key=KEY, call="c1", task="limited").call(task="limited")
    for number, since in enumerate(places):
        if then and number == len(places) - 1:
            made = then(made)
        message = {"copy": f"copy {number}", "again": False, "begun": False, "full": True}
        made.note("delivers", call="c1", worker="w0", **message).wait(2)
        made.listed("api", w0=since).note("tries", call="c1", process="w0/c1")
    return of_task("limited", made.run("a", 2))


def overtakes(
    *others: str, task: str = "limited", group: str = "api", then: str = "", **since: float
) -> Story:
    """A call that comes at 7 s gets a slot while others have some, and workers have places."""
    made = Story().call(task=task).wait(5)
    made.note("delivers", call="c1", worker="w0", copy="", again=False, begun=False)
    if then:
        made.note(then)
    made.claim().listed(group, "a", *others, **since).body().ends().done()
    return of_task(task, made)


def having(story: Story, **fields: Any) -> Story:
    for name, value in fields.items():
        setattr(story, name, value)
    return story


def of_task(task: str, told: Story, key: str = "k") -> Story:
    """The same history of a key of that task."""
    key = f"{task} {key}"

    def changed(value: Any) -> Any:
        return replace(value, key=key, task=task) if isinstance(value, Row) else value

    for note in told.notes:
        note.details.update({name: changed(value) for name, value in note.details.items()})
        if "key" in note.details and not note.what.startswith("event "):
            note.details["key"] = key
    told.row = changed(told.row)
    return told


def runs(told: Story, *numbers: int) -> Story:
    """The runs of other calls."""
    for number in numbers:
        told.run(f"a{number}", number, f"c{number}")
    return told


def story() -> Story:
    return Story()


def together(*keys: str) -> Story:
    """A body of each of these keys at the same time."""
    bodies = []
    for owner, name in zip("abcdef", keys, strict=False):
        task, _, key = name.partition(" ")
        alone = Story().claim(owner, call=owner).body(owner, process=f"w0/{key}", call=owner)
        bodies.append(of_task(task, alone.wait(5).ends(owner).done(), key))
    return having(bodies[0], notes=sorted(chain(*(each.notes for each in bodies)), key=_at))


def _at(note: Note) -> float:
    return note.at


def called() -> Story:
    return Story().call()


def brief() -> Story:
    """A call whose record expires."""
    return having(Story().call(task="brief"), values={"c1": "[0, 1]"})


def expired(call: str = "c2", task: str = "brief", *, deletes: bool = True) -> Story:
    """A record that has expired when a call is made, which runs then."""
    told = Story().note("calls", key=KEY, call="c1").call(task=task)
    told.values = {"c1": f"[0, {1 if call == 'c2' else 2}]", call: "[0, 2]"}
    told.claim().body().charged().ends().expires().wait(RETENTION)
    told = told.deleted() if deletes else told
    told = told.note("calls", key=KEY, call="c2").call("c2", task=task) if call == "c2" else told
    told.claim("b", 2, call).body("b", 2, call=call).charged("b", call).ends("b").expires(2)
    return of_task(task, told)


def errors(number: int) -> Story:
    """So many failures of a key; each cooldown is twice as long, up to six hours."""
    told = called()
    for fence in range(1, number + 1):
        seconds = min(8.0 * 2 ** (fence - 1), 6 * 3600.0)
        told.claim("a", fence).body("a", fence).ends(ending="error")
        told.cools(seconds, resumes=True).wait(seconds)
    return of_task("each", told.run("b", number + 1))


def suspected(*, lives: bool) -> Story:
    """A key fails because of three processes of which nothing was heard; one of them lives."""
    told = Story().call(answer="FAILURE").note("paused", process="w0/c1", span=99.0)
    for fence in (1, 2, 3):
        told.claim(f"a-{fence}", fence).body(f"a-{fence}", fence)
    told.claim("a-4", 4).write(state="failed", ended="abandoned", reason="crash_loop")
    if lives:
        told.note("event OutcomeRefused", task="once", key="k", fence=3)
    return told.write(3, state="pending", ended="lost" if lives else "failed", reason=None)


def revoked_copy(*, drops: bool) -> Story:
    """A body fails and its call goes on; another worker revokes it, because a copy has expired."""
    told = Story().note("calls", key=KEY, call="c1", expires=5.0).call(answer="RETRY")
    told.claim().body().ends(ending="cooldown").cools(8, resumes=True)
    told.write(99, ended="terminated", resumes=False)
    given = {"task": "once", "key": "k", "call_id": "c1", "reason": Dropped.REVOKED}
    return told.note("event CallDropped", **given) if drops else told


def errors_before_crashes() -> Story:
    """A failure, crashes of which one was none, and another failure."""
    told = called().note("refused", server="database", process="w0/c1")
    told.claim("a", 1).body("a", 1).ends("a", "error").cools(7, resumes=True).wait(7)
    told.claim("b", 2).write(state="failed", ended="abandoned", reason="crash_loop")
    told.note("event OutcomeRefused", task="once", key="k", fence=2)
    told.write(3, state="pending", ended="lost", reason=None, retry_at=0.0)
    told.claim("c", 3).body("c", 3).ends("c", "error")
    told.cools(15, resumes=True).wait(15)
    return told.run("d", 4)


def rejections(*closed_for: float) -> Story:
    """Bodies of a group that are rejected one after the other, each of which closes it for so long;
    all but the first one are probes. Then one succeeds.
    """
    told, until = Story().call(task="limited"), None
    for number, seconds in enumerate(closed_for, 1):
        owner = f"a{number}"
        told.claim(owner, number).slots(owner, until=until, alone=owner).body(owner, number)
        until = told.ends(owner, "rejects").at + 1.0 + seconds
        told.slots(until=until, alone=owner).cools(seconds, resumes=True).wait(seconds)
    told.claim("b", 9).slots("b", until=until, alone="b").body("b", 9).ends("b")
    return of_task("limited", told.slots().done())


def snoozed_probe(opens: str) -> Story:
    """The first probe of a group is snoozed, the second one returns. One of them opens it."""
    told, until = Story().call(task="limited").slots(until=4.0).wait(3), 4.0
    told.claim().slots("a", until=until, alone="a").body().ends(ending="snooze")
    told.write(state="pending", ended="snoozed")
    told.slots(until=None if opens == "a" else until, alone="a")
    told.claim("b", 2).slots("b", until=until, alone="b").body("b", 2).ends("b", "return")
    return of_task("limited", told.done().slots())


def two_rejections(closed_for: float) -> Story:
    """Two bodies of an open group are rejected, then a probe, which closes it for so long."""
    told = Story().call(task="limited").claim("a", 1).slots("a", "b").body("a", 1)
    told.ends("a", "rejects").slots("b", until=8.0).cools(2, resumes=True)
    told.slots(until=10.0).wait(3).claim("c", 2).slots("c", until=10.0, alone="c").body("c", 2)
    until = told.ends("c", "rejects").at + 1.0 + closed_for
    told.slots(until=until, alone="c").cools(closed_for, resumes=True).wait(closed_for)
    return of_task("limited", told.run("d", 3))


def each_brief(call: str = "c2") -> Story:
    """A call has charged, and runs again after *call* has had the row for the retention."""
    told = Story().call(task="each-brief-charged").claim().body().charged().ends()
    told.write(state="pending", ended="failed").claim("b", 2, call).wait(RETENTION)
    told.write(state="pending", ended="failed").claim("c", 3).body("c", 3).charged("c")
    return of_task("each-brief-charged", told.ends("c").done())


def taken_over(
    *notes: tuple[str, dict[str, Any]],
    answered: float = 0.5,
    lasts: float | None = 5.5,
    begun: str = "frozen",
    ended: str = "",
    span: float = 3.0,
    **of: Any,
) -> Story:
    """A row whose lease *lasts* until then is taken over when the database has *answered* for so
    long since it was silent, from second 4 on.
    """
    made = Story().call().claim(lease_until=lasts).note("killed", process="w0/c0", pid=10)
    of = {"server": "database", **of}
    made.note(begun, **of, **({"span": span} if begun == "frozen" else {}))
    for what, details in notes:
        made.note(what, **details)
    if ended:
        made.at = 3.0 + span
        made.note(ended, **of)
    made.at = 3.0 + span + answered
    made.claim("b", 2, lease_until=made.at + 4.0).body("b", 2)
    return made.ends("b").done()


def slow_claim(**changes: Any) -> Story:
    """The database executes a claim when it is silent no more."""
    who = {"server": "database", "op": "claim", "process": "w0/c1", "span": 2.0, **changes}
    return taken_over(("slow request", who), answered=0.0, lasts=who.pop("lasts"))


GOOD: dict[str, Callable[[], Story]] = {
    "a row that is taken over when the database has answered for long": lambda: taken_over(
        answered=3.0
    ),
    "a row that is taken over soon after the database was silent for a moment": lambda: taken_over(
        span=2.0
    ),
    "a row that is taken over soon after the broker was silent": lambda: taken_over(
        server="broker"
    ),
    "a row that is taken over soon after another host was cut": lambda: taken_over(
        begun="cut", ended="mended", host="w1"
    ),
    "a row whose lease is elsewhere, taken over after the database was down": lambda: taken_over(
        begun="down", ended="up", lasts=None
    ),
    "a row that its own call has left, taken over after a silence": lambda: taken_over(
        ("delivers", {"call": "c1", "copy": "", "again": True, "begun": True, "prior": ("a",)})
    ),
    "a lease that seems to be lost once its outcome is written": lambda: of_task(
        "each",
        called()
        .claim()
        .body()
        .ends()
        .done()
        .claim("b", 2, "c2")
        .loses()
        .body("b", 2, call="c2")
        .ends("b")
        .done(),
    ),
    "a claim that has found no lease, and is written after a silence": lambda: slow_claim(
        lasts=3.5
    ),
    "a call without an order that is answered by one that arrived later": lambda: unordered(2, 2),
    "arrivals at a clock that has stepped": lambda: unordered(1, step=True),
    "a call without an order whose first arrival was forgotten": lambda: unordered(1, 1),
    "a call with an order that came again, and counts from its publication": lambda: unordered(
        1, 2, ordered=2
    ),
    "an order that its publisher has estimated after a step of the store's clock": lambda: (
        estimated("clock", "lost reply")
    ),
    "a call that is repeated": lambda: of_task(
        "repeated-charged", called().claim().body().charged().charged().ends().done()
    ),
    "attempts that get what was saved": lambda: progress(0, 1, 2),
    "attempts that get what may be saved": lambda: progress(0, 1, 1, confirmed=False),
    "a body that ends before its lease does": lambda: unrenewed(2),
    "a body that loses a lease that is not renewed": lambda: unrenewed(3, lost=True),
    "a body that has made its lease longer": lambda: unrenewed(9, happens="extends"),
    "a body whose process stands still": lambda: unrenewed(9, happens="paused"),
    "a call that is rescheduled and has its place since it came first": lambda: rescheduled(3, 3),
    "a place of a call that is older than the one that is known": lambda: rescheduled(3, 1),
    "a place that counts anew after a run": lambda: rescheduled(
        3, 19, then=lambda made: made.fails(1)
    ),
    "a place that counts anew while the worker stands still": lambda: rescheduled(
        3, 9, then=lambda made: made.note("paused", process="w0/main", span=9.0)
    ),
    "a place that counts anew after a step of the store's clock": lambda: rescheduled(
        3, 9, then=lambda made: made.note("clock")
    ),
    "a call before one of another worker that came little earlier": lambda: overtakes("b", w1=5),
    "a call of the worker that has the place": lambda: overtakes("b", w0=3),
    "a later call that leaves a slot for each place": lambda: overtakes(w1=3),
    "a later call after the store has lost its data": lambda: overtakes("b", then="emptied", w1=3),
    "a body after a burst of calls": lambda: burst(0, 0, 2),
    "a body after a message that comes long after its call": slow_publish,
    "the newest of the calls that have waited": lambda: two_wait("call-3", after=3),
    "an older call whose newer one does not come": lambda: two_wait("call-2", "call-3", after=11),
    "an older call after a crash": lambda: two_wait("call-2", "call-3", after=3, happens="killed"),
    "an older call after an operator has taken the key": lambda: two_wait(
        "call-2", "call-3", after=3, happens="released"
    ),
    "an older call after the notes were lost": lambda: two_wait(
        "call-2", "call-3", after=3, happens="emptied"
    ),
    "an older call than one that was revoked": lambda: two_wait(
        "call-2", "call-3", after=3, happens="revoked"
    ),
    "one of the newest calls that come fast": lambda: fast_calls(12),
    "one of the newest debounced calls that come fast": lambda: fast_calls(7, task="debounced"),
    "a call that waits for a newer one": lambda: waits_for_newer(1, 4, 5),
    "a call that waits for a newer one, and then for its key": lambda: waits_for_newer(
        1, 9, 1, 9, reason="another call holds the key"
    ),
    "a call that waits for a newer one, and comes again": lambda: waits_for_newer(
        1, 9, 9, again=True
    ),
    "a call that waits in the broker": lambda: waits_for_newer(30, 9),
    "a body beside its call": lambda: burst(0, 0),
    "a body after a call without an order that has waited for long": lambda: having(
        burst(8, 0, 1),
        notes=[
            Note(0.0, "calls", {"call": "c0", "key": "debounced k"}),
            *burst(8, 0, 1).notes,
        ],
    ),
    "a body after a burst of calls that has lasted long": lambda: burst(0, 1, 1, 1),
    "a failure of a call of two messages that are returned again and again": lambda: (
        Story()
        .call(answer="FAILURE")
        .note("delivers", call="c1", copy="", again=True, begun=False)
        .note("delivers", call="c1", copy="1 x", again=True, begun=False)
        .cannot_wait()
    ),
    "an attempt whose call ends without another one": lambda: with_ends(
        ("crashed",),
        ("crashed",),
        ("crashed", "failed"),
    ),
    "a suspicion that was none, and a limit while an attempt is interrupted": lambda: with_ends(
        ("abandoned", "interrupted"),
        ("lost", "terminated"),
    ),
    "an attempt that stood still between its read and its write": lambda: (
        called()
        .claim()
        .body()
        .ends()
        .write(state="pending", ends=("abandoned",))
        .write(ends=("lost",))
        .note("paused", process="w0/c1", span=9.0)
        .write(ends=("abandoned", "failed"))
        .run("b", 2)
    ),
    "an attempt that the record has no longer": lambda: with_ends(
        ("crashed", *("failed",) * 8),
        (*("failed",) * 8, "returned"),
    ),
    "crashes of another call": lambda: other_crashes({"c1": 2}, {"c1": 2}),
    "crashes of a call that has ended with them": lambda: other_crashes({"c1": 3}, {}),
    "a call after the record has expired": expired,
    "a late copy of a call after the record has expired": lambda: expired("c1"),
    "a call after the record has expired, which is not purged yet": lambda: expired(deletes=False),
    "an effect of each generation": lambda: expired(task="brief-charged"),
    "an effect that was purged while another call had the row": each_brief,
    "a reply of an effect that was purged while another call had the row": lambda: of_task(
        "each-brief-charged",
        Story()
        .call(task="each-brief-charged")
        .claim()
        .body()
        .charged()
        .claim("b", 2, "c2")
        .wait(RETENTION)
        .write(state="pending", ended="failed")
        .note("has charged", key=KEY, call="c1", token="a", fence=1, state=None)
        .ends()
        .claim("c", 3)
        .body("c", 3)
        .charged("c")
        .ends("c")
        .done(),
    ),
    "a reply of an effect that was purged while its process stood still": lambda: of_task(
        "brief",
        brief()
        .claim()
        .body()
        .claim("b", 2)
        .expires()
        .wait(RETENTION)
        .deleted()
        .note("has charged", key=KEY, token="a", fence=1, state=None)
        .ends(),
    ),
    "a record that is purged in the end": lambda: of_task(
        "brief",
        brief().claim().body().ends().expires().wait(RETENTION).deleted().note("purged", since=7.0),
    ),
    "a late copy of a call whose process dies, so that Celery drops it": lambda: of_task(
        "brief",
        brief()
        .claim()
        .body()
        .ends()
        .expires()
        .wait(RETENTION)
        .claim("b-10", 2)
        .body("b-10", 2)
        .note("killed", process="w0/c1", pid=16)
        .write(99, state="pending", ended="crashed", expires_at=9e9),
    ),
    "cooldowns that grow": lambda: (
        called().rejected(1, 1.5).rejected(2, 3.0).rejected(3, 7.0).run("b", 4)
    ),
    "cooldowns that grow up to the longest one": lambda: errors(14),
    "a cooldown that grows after crashes of which one was none": errors_before_crashes,
    "a first cooldown after a call that has ended": lambda: of_task(
        "each",
        called()
        .call("c2")
        .rejected(1, 2.0)
        .rejected(2, 3.0)
        .run("b", 3)
        .rejected(4, 1.5, "c2")
        .run("d", 5, "c2"),
    ),
    "a cooldown of a group, which is no cooldown of the key": lambda: of_task(
        "limited", called().rejected(1, 3.0).rejected(2, 24.0).run("b", 3)
    ),
    "retries that wait longer each time": lambda: (
        called().retries(1, 0.5).retries(2, 1.2).run("b", 3)
    ),
    "a cooldown after an operator has reset the counts": lambda: (
        called().rejected(1, 2.0).released().rejected(3, 2.0).run("b", 4)
    ),
    "nothing happens": story,
    "one run": lambda: called().run(),
    "two calls, one run": lambda: called().call("c2").run(),
    "a renewal": lambda: called().claim().body().renew().ends().done(),
    "a killed process, and another attempt": lambda: (
        called().claim().body().note("killed", process="w0/c1", pid=10).wait(3).run("b", 2)
    ),
    "a revoked call, which another worker closes": lambda: (
        called()
        .claim()
        .note("holds", key=KEY, token="a", until=2.9, store_until=3.0)
        .note("revoked", call="c1")
        .wait(3)
        .write(pid=99, state="pending", ended="terminated")
    ),
    "a retry": lambda: (
        called()
        .claim()
        .body(retries=0)
        .ends(ending="self.retry")
        .write(state="pending", ended="retried")
        .claim("b", 2)
        .body("b", 2, retries=1)
        .ends("b")
        .done()
    ),
    "as many quick retries as are allowed": lambda: called().retries(1).retries(2).run("b", 3),
    "a crash that is taken back": lambda: (
        called()
        .claim("a-a")
        .claim("b-b", 2, crashes=1)
        .write(10, crashes=0)
        .note("event OutcomeRefused", task="once", key="k", fence=1, was_suspected=True)
        .done()
    ),
    "two calls with the result of the newest": lambda: latest(2, 2),
    "an outcome that is not written in a minute": lambda: (
        called()
        .claim()
        .body()
        .ends(ending="later")
        .note("lost request", process="w0/c1")
        .wait(60)
        .run("b", 2)
    ),
    "a late copy of a call after so many others that its record has forgotten it": lambda: of_task(
        "each",
        runs(called().run(), *range(2, 18)).run("b", 18),
    ),
    "a key that an operator takes from its holder, which is told later": lambda: (
        called()
        .claim()
        .body()
        .released()
        .wait(-1.5)
        .claim("b", 3)
        .body("b", 3, "w1/c1")
        .loses()
        .ends()
        .ends("b")
        .done()
    ),
    "a crash before the body": lambda: called().claim().wait(3).run("b", 2),
    "a failed run, and a retry": lambda: (
        called().claim().body().ends().write(state="pending", ended="failed").run("b", 2)
    ),
    "a cooldown, and a run afterwards": lambda: (
        called().claim().body().ends().cools(5, resumes=True).wait(5).run("b", 2)
    ),
    "a run a second before the end of the cooldown": lambda: (
        called().claim().body().ends().cools(5, resumes=True).wait(2.2).run("b", 2)
    ),
    "a cooldown that an operator ends": lambda: (
        called()
        .claim()
        .body()
        .ends()
        .cools(50)
        .write(state="pending", fence=2, retry_at=0.0)
        .run("b", 3)
    ),
    "a body that retries, whose next run comes a second early": lambda: (
        called()
        .claim()
        .body()
        .ends()
        .write(state="pending", ended="retried", retry_at=8)
        .run("b", 2)
    ),
    "a key that has failed as often as it may": lambda: (
        Story()
        .call(answer="FAILURE")
        .fails(1)
        .fails(2)
        .fails(3)
        .claim("a", 4)
        .body("a", 4)
        .ends(ending="cooldown")
        .write(state="failed", ended="failed")
    ),
    "a key that has crashed as often as it may": lambda: (
        Story()
        .call(answer="FAILURE")
        .crashes(1)
        .crashes(2)
        .crashes(3)
        .write(99, state="failed", reason="crash_loop")
    ),
    "calls that crash twice each, and then run": lambda: of_task(
        "each",
        Story()
        .call("c1", "each")
        .call("c2", "each", "FAILURE")
        .crashes(1)
        .crashes(2, "c2")
        .crashes(3)
        .crashes(4, "c2")
        .run("b", 5)
        .claim("c", 6, "c2")
        .body("c", 6, call="c2")
        .ends("c")
        .write(state="failed"),
    ),
    "a fourth body after an eviction": lambda: (
        called().note("evicted", key=KEY).crashes(1).crashes(2).crashes(3).wait(9).run("b", 4)
    ),
    "a loop that goes on": lambda: (
        called()
        .claim("a-a")
        .body("a-a")
        .item(0, "a-a")
        .item(1, "a-a")
        .ends("a-a")
        .write(state="pending", ended="lost")
        .claim("b", 2)
        .body("b", 2)
        .item(1, "b")
        .ends("b")
        .done()
    ),
    "a loop of a process that died": lambda: (
        called()
        .claim("a-a")
        .body("a-a")
        .item(0, "a-a")
        .item(1, "a-a")
        .note("killed", process="w0/c1", pid=10)
        .write(99, state="pending", ended="crashed")
        .claim("b", 2)
        .body("b", 2)
        .item(0, "b")
        .ends("b")
        .done()
    ),
    "a call that is revoked while it waits": lambda: (
        Story()
        .call(answer="REVOKED")
        .fails(1)
        .note("revoked", call="c1")
        .write(99, ended="terminated", resumes=False)
    ),
    "a late statement of a dead process for a revoked call": lambda: (
        Story()
        .call(answer="REVOKED")
        .claim("a-a")
        .body("a-a")
        .ends("a-a")
        .note("revoked", call="c1")
        .note("killed", process="w0/c1", pid=10)
        .write(state="pending", ended="lost", resumes=True)
    ),
    "a call that waits until the lease ends": lambda: (
        called()
        .run()
        .note(
            "event CallRescheduled",
            task="once",
            key="k",
            reason="another call holds the key",
            delay=3.4,
        )
    ),
    "a group whose slots are taken in turn": lambda: (
        called().run("f").slots("a", "b").slots("b").slots("b", "c")
    ),
    "a slot that is lost and written again": lambda: (
        called().run("f").slots("a").slots().slots("b", "c").slots("b", "c", "a")
    ),
    "slots after the store has lost its data": lambda: (
        called().run("f").slots("a", "b").note("emptied").slots("c").slots("c", "d")
    ),
    "turns at the distance of the rate": lambda: (
        called().claim().turn("a", 0.3).body().ends().done().turn("b").wait(3).turn("c")
    ),
    "turns of a store that has lost its data": lambda: (
        called().run("f").turn("a").note("emptied").turn("b")
    ),
    "a slot that is given back, or kept by a process that died": lambda: (
        called()
        .claim()
        .slots("a")
        .body()
        .note("killed", process="w0/c1", pid=10)
        .slots("a")
        .wait(3)
        .claim("b", 2)
        .slots("a", "b")
        .body("b", 2, "w1/c1")
        .ends("b")
        .slots("a")
        .done(owner="b", fence=2)
    ),
    "calls that are refused, or dropped, because another one runs": lambda: of_task(
        "strict",
        Story()
        .call("c1", "strict")
        .call("c2", "strict", "FAILURE")
        .claim()
        .body()
        .refuses("c2")
        .ends()
        .done(),
    ),
    "as many bodies as the larger limit of a group allows": lambda: together(
        *("roomy k1", "roomy k2", "roomy k3", "roomy k4")
    ),
    "a call that has failed, and runs again by a message that looks like its first": lambda: (
        Story()
        .call(answer="FAILURE")
        .note("delivers", call="c1", begun=False, copy="")
        .claim()
        .body()
        .ends(ending="permanent")
        .cools(8)
        .note("delivers", call="c1", begun=False, copy="")
        .wait(8)
        .run("b", 2)
    ),
    "a message that is delivered again, and is refused although its call has begun": lambda: (
        Story()
        .call(answer="FAILURE")
        .note("delivers", call="c1", begun=False, copy="")
        .claim()
        .body()
        .ends()
        .write(state="pending", ended="lost")
        .note("delivers", call="c1", begun=False, copy="")
        .cools(8, call="c2")
        .note(
            "event CallRefused",
            task="once",
            key="k",
            call_id="c1",
            error="Retry available in 8 seconds: k is cooling down",
        )
    ),
    "a call whose caller gets nothing because the key was busy": lambda: of_task(
        "lazy",
        having(
            Story().call("c1", "lazy").call("c2", "lazy").claim().body().drops("c2").ends().done(),
            answers={"c1": "SUCCESS"},
            values={"c1": "r"},
        ),
    ),
    "a long lease that is lost after a fault": lambda: of_task(
        "both",
        called()
        .claim()
        .body()
        .note("lost request", process="w0/c1")
        .wait(7)
        .loses()
        .ends()
        .run("b", 2),
    ),
    "a probe after the clock of the store has stepped, which ends the slot of another one": lambda: (
        called()
        .run("f")
        .slots(until=6)
        .slots("a", until=6, alone="a")
        .note("clock", by=10.0)
        .slots("b", until=-4, alone="b")
    ),
    "a group that is closed and probed": lambda: (
        called()
        .run("f")
        .slots("a", "b")
        .slots("b", until=12)
        .slots(until=12)
        .wait(9)
        .slots("c", until=12, alone="c")
        .slots()
        .slots("d")
        .slots("d", "e")
    ),
    "a key that has failed because of crashes, of which one was none": lambda: suspected(
        lives=True
    ),
    "a call that goes on, and is revoked because a copy has expired": lambda: revoked_copy(
        drops=True
    ),
    "closings of a group that grow": lambda: rejections(2, 4, 8, 16, 32, 64, 64),
    "a rejection beside the first one, which counts no closing": lambda: two_rejections(4),
    "a closing for a shorter time after the store has lost its data": lambda: (
        called().run("f").slots(until=20).note("emptied").slots(until=12)
    ),
    "a probe that is snoozed, and the next one, which opens the group": lambda: snoozed_probe("b"),
    "a group that is open since its store has lost its data": lambda: of_task(
        "limited",
        Story()
        .call(task="limited")
        .slots(until=4.0)
        .wait(3)
        .claim()
        .slots("a", until=4.0, alone="a")
        .body()
        .ends(ending="snooze")
        .write(state="pending", ended="snoozed")
        .note("emptied")
        .slots()
        .run("b", 2),
    ),
    "an attempt whose copy takes its row over": copied,
    "a cooldown that ends early because the clock of the database steps": lambda: (
        called()
        .claim()
        .body()
        .ends(ending="cooldown")
        .cools(60, resumes=True)
        .note("database clock", by=600.0)
        .run("b", 2)
    ),
    "an attempt that counts as a crash once its message comes again": lambda: copied(
        again=True, crashes=1
    ),
    "a fourth body after three crashes, of which the third one had done items": lambda: (
        called()
        .crashes(1)
        .crashes(2)
        .claim("a-c", 3)
        .body("a-c", 3, "w0/c3")
        .item(0, "a-c")
        .renew()
        .note("killed", process="w0/c3", pid=12)
        .write(99, state="pending", ended="crashed")
        .wait(9)
        .run("b", 4)
    ),
    "a rejection after the store has lost its data": lambda: of_task(
        "limited",
        Story()
        .call(task="limited")
        .slots(until=4.0)
        .note("emptied")
        .slots(until=4.0)
        .wait(1)
        .claim("a", 1)
        .slots("a", until=4.0, alone="a")
        .body("a", 1)
        .ends("a", "rejects")
        .slots(until=11.0, alone="a")
        .cools(2, resumes=True)
        .wait(2)
        .run("b", 2),
    ),
    "a failure that the caller gets": lambda: (
        Story().call(answer="FAILURE").claim().body().ends().write(state="failed", ended="failed")
    ),
    "a key that cools down, and whose caller has the error": lambda: (
        Story().call(answer="FAILURE").claim().body().ends().cools(5)
    ),
    "an overlap after a pause": lambda: (
        called()
        .claim()
        .body()
        .note("paused", process="w0/c1", span=9.0)
        .claim("b", 2)
        .body("b", 2, "w0/c2")
        .ends()
        .ends("b")
        .done()
    ),
    "an overlap after a pause of the host": lambda: (
        called()
        .claim()
        .body()
        .note("host paused", host="w0", span=9.0)
        .claim("b", 2)
        .body("b", 2, "w1/c2")
        .ends()
        .ends("b")
        .done()
    ),
    "an overlap after the lease store was emptied before the claim": lambda: (
        called()
        .note("emptied")
        .claim()
        .body()
        .claim("b", 2)
        .body("b", 2, "w1/c1")
        .ends()
        .ends("b")
        .done()
    ),
    "an overlap after a step of the clock": lambda: (
        called()
        .claim()
        .body()
        .note("clock", by=20.0)
        .claim("b", 2)
        .body("b", 2, "w1/c1")
        .ends()
        .ends("b")
        .done()
    ),
    "an outcome that the main process writes for a dead child": lambda: (
        called()
        .claim()
        .body()
        .note("killed", process="w0/c1", pid=10)
        .write(pid=99, state="pending", ended="crashed")
        .run("b", 2)
    ),
    "a lease that ends first for its holder": lambda: (
        called()
        .claim()
        .note("holds", key=KEY, token="a", until=4.8, store_until=5.0)
        .body()
        .ends()
        .done()
    ),
    "two runs of each call": lambda: having(
        Story()
        .call(task="each")
        .call("c2", task="each")
        .claim(task="each")
        .body()
        .ends()
        .done()
        .claim("b", 2, "c2", result=None)
        .body("b", 2, call="c2")
        .ends("b")
        .done("other"),
        values={"c1": "r", "c2": "other"},
    ),
    "a call after one that has failed": lambda: (
        Story()
        .call(task="each", answer="FAILURE")
        .claim(task="each")
        .body()
        .ends()
        .write(state="failed", ended="failed")
        .call("c2", task="each")
        .claim("b", 2, "c2")
        .note("body", key=KEY, call="c2", fence=2, token="b", process="w0/c1")
        .done()
    ),
    "a cooldown that lasts although its call is revoked": lambda: (
        Story()
        .call(answer="REVOKED")
        .claim()
        .body()
        .ends()
        .note("holds", key=KEY, token="a", until=19.0, store_until=20.0)
        .cools(9, resumes=True)
        .note("revoked", call="c1")
        .write(99, ended="terminated", resumes=False)
    ),
    "an interrupted body ends within moments": lambda: (
        called()
        .claim()
        .body()
        .wait(3)
        .claim("b", 2)
        .wait(-0.9)
        .ends()
        .body("b", 2)
        .ends("b")
        .done()
    ),
    "one effect": lambda: called().claim().body().charged().ends().done(),
    "two effects": lambda: called().claim().body().charged().charged(part=1).ends().done(),
    "effects of two calls that both run": lambda: of_task(
        "each-charged",
        called()
        .claim()
        .body()
        .charged()
        .ends()
        .done()
        .claim("b", 2, "c2")
        .body("b", 2, call="c2")
        .charged("b", "c2")
        .ends("b")
        .done(),
    ),
    "an effect of a process that stood still between its intent and its call": lambda: (
        called()
        .claim()
        .body()
        .note("paused", process="w0/c1", span=5.0)
        .wait(4)
        .note("charges", key=KEY, token="a", part=0, process="w0/c1", store_until=99.0)
        .wait(5)
        .charged()
        .note("killed", process="w0/c1", pid=10)
        .claim("b", 2)
        .body("b", 2, "w1/c1")
        .charged("b", process="w1/c1")
        .ends("b")
        .done()
    ),
    "a row that is taken over after its lease": lambda: (
        called().claim().body().holds(until=5.0).note("killed", process="w0/c1", pid=10).run("b", 2)
    ),
    "a row that is taken over after its body has ended, by the next delivery of its call": lambda: (
        called()
        .claim()
        .body()
        .holds(until=9.0)
        .ends(ending="later")
        .note("lost request", process="w0/c1")
        .wait(60)
        .run("b", 2)
    ),
    "a probe after another one": lambda: of_task(
        "limited",
        called()
        .slots(until=4.0)
        .wait(3)
        .slots("a", until=4.0, alone="a")
        .claim()
        .body()
        .ends()
        .slots(until=4.0)
        .slots("b", until=4.0, alone="b")
        .claim("b", 2, "c2")
        .body("b", 2, call="c2")
        .ends("b")
        .done(),
    ),
    "a body that runs again because its outcome was not written": lambda: (
        called()
        .claim()
        .body()
        .ends(ending="return")
        .note("lost request", process="w0/c1")
        .loses()
        .claim("b", 2)
        .body("b", 2)
        .ends("b")
        .done()
    ),
    "a lease that is lost after two refused renewals": lambda: (
        called()
        .claim()
        .body()
        .note("refused", process="w0/c1")
        .note("refused", process="w0/c1")
        .loses()
        .ends()
        .write(state="pending", ended="lost")
        .run("b", 2)
    ),
    "an effect whose reply is stored": lambda: (
        called()
        .claim()
        .body()
        .note("charges", key=KEY, token="a", process="w0/c1", store_until=9.0)
        .note("has charged", key=KEY, token="a", state="done")
        .ends()
        .done()
    ),
    "an effect under a lease that its store has lost": lambda: (
        called()
        .claim()
        .body()
        .note("emptied")
        .note("charges", key=KEY, token="a", process="w0/c1", store_until=None)
        .ends()
        .done()
    ),
    "an overlap after the lease was evicted": lambda: (
        called()
        .claim()
        .body()
        .note("evicted", key=KEY)
        .claim("b", 2)
        .body("b", 2, "w1/c1")
        .ends()
        .ends("b")
        .done()
    ),
    "a claim that was on its way when its lease was evicted": lambda: (
        called()
        .claim()
        .body(interrupted=False)
        .note("evicted", key=KEY)
        .holds(until=9.0)
        .claim("b", 2)
        .ends()
        .write(state="pending", owner="b")
        .run("b", 3)
    ),
    "an overlap of a body that cannot be interrupted": lambda: (
        called()
        .claim()
        .body(interrupted=False)
        .note("lost request", process="w0/c1")
        .loses()
        .claim("b", 2)
        .body("b", 2, "w1/c1")
        .ends()
        .ends("b")
        .done()
    ),
    "a call that its body ignores": lambda: (
        Story().call(answer=None).claim().body().ends(ending="ignore").done(None)
    ),
    "a call that its body rejects for good, after another one": lambda: of_task(
        "each",
        called()
        .run()
        .call("c2", answer=None)
        .claim("b", 2, "c2")
        .body("b", 2, call="c2")
        .note("body ended", key=KEY, call="c2", token="b", ending="reject", process="w0/c1")
        .write(state="pending", ended="rejected"),
    ),
    "a call whose body returns its message, which comes again": lambda: (
        called()
        .claim()
        .body()
        .ends(ending="requeue")
        .write(state="pending", ended="rejected", resumes=True)
        .run("b", 2)
    ),
    "a call whose body returns its message, which its queue discards": lambda: (
        Story()
        .call(answer=None)
        .claim()
        .body()
        .ends(ending="requeue")
        .write(state="pending", ended="rejected", resumes=True)
        .returns("reject")
    ),
    "a call that another one has answered, and whose copy runs and dies": lambda: of_task(
        "latest",
        called()
        .call("c2")
        .run("a", 1, "c2")
        .note("event ResultReplayed", call_id="c1", replaced=True)
        .claim("b", 2)
        .body("b", 2, pid=11)
        .note("killed", process="w0/c1", pid=11)
        .write(state="pending", ended="crashed", resumes=True),
    ),
    "a lost message of a call of which its caller has got an error": lambda: of_task(
        "queued",
        Story()
        .note("unconfirmed", task="queued", key=KEY, call="c1")
        .claim()
        .body(pid=11)
        .note("message lost", call="c1")
        .note("killed", process="w0/c1", pid=11),
    ),
    "a call that is revoked before it runs": lambda: (
        Story().call(answer="REVOKED").note("revoked", call="c1")
    ),
    "a call that expires": lambda: (
        Story().note("calls", key=KEY, call="c1", expires=5.0).call(answer="REVOKED")
    ),
    "a call that is refused before its start, and another one": lambda: (
        Story()
        .call(answer="FAILURE")
        .note("refused before the start", call="c1")
        .call("c2")
        .claim(call="c2")
        .body()
        .ends()
        .done()
    ),
    "a call that ends by its time limit in a cooldown": lambda: (
        Story()
        .call(answer="FAILURE")
        .claim()
        .body()
        .ends()
        .write(state="pending", ended="failed")
        .note("time limit", process="w0/c1", call="c1")
    ),
    "a transaction that is committed": lambda: (
        called().claim().body().done().note("committed", token="a").ends()
    ),
    "a transaction that is rolled back": lambda: (
        called()
        .claim()
        .body()
        .note("rolled back", token="a")
        .ends()
        .write(state="pending", ended="failed")
        .run("b", 2)
    ),
    "a call that is queued once for two callers": lambda: (
        Story().call(task="queued").call(task="queued", own=False).run()
    ),
    "a queued call after the end of another": lambda: (
        Story()
        .call(task="queued", answer="FAILURE")
        .claim()
        .body()
        .ends()
        .write(state="failed", ended="failed")
        .call("c2", task="queued", answer="FAILURE")
    ),
    "a queued call after one that was revoked": lambda: (
        Story()
        .call(task="queued", answer="REVOKED")
        .note("revoked", call="c1")
        .call("c2", task="queued")
        .claim(call="c2")
        .body()
        .ends()
        .done()
    ),
    "a queued call of another caller that goes on": lambda: given_another(
        "terminated", "revoked", resumes=True
    ).run("b", 2),
    "a queued call of another caller whose key waits": lambda: (
        given_another("terminated", "revoked", retry_at=99.0).wait(99).run("b", 2)
    ),
    "a queued call of another caller that has got the row of a revoked one": lambda: given_another(
        None, "revoked"
    ).run("b", 2),
    "a call with other arguments while another one goes on": lambda: other_arguments(
        5, resumes=True
    ),
    "a call with other arguments whose process has read the row before": lambda: other_arguments(0),
    "a transaction that is rolled back by a caller": lambda: Story().note("withdrawn", call="c1"),
    "a lease that the lock of a transaction prolongs": lambda: (
        called()
        .claim()
        .body()
        .note("locks", token="a")
        .note("holds", key=KEY, token="a", until=9.0, store_until=5.0)
        .ends()
        .done()
    ),
    "an unconfirmed call that never came": lambda: Story().note("unconfirmed", call="c1"),
    "a message that a queue discards before its call begins, because workers died with it": (
        lambda: Story().call(answer=None).returns("lost connection")
    ),
    "a message that a queue discards because the processes of its bodies died": lambda: (
        Story()
        .call(answer=None)
        .crashes(1)
        .returns("death", once_more=False)
        .crashes(2)
        .returns("death")
    ),
    "a message that a queue discards because a worker died with its body": lambda: (
        Story().call(answer=None).claim().body().returns("lost connection")
    ),
    "a call that fails because its queue would discard its message": lambda: (
        Story()
        .call(answer="FAILURE")
        .claim()
        .body()
        .ends(ending="later")
        .write(state="pending", ended="failed")
        .returns("reject", once_more=False)
        .cannot_wait()
    ),
    "a call that fails so before it has a row": lambda: (
        Story().call(answer="FAILURE").returns("reject", once_more=False).cannot_wait()
    ),
}

WAITS = "a takeover waits for the database"
BAD: dict[str, tuple[str, int, Callable[[], Story]]] = {
    "a row that is taken over soon after the database was frozen": (
        WAITS, 5, lambda: taken_over(answered=2.9),
    ),
    "a row that is taken over soon after the database was down": (
        WAITS, 6, lambda: taken_over(begun="down", ended="up"),
    ),
    "a row that is taken over soon after the host was cut": (
        WAITS, 6, lambda: taken_over(begun="cut", ended="mended", host="w0"),
    ),
    "a row that is taken over soon after all is healed": (
        WAITS, 6, lambda: taken_over(begun="down", ended="healed"),
    ),
    "a row without a lease that is taken over soon after the database was frozen": (
        WAITS, 5, lambda: taken_over(lasts=3.5),
    ),
    "a row that another call has left, taken over after a silence": (
        WAITS, 6,
        lambda: taken_over(("delivers", {
            "call": "c2", "copy": "", "again": True, "begun": True, "prior": ("a",)
        })),
    ),
    "a claim whose row has lost its lease in the silence": (
        WAITS, 6, lambda: slow_claim(lasts=5.5),
    ),
    "a claim after which another process takes the row over": (
        WAITS, 6, lambda: slow_claim(lasts=3.5, process="w0/c9"),
    ),
    "a call without an order that an earlier one answers": (
        "the last change is seen", 4, lambda: unordered(1),
    ),
    "a call without an order that an earlier one with an order answers, which came again": (
        "the last change is seen", 5, lambda: unordered(1, 1, ordered=1),
    ),
    "an older call with a greater order, although the store has answered": (
        "the last change is seen", 7, lambda: estimated("clock"),
    ),
    "an older call with a greater order, although no clock has stepped": (
        "the last change is seen", 7, lambda: estimated("lost reply"),
    ),
    "a call that is repeated with another idempotency key": (
        "a call is repeated", 5,
        lambda: of_task("repeated-charged", called().claim().body().charged().note(
            "charged", key=KEY, call="c1", token="a", effect="f", part=0, process="w0/c1"
        )),
    ),
    "a call that is not repeated": (
        "a call is repeated", 5,
        lambda: of_task("repeated-charged", called().claim().body().ends().write(state="uncertain")),
    ),
    "an attempt that does not get what was saved": (
        "progress is given", 11, lambda: progress(0, 0),
    ),
    "an attempt that gets what was saved before": (
        "progress is given", 18, lambda: progress(0, 1, 1),
    ),
    "an attempt that gets what was never saved": (
        "progress is given", 10, lambda: progress(0, 2, confirmed=False),
    ),
    "a body that has a lease for too long that is not renewed": (
        "a lease ends that is not renewed", 3, lambda: unrenewed(9),
    ),
    "a body within a burst of calls": ("a burst is over", 8, lambda: burst(0, 0, -0.5)),
    "an older call that runs soon after a long run": (
        "a burst costs few runs", 19, lambda: two_wait("call-2", "call-3", after=3),
    ),
    "an older call that has just come": (
        "a burst costs few runs", 17, lambda: two_wait("call-2", "call-3", after=12, tried=False),
    ),
    "one of the calls that have come fast for too short": (
        "a burst costs few runs", 27, lambda: fast_calls(4, 0.5),
    ),
    "one of the debounced calls that have come fast for too short": (
        "a burst costs few runs", 15, lambda: fast_calls(2, 0.5, "debounced"),
    ),
    "one of the calls that have come fast, which come no more": (
        "a burst costs few runs", 75, lambda: fast_calls(12, 3),
    ),
    "a call that waits for a newer one for too long": (
        "a newer call is waited for briefly", 12, lambda: waits_for_newer(1, 5, 6),
    ),
    "the end of a call hides a crash": (
        "how an attempt ended is kept", 6, lambda: with_ends(("crashed",), ("failed",)),
    ),
    "an outcome forgets that a suspicion was none": (
        "how an attempt ended is kept", 7,
        lambda: with_ends(("abandoned",), ("lost",), ("abandoned", "failed")),
    ),
    "an attempt that is forgotten": (
        "how an attempt ended is kept", 6, lambda: with_ends(("crashed", "failed"), ("crashed",)),
    ),
    "crashes of another call that count no more": (
        "crashes are not forgotten", 5, lambda: other_crashes({"c1": 2}, {"c1": 1}),
    ),
    "crashes of another call that are forgotten": (
        "crashes are not forgotten", 5, lambda: other_crashes({"c1": 2}, {}, state="pending", ended="failed"),
    ),
    "a cooldown that does not grow": (
        "waits grow", 9, lambda: called().rejected(1, 1.5).rejected(2, 1.9).run("b", 3),
    ),
    "a cooldown that grows after a call that has ended": (
        "waits grow", 14,
        lambda: of_task(
            "each", called().rejected(1, 1.5).run("b", 2).call("c2").rejected(3, 3.5, "c2").run("d", 4, "c2")
        ),
    ),
    "a retry that does not wait longer": (
        "waits grow", 9, lambda: called().retries(1, 0.9).retries(2, 0.9).run("b", 3),
    ),
    "a cooldown that is too long": ("waits grow", 5, lambda: called().rejected(1, 3.2).run("b", 2)),
    "a fence that is used twice": ("fences grow", 3, lambda: called().claim().claim("b").run("b", 2)),
    "a fence that shrinks": ("fences grow", 3, lambda: called().claim("a", 5).claim("b", 4).done()),
    "a holder that changes its fence": (
        "fences grow", 3, lambda: called().claim().write(fence=7).done(),
    ),
    "an outcome of an attempt that lost the row": (
        "one outcome", 4, lambda: called().claim().claim("b", 2).done(owner="a", fence=1),
    ),
    "an outcome with another fence": ("one outcome", 3, lambda: called().claim().done(fence=9)),
    "an outcome that a living process of another attempt writes": (
        "one outcome", 4, lambda: called().claim().body().write(pid=99, state="pending").run("b", 2),
    ),
    "a revoked call that is closed while its lease lasts": (
        "closed after its lease", 5,
        lambda: called().claim().note("holds", key=KEY, token="a", until=8.9, store_until=9.0)
        .note("revoked", call="c1").write(pid=99, state="pending", ended="terminated").run("b", 2),
    ),
    "an outcome of a process whose row was taken": (
        "one outcome", 4, lambda: called().claim().claim("b", 2).write(pid=10, state="pending").run("c", 3),
    ),
    "a lease that its holder believes too long": (
        "a lease ends first for its holder", 3,
        lambda: called().claim().note("holds", key=KEY, token="a", until=5.1, store_until=5.0).body().ends().done(),
    ),
    "a check that succeeds after the lease was lost": (
        "lost stays lost", 5,
        lambda: called().claim().body().loses()
        .note("checked", key=KEY, token="a").ends().done(),
    ),
    "a lease that is prolonged after it was lost": (
        "lost stays lost", 6,
        lambda: called().claim().note("holds", key=KEY, token="a", until=4.0, store_until=5.0).body()
        .loses().note("holds", key=KEY, token="a", until=6.0, store_until=7.0).ends().done(),
    ),
    "an overlap after the lease store was emptied in the run": (
        "no overlap", 7,
        lambda: called().claim().body().wait(3).note("emptied").wait(3).claim("b", 2).wait(1)
        .renew().body("b", 2, "w1/c1").ends().ends("b").done(),
    ),
    "a failure of an attempt that lost the row": (
        "one outcome", 4,
        lambda: called().claim().claim("b", 2).write(state="pending", owner="a", fence=1).run("c", 3),
    ),
    "done work that is claimed again": ("done stays done", 6, lambda: called().run().run("b", 2)),
    "done work whose result changes": (
        "done stays done", 6, lambda: called().run().write(result="other"),
    ),
    "done work that fails later": ("done stays done", 6, lambda: called().run().write(state="failed")),
    "a call that is done twice": (
        "each call once", 8,
        lambda: Story().call(task="each").claim(task="each").body().ends().done()
        .claim("b", 2, "c1").ends("b").done(),
    ),
    "a late copy that runs after other calls": (
        "each call once", 11,
        lambda: of_task("each", runs(called().run(), 2).run("b", 3)),
    ),
    "two bodies long after the first one was told that an operator has taken the key": (
        "no overlap", 9,
        lambda: called().claim().body().released().loses().wait(2).claim("b", 3).note("restarted")
        .body("b", 3, "w1/c1").ends().ends("b").done(),
    ),
    "a row that is taken from its holder without a higher fence": (
        "one outcome", 4,
        lambda: called().claim().body().write(99, state="pending", ended="released", owner="").ends(),
    ),
    "a body without a row": ("a record before the run", 2, lambda: called().body().run()),
    "a body with a row of another": (
        "a record before the run", 3, lambda: called().claim().body("b", 1).run("b", 2),
    ),
    "a body after its row was taken": (
        "a record before the run", 4, lambda: called().claim().claim("b", 2).body().ends().done(),
    ),
    "a body with a fence of its own": (
        "a record before the run", 3, lambda: called().claim().body("a", 5).ends().done(),
    ),
    "a body after the outcome": (
        "a record before the run", 4, lambda: called().claim().done().body().ends(),
    ),
    "two bodies at the same time": (
        "no overlap", 5,
        lambda: called().claim().body().claim("b", 2).body("b", 2, "w1/c1").ends().ends("b").done(),
    ),
    "two bodies, the first of which never ends": (
        "no overlap", 5, lambda: called().claim().body().claim("b", 2).body("b", 2, "w1/c1").ends("b").done(),
    ),
    "two bodies after another process was paused": (
        "no overlap", 6,
        lambda: called().claim().body().note("paused", process="w9/c1", span=9.0)
        .claim("b", 2).body("b", 2, "w1/c1").ends().ends("b").done(),
    ),
    "two bodies long after a pause": (
        "no overlap", 6,
        lambda: called().claim().body().note("paused", process="w0/c1", span=1.0).wait(20)
        .claim("b", 2).body("b", 2, "w1/c1").ends().ends("b").done(),
    ),
    "a body that survives the death of another process": (
        "no overlap", 6,
        lambda: called().claim().body().note("killed", process="w0/c2", pid=99)
        .claim("b", 2).body("b", 2, "w1/c1").ends().ends("b").done(),
    ),
    "an effect that is executed twice": (
        "one effect", 5,
        lambda: called().claim().body().charged()
        .charged().ends().done(),
    ),
    "an effect that two attempts execute": (
        "one effect", 8,
        lambda: called().claim().body().charged()
        .note("killed", process="w0/c1", pid=10).claim("b", 2).body("b", 2, "w1/c1")
        .charged("b", process="w1/c1").ends("b").done(),
    ),
    "an effect of a call that is executed by two of its runs": (
        "one effect", 13,
        lambda: of_task("each-charged", called().claim().body().charged().ends()
        .write(state="pending", ended="lost").run("b", 2, "c2")
        .claim("c", 3).body("c", 3).charged("c").ends("c").done()),
    ),
    "a row that is taken over long after a lease was evicted": (
        "a holder keeps its row", 6,
        lambda: called().note("evicted", key=KEY).claim().body().holds(until=9.0).run("b", 2),
    ),
    "a row that is taken over while its holder has its lease": (
        "a holder keeps its row", 5,
        lambda: called().claim().body().holds(until=9.0).run("b", 2),
    ),
    "a probe beside another one without a slot": (
        "a probe is alone", 6,
        lambda: of_task("limited", called().slots(until=4.0).wait(3).claim().body()
        .claim("b", 2, "c2").body("b", 2, "w1/c1", call="c2").ends().ends("b").done()),
    ),
    "a body in a cooldown": (
        "a cooldown holds", 7,
        lambda: called().claim().body().ends().cools(20, resumes=True).run("b", 2),
    ),
    "a body two seconds before the end of a cooldown": (
        "a cooldown holds", 7,
        lambda: called().claim().body().ends().cools(20, resumes=True).wait(16).run("b", 2),
    ),
    "a cooldown that is shorter than what was asked for": (
        "a cooldown lasts", 5,
        lambda: called().claim().body().ends(ending="cooldown").cools(1, resumes=True).wait(1).run("b", 2),
    ),
    "a cooldown that ends with its call": (
        "a wait is not shortened", 7,
        lambda: Story().call(answer="REVOKED").claim().body().ends().cools(9, resumes=True)
        .note("revoked", call="c1").write(99, ended="terminated", resumes=False, retry_at=0.0),
    ),
    "an outcome that is not written because of one refused request": (
        "an outcome is repeated", 6,
        lambda: called().claim().body().ends(ending="self.retry").note("refused", process="w0/c1")
        .claim("b", 2).body("b", 2).ends("b").done(),
    ),
    "a quick retry too many": (
        "retries are limited", 13, lambda: called().retries(1).retries(2).retries(3).run("b", 4),
    ),
    "a copy of a message that was retried": (
        "a retry is not repeated", 6,
        lambda: called().claim().body(retries=0).ends(ending="self.retry")
        .write(state="pending", ended="retried").body("b", 2, retries=0).ends("b"),
    ),
    "a crash that counts although the attempt was heard of": (
        "only crashes count", 5,
        lambda: called().claim("a-a").claim("b-b", 2, crashes=1).write(10)
        .note("event OutcomeRefused", task="once", key="k", fence=1, was_suspected=True).done(),
    ),
    "a call with the result of an older one": ("the last change is seen", 6, lambda: latest(2, 1)),
    "an outcome that is not written because of two lost replies": (
        "an outcome is repeated", 7,
        lambda: called().claim().body().ends(ending="later").note("lost reply", process="w0/c1")
        .note("lost reply", process="w0/c1").claim("b", 2).body("b", 2).ends("b").done(),
    ),
    "a call that runs after it has failed, and another one ran": (
        "what has failed does not run", 8,
        lambda: Story().call(task="each", answer="FAILURE").claim(task="each").body().ends()
        .write(state="failed", ended="failed").claim("b", 2, "c2").claim("a", 3).body("a", 3),
    ),
    "the result of another call": (
        "own results", 2,
        lambda: Story().call(task="each").call("c2", task="each").claim(task="each").body().ends().done(),
    ),
    "a body that runs again after it has returned": (
        "without faults nothing runs twice", 6,
        lambda: called().claim().body().ends(ending="return").claim("b", 2).body("b", 2).ends("b").done(),
    ),
    "a body that runs again because of a fault of another process": (
        "without faults nothing runs twice", 7,
        lambda: called().claim().body().ends(ending="return").note("lost request", process="w0/c2")
        .claim("b", 2).body("b", 2).ends("b").done(),
    ),
    "a body that runs again because of a fault after its outcome": (
        "without faults nothing runs twice", 9,
        lambda: Story().call(task="each").claim(task="each").body().ends(ending="return").done()
        .wait(1).note("killed", process="w0/c1", pid=10).wait(1)
        .claim("b", 2, "c1").note("restarted").body("b", 2, "w0/c2").ends("b").done(),
    ),
    "a lease that is lost without a fault": (
        "without faults no lease is lost", 4, lambda: called().claim().body().loses().ends().done(),
    ),
    "a lease that is lost after one refused renewal": (
        "without faults no lease is lost", 5,
        lambda: called().claim().body().note("refused", process="w0/c1").loses().ends().done(),
    ),
    "a lease that is lost long after a fault": (
        "without faults no lease is lost", 5,
        lambda: called().claim().body().note("lost request", process="w0/c1").wait(9).loses().ends().done(),
    ),
    "a body whose lease has ended": (
        "a body begins under its lease", 3,
        lambda: called().claim().body(store_until=2.5).ends().done(),
    ),
    "a body whose lease has ended for its holder": (
        "a body begins under its lease", 4,
        lambda: called().claim().note("holds", key=KEY, token="a", until=3.5, store_until=9.0)
        .body().ends().done(),
    ),
    "a success without a result": ("one result", 1, lambda: having(called().run(), values={"c1": None})),
    "an effect whose reply is not stored": (
        "the reply of an effect is stored", 4,
        lambda: called().claim().body().note("has charged", key=KEY, token="a", state="sent").ends().done(),
    ),
    "an effect after its lease has ended": (
        "an effect is called under its lease", 4,
        lambda: called().claim().body()
        .note("charges", key=KEY, token="a", process="w0/c1", store_until=3.5).ends().done(),
    ),
    "an effect after a pause in which its lease has ended": (
        "an effect is called under its lease", 5,
        lambda: called().claim().body().note("paused", process="w0/c1", span=1.0)
        .note("charges", key=KEY, token="a", process="w0/c1", store_until=3.5).ends().done(),
    ),
    "two bodies after another lease was evicted": (
        "no overlap", 6,
        lambda: called().claim().body().note("evicted", key="once other").claim("b", 2)
        .body("b", 2, "w1/c1").ends().ends("b").done(),
    ),
    "two bodies, the first of which cannot be interrupted, and has not lost its lease": (
        "no overlap", 5,
        lambda: called().claim().body(interrupted=False).claim("b", 2).body("b", 2, "w1/c1")
        .ends().ends("b").done(),
    ),
    "a call that nobody has revoked": (
        "nothing is lost", 1, lambda: Story().call(answer="REVOKED").run(),
    ),
    "a call that expires although it never should": (
        "nothing is lost", 1, lambda: Story().call(answer="REVOKED").note("revoked", call="c2").run(),
    ),
    "a revoked call whose caller has no answer": (
        "nothing is lost", 1, lambda: Story().call(answer="PENDING").note("revoked", call="c1"),
    ),
    "a row that waits for a revoked call": (
        "nothing is left", 0,
        lambda: Story().call(answer="REVOKED").claim().body().ends()
        .write(state="pending", ended="failed", resumes=True).note("revoked", call="c1"),
    ),
    "a transaction that is committed without the record": (
        "completed with its rows", 4,
        lambda: called().claim().body().note("committed", token="a").ends().claim("b", 2).body("b", 2).ends("b").done(),
    ),
    "a record that is done although its transaction was rolled back": (
        "completed with its rows", 4,
        lambda: called().claim().body().note("rolled back", token="a").ends().done(),
    ),
    "a revoked call for another caller": (
        "what has ended is not queued", 7, lambda: given_another("terminated", "revoked"),
    ),
    "a call with other arguments after a failure": (
        "what has failed keeps no key", 7, lambda: other_arguments(5),
    ),
    "a result for another call with other arguments": (
        "own results", 2, lambda: of_task(
            "compared", Story().call(task="compared").call("c2", "compared").run(),
        ),
    ),
    "other arguments while the call before is to run again": (
        "other arguments wait for the failure", 7,
        lambda: of_task(
            "compared",
            Story().call(task="compared").call("c2", "compared", "FAILURE").claim(task="compared")
            .body().ends().cools(8, resumes=True).claim("b", 2, "c2"),
        ),
    ),
    "an attempt that counts as a crash although its copy goes on": (
        "what a copy names is no crash", 8, lambda: copied(crashes=1),
    ),
    "a fourth body after three crashes, between which one was snoozed": (
        "what keeps crashing ends", 19,
        lambda: called().crashes(1).crashes(2).claim("c", 3).body("c", 3).ends("c", "snooze")
        .write(state="pending", ended="snoozed").crashes(4).wait(9).run("b", 5),
    ),
    "a call that runs again although its work may have been done": (
        "what may have been done is not repeated", 5,
        lambda: called().claim().body().ends(ending="timeout").cools(60, resumes=True),
    ),
    "a call that is done, and is dropped because it expires": (
        "what is done does not expire", 10,
        lambda: called().run().run("b", 2, "c2").note(
            "event CallDropped", task="once", key="k", call_id="c1", reason=Dropped.EXPIRED, by="w0/c1"
        ),
    ),
    "a key that fails for good after a failure of its group": (
        "only own failures count", 9,
        lambda: called().claim().body().ends(ending="closes").cools(8, resumes=True).wait(8)
        .claim("b", 2).body("b", 2).ends("b", "error")
        .write(state="failed", ended="failed", reason="too_many_failures"),
    ),
    "a fence that falls because the clock of the database steps": (
        "fences grow", 7,
        lambda: called().run("a", 9).note("database clock", by=-20.0).claim("b", 2),
    ),
    "two queued calls of a key": (
        "queued once", 2,
        lambda: Story().call(task="queued").call("c2", task="queued").run(),
    ),
    "a queued call while another one runs": (
        "queued once", 4,
        lambda: Story().call(task="queued").claim().body().call("c2", task="queued").ends().done(),
    ),
    "a call that runs although its transaction was rolled back": (
        "a withdrawn call does not run", 3,
        lambda: Story().note("withdrawn", call="c1").claim().body().ends().done(),
    ),
    "another call that comes a second early after a retry": (
        "a cooldown holds", 7,
        lambda: called().claim().body().ends().write(state="pending", ended="retried", retry_at=9)
        .write(call="c2", state="running", owner="b", fence=2).note(
            "body", key=KEY, call="c2", fence=2, token="b", process="w0/c1"),
    ),
    "a key that cools down, and is given to another call": (
        "a cooldown holds", 8,
        lambda: called().claim().body().ends().cools(9).write(state="pending", call="c2", retry_at=0)
        .claim("b", 2, "c2").body("b", 2),
    ),
    "a fourth cooldown": (
        "what keeps failing ends", 17, lambda: called().fails(1).fails(2).fails(3).fails(4),
    ),
    "a fourth body after three crashes": (
        "what keeps crashing ends", 15,
        lambda: called().crashes(1).crashes(2).crashes(3).wait(9).run("b", 4),
    ),
    "a fourth body of a call after three crashes, and one of another call": (
        "what keeps crashing ends", 19,
        lambda: of_task("each", called().crashes(1).crashes(2).crashes(3, "c2").crashes(4).wait(9).run("b", 5)),
    ),
    "a key that fails by a crash that was heard of": (
        "only crashes count", 15,
        lambda: called().crashes(1).crashes(2).claim("c-c", 3).claim("d-d", 4)
        .note("event OutcomeRefused", task="once", key="k", fence=3).claim("e-e", 5)
        .note("event OutcomeRefused", task="once", key="k", fence=4).write(0xE, state="failed", reason="crash_loop"),
    ),
    "a key that has failed by crashes that are heard of later": (
        "only crashes count", 0,
        lambda: called().crashes(1).claim("b-b", 2).claim("c-c", 3).claim("d-d", 4)
        .write(0xD, state="failed", reason="crash_loop").note("event OutcomeRefused", task="once", key="k", fence=3),
    ),
    "a message that begins twice": (
        "a delivery is handled once", 6, lambda: called().run().note("begins twice", call="c1"),
    ),
    "a message that another worker has got, and that is acknowledged": (
        "a delivery is handled once", 6,
        lambda: called().run().note("acknowledges for another", worker="w0/1", tag=1),
    ),
    "a message that another worker has got, and that is returned": (
        "a delivery is handled once", 6,
        lambda: called().run().note("returns for another", worker="w0", tag=1),
    ),
    "a call that expires although it has begun": (
        "what has begun does not expire", 3,
        lambda: Story().call(answer="REVOKED").claim().body().ends().write(state="pending"),
    ),
    "an item that is done again": (
        "items are done once", 10,
        lambda: called().claim("a-a").body("a-a").item(0, "a-a").item(1, "a-a").ends("a-a")
        .write(state="pending", ended="lost").claim("b", 2).body("b", 2).item(0, "b"),
    ),
    "a revoke that ends another call in its row": (
        "Celery ends one call", 7,
        lambda: called().fails(1).note("revoked", call="c2").write(99, ended="terminated"),
    ),
    "a call that waits for longer than the lease": (
        "a call waits for the lease", 6,
        lambda: called().run().waits(8.1),
    ),
    "a slot of a closed group": (
        "a closed group holds", 7, lambda: called().run("f").slots(until=12).slots("a", until=12),
    ),
    "a probe that is rejected, and closes its group for no longer than before": (
        "a closing grows", 12, lambda: rejections(2, 2),
    ),
    "a key that has failed because of crashes, and waits for ever": (
        "nothing is lost", 1, lambda: suspected(lives=False),
    ),
    "a call that goes on, and ends although nobody has revoked it": (
        "nothing is lost", 2, lambda: revoked_copy(drops=False),
    ),
    "a failure that closes a group for a shorter time": (
        "a closing is not shortened", 7, lambda: called().run("f").slots(until=20).slots(until=12),
    ),
    "a probe that is snoozed, and opens the group": (
        "what proves nothing opens no group", 8, lambda: snoozed_probe("a"),
    ),
    "a rejection beside the first one, which counts": (
        "a closing grows", 13, lambda: two_rejections(8),
    ),
    "a closing that is counted twice": ("a closing grows", 18, lambda: rejections(2, 4, 16)),
    "a closing beyond the longest one": (
        "a closing grows", 42, lambda: rejections(2, 4, 8, 16, 32, 64, 128),
    ),
    "a call that loses its place when it is rescheduled": (
        "the oldest has the place", 7, lambda: rescheduled(3, 8),
    ),
    "a call that loses its place the second time": (
        "the oldest has the place", 10, lambda: rescheduled(3, 3, 13),
    ),
    "a place of a call that came later": (
        "the oldest has the place", 4, lambda: rescheduled(5),
    ),
    "a later call that takes the only slot": (
        "older calls begin first", 4, lambda: overtakes("b", w1=4),
    ),
    "a later call that leaves a slot for one of two places": (
        "older calls begin first", 4, lambda: overtakes(w1=4, w2=3),
    ),
    "a later call that takes a turn by the rate": (
        "older calls begin first", 4, lambda: overtakes(task="rated", group="mail", w1=4),
    ),
    "two turns that are too close": (
        "a rate holds", 7, lambda: called().run("f").turn("a").wait(1).turn("b"),
    ),
    "a body before its turn": (
        "a rate holds", 4, lambda: called().claim().turn("a", 2.0).body().ends().done(),
    ),
    "a slot that ends before its body": (
        "a slot lasts", 5, lambda: called().claim().slots("a", lasts=3).body().wait(5).ends().done(),
    ),
    "a slot that is not given back": (
        "a slot is given back", 6,
        lambda: called().claim().slots("a").body().ends().wait(1).slots("a", "b").done(),
    ),
    "a call that has failed, and runs again because its message is delivered again": (
        "what is reported does not run", 9,
        lambda: Story().call(answer="FAILURE").note("delivers", call="c1", begun=False, copy="")
        .claim().body().ends(ending="permanent").cools(8)
        .note("delivers", call="c1", begun=False, copy="", again=True).wait(8).run("b", 2),
    ),
    "a call of two limits of a group that begins beyond the smaller one": (
        "a limit holds", 6, lambda: together("roomy k1", "tight k2", "roomy k3"),
    ),
    "a call that is refused although its task does not say that": (
        "only a busy key refuses", 4,
        lambda: called().claim().body().refuses("c2", "once").ends().done(),
    ),
    "a call that is refused because its key cools down, although it has begun": (
        "what has begun is not refused", 9,
        lambda: Story().call("c1", answer="FAILURE").note("delivers", call="c1", begun=False, copy="")
        .claim().body().ends().write(state="pending", ended="lost")
        .note("delivers", call="c1", begun=False, copy="2 b")
        .cools(8, call="c2").note("event CallRefused", task="once", key="k", call_id="c1",
        error="Retry available in 8 seconds: k is cooling down"),
    ),
    "a call that is dropped although it has begun": (
        "what has begun is not refused", 8,
        lambda: of_task(
            "lazy",
            Story().call("c1", "lazy").claim().body().ends().write(state="pending")
            .claim("b", 2, "c2").body("b", 2, call="c2").drops("c1"),
        ),
    ),
    "a call that is refused although no other one runs": (
        "only a busy key refuses", 6,
        lambda: of_task("strict", Story().call("c1", "strict").run().wait(20).refuses("c2")),
    ),
    "two probes": (
        "a closed group holds", 8,
        lambda: called().run("f").slots(until=6).slots("a", until=6, alone="a").slots("a", "b", until=6),
    ),
    "a slot above the limit": (
        "a limit holds", 7, lambda: called().run("f").slots("a", "b").slots("a", "b", "c"),
    ),
    "a message of a dead worker that waits for the visibility timeout": (
        "nothing is left", 0, lambda: having(called().run(), late=True),
    ),
    "a call whose body returns its message, which does not come": (
        "nothing is lost", 1,
        lambda: Story().call(answer=None).claim().body().ends(ending="requeue")
        .write(state="pending", ended="rejected", resumes=True),
    ),
    "a call whose last body is not the one that ignored it": (
        "nothing is lost", 1,
        lambda: Story().call(answer=None).claim().body().ends(ending="ignore").claim("b", 2)
        .body("b", 2).ends("b").write(state="pending"),
    ),
    "a call that its body rejects for good, whose row waits for it": (
        "nothing is lost", 1,
        lambda: called().claim().body().ends(ending="reject")
        .write(state="pending", ended="rejected", resumes=True),
    ),
    "a call without a row": ("nothing is lost", 1, called),
    "a call that waits for ever although another one has not answered it": (
        "nothing is lost", 1,
        lambda: of_task("latest", called().call("c2").run("a", 1, "c2").claim("b", 2)
        .body("b", 2, pid=11).note("killed", process="w0/c1", pid=11)
        .write(state="pending", ended="crashed", resumes=True)),
    ),
    "a lost message of a call that runs": (
        "nothing is left", 0,
        lambda: of_task(
            "queued",
            Story().note("unconfirmed", task="queued", key=KEY, call="c2").claim().body(pid=11)
            .note("message lost", call="c1").note("killed", process="w0/c1", pid=11),
        ),
    ),
    "a call whose row is pending": (
        "nothing is lost", 1, lambda: called().claim().body().ends().write(state="pending"),
    ),
    "a call without an answer whose message its worker returned once too often": (
        "nothing is lost", 3, lambda: called().returns("reject").run(),
    ),
    "a call that is lost although its queue has its message": (
        "nothing is lost", 1, lambda: Story().call(answer=None).returns("death", once_more=False).run(),
    ),
    "a discarded message that a record has": (
        "nothing is lost", 1,
        lambda: of_task(
            "queued",
            Story().call(answer=None, task="queued").claim().write(state="pending").returns("death"),
        ),
    ),
    "a call that fails although its queue takes its message back": (
        "a call fails only if it cannot be returned", 3,
        lambda: Story().call(answer="FAILURE").claim().cannot_wait()
        .write(state="failed", ended="failed"),
    ),
    "a call that fails because of its queue, whose row waits for it": (
        "nothing is lost", 1,
        lambda: Story().call(answer="FAILURE").claim().write(state="pending", resumes=True)
        .returns("reject", once_more=False).cannot_wait(),
    ),
    "a cooldown that nobody ends": (
        "nothing is lost", 1, lambda: called().claim().body().ends().cools(5, resumes=True),
    ),
    "a caller without an answer": (
        "nothing is lost", 1, lambda: Story().call(answer="PENDING").run(),
    ),
    "a second caller without an answer": (
        "nothing is lost", 2, lambda: called().call("c2", answer="RETRY").run(),
    ),
    "a row that runs for ever": ("nothing is lost", 1, lambda: called().claim().body().ends()),
    "a lease that is held for ever": (
        "nothing is left", 0, lambda: having(called().run(), held=["k"]),
    ),
    "a row that runs after a time limit": (
        "nothing is left", 0,
        lambda: called().claim().body().note("time limit", process="w0/c1", call="c1"),
    ),
    "messages for ever": ("nothing is left", 0, lambda: having(called().run(), quiet=False)),
    "two results": (
        "one result", 2, lambda: having(called().call("c2").run(), values={"c1": "r", "c2": "s"}),
    ),
    "a row that is deleted": ("a record lasts", 6, lambda: called().run().deleted()),
    "a row that is deleted before its retention is over": (
        "a record lasts", 6, lambda: called().claim().body().ends().expires(lasts=8e5).deleted(),
    ),
    "a row that is deleted while it runs": (
        "a record lasts", 4, lambda: called().claim(expires_at=2.0).body().deleted(),
    ),
    "a retention that counts from the claim": (
        "a record lasts", 5,
        lambda: of_task("brief", brief().claim().body().wait(1).ends().expires(lasts=0.5)),
    ),
    "a retention that counts from the failure, and not from the wait": (
        "a record lasts", 5,
        lambda: of_task("brief", brief().claim().body().ends().cools(8, expires_at=10.0)),
    ),
    "a record that is left by a purge": (
        "what has expired is purged", 0,
        lambda: of_task("brief", brief().claim().body().ends().expires())
        .wait(RETENTION).note("purged", since=8.0),
    ),
    "an effect that is left by a purge": (
        "what has expired is purged", 0, lambda: having(called().run(), effects=["e"]),
    ),
    "a done key that runs again before its record expires": (
        "each call once", 7,
        lambda: of_task("brief", brief().claim().body().ends().expires().run("b", 2)),
    ),
    "the result of a record that had expired": (
        "what has expired answers nobody", 9, lambda: having(expired(), values={"c2": "[0, 1]"}),
    ),
    "two results of a generation": (
        "one result", 10,
        lambda: having(expired(), values={"c1": "[0, 2]", "c2": "[1, 2]"}),
    ),
    "an effect that is executed again while its call has the row": (
        "one effect", 11, lambda: each_brief("c1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_accepted(name: str) -> None:
    assert [str(found) for found in violations(GOOD[name]().end())] == []


@pytest.mark.parametrize("name", BAD)
def test_the_first_wrong_note_of_a_bad_history_is_named(name: str) -> None:
    promise, number, made = BAD[name]
    notes = made().end()
    found = [each for each in violations(notes) if each.promise == promise]
    assert found, [str(each) for each in violations(notes)]
    at = found[0].note
    assert (notes.index(at) + 1 if at is not None else 0) == number


def test_there_are_enough_histories() -> None:
    assert len(GOOD) + len(BAD) >= 40
