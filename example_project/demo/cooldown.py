"""``make demo-cooldown``: documents for a rate-limited paid model, with leases and on plain Celery.

Exits with 1 if a promise was broken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import click

from example_project.demo.bill import LEASES, PLAIN, Account, Bill, Promise
from example_project.demo.json_over_http import Refused, ask
from example_project.demo.model import PRICE, Charge, charges
from example_project.demo.narrator import Narrator
from example_project.demo.stage import CommandFailed, Stage
from example_project.demo.story import Story, perform

FIVE_MINUTES = 300
"""Seconds of the rate limit in the first scene; up to 5 s are added to a server's delay."""

SHORT_LIMIT = 3
COOLDOWN = 1.0
PRESSES = 20
ACCOUNTS = {LEASES: "leases", PLAIN: "plain"}
WEBS = {LEASES: "web-1", PLAIN: "web-2"}
MODULES = {LEASES: "example_project.tasks", PLAIN: "example_project.demo.plain"}
EXPLANATION = f"""
  Every call costs {PRICE} cents, even a refused one. Plain Celery runs the same bodies:
  for the button without retries, overnight with autoretry_for and retry_backoff.
  Promised: a key that cools down does not run for any caller, and runs again when its time is over.
  Not promised: if a process dies during a call, the next attempt pays for the call again.
  docs/explanation/guarantees.md says more.
"""


class PaidStage(Stage):
    """A stage with a paid model and two web sites, each in its own process."""

    modules = (*Stage.modules, "example_project.demo.plain")

    def furnish(self) -> dict[str, str]:
        """Start the servers, and pass the URL of the model to the workers."""
        os.environ["no_proxy"] = "127.0.0.1"
        self._ledger = self.home / "ledger.jsonl"
        servers = {"model": ["example_project.demo.model", str(self._ledger)]}
        servers |= {web: ["example_project.demo.website", web] for web in WEBS.values()}
        started = {name: self.start(name, command) for name, command in servers.items()}
        ports = {
            name: server.wait_for_log(r"listens on port (\d+)$", 20)[1]
            for name, server in started.items()
        }
        self._urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        return {"MODEL_URL": self._urls["model"], "COOLDOWN_SECONDS": str(COOLDOWN)}

    def trouble(self, model: str, **what: float) -> None:
        """Set the trouble of a model; without arguments it has none."""
        self._ask("model", f"troubles/{model}", what, method="PUT")

    def charges(self, side: str, model: str) -> list[Charge]:
        """What one side was billed for calls of one model."""
        account = ACCOUNTS[side]
        return [
            charge
            for charge in charges(self._ledger)
            if (charge.account, charge.model) == (account, model)
        ]

    def press(self, task: str, times: int, model: str, documents: Sequence[int]) -> None:
        """Press the button *times* times for each document, on both sides at once."""
        asked = {"times": times, "model": model, "documents": documents}
        with ThreadPoolExecutor() as fingers:
            presses = [
                fingers.submit(
                    self._ask, WEBS[side], "button", {"task": f"{MODULES[side]}.{task}", **asked}
                )
                for side in WEBS
            ]
        for press in presses:
            press.result()

    def page(self, key: str) -> str:
        """The message on the page of a document."""
        return str(
            self._ask(
                WEBS[LEASES], "page", {"task": f"{MODULES[LEASES]}.write_summary", "key": key}
            )
        )

    def _ask(self, server: str, path: str, value: Any, method: str = "POST") -> Any:
        try:
            return ask(f"{self._urls[server]}/{path}", value, method=method, timeout=20)
        except (OSError, Refused) as error:
            raise CommandFailed(f"{server} does not answer: {error}") from None

    def operate(self, *words: str) -> str:
        """The output of ``celery leases``."""
        command = ["celery", "-A", "example_project", "leases", *words]
        return self.finish("operator", self.start("operator", command))


@dataclass(frozen=True)
class Scene:
    """A model, and the documents that it summarises."""

    name: str
    model: str
    documents: Sequence[int]

    @property
    def keys(self) -> list[str]:
        """The keys of its documents."""
        return [f"document:{document}" for document in self.documents]


BUTTON = Scene("the button", "quill", [1842])
NIGHT = Scene("the night", "plume", [11, 12, 13, 14, 15, 16])
NONSENSE = Scene("the nonsense", "nib", [21])


class Demo(Story[PaidStage]):
    """The demo: three scenes, each with its own model and trouble."""

    explanation = EXPLANATION

    def __init__(self, stage: PaidStage, narrator: Narrator) -> None:
        super().__init__(stage, narrator)
        self.promises: list[Promise] = []

    def scenes(self) -> None:
        """Play all scenes."""
        self._a_button_pressed_again_and_again()
        self._an_operator_who_looks()
        self._a_night_with_a_short_limit()
        self._a_model_that_talks_nonsense()

    def verdict(self) -> Bill:
        """The promises and totals so far."""
        scenes = [BUTTON, NIGHT, NONSENSE]
        return Bill(
            self.promises,
            [self._account(scene, side) for scene in scenes for side in (LEASES, PLAIN)],
        )

    # -- the scenes --------------------------------------------------------------------------------

    def _a_button_pressed_again_and_again(self) -> None:
        self._begin(
            BUTTON,
            "A document is submitted, its model is rate limited, and pressed again and again",
        )
        self.narrator.say(
            "demo", f"{WEBS[LEASES]} has a button with leases, {WEBS[PLAIN]} one with plain Celery"
        )
        self._limit(BUTTON, FIVE_MINUTES)
        self._press("write_summary", BUTTON)
        self._show(BUTTON)
        self._press("write_summary", BUTTON, PRESSES)
        leased, plain = ([*self._answers(side)][-PRESSES:] for side in (LEASES, PLAIN))
        refused = [answer for answer in leased if str(answer).startswith("CoolingDown(")]
        self.narrator.say(
            WEBS[LEASES], f"got CoolingDown as the answer to {len(refused)} of {PRESSES} presses"
        )
        self.narrator.say(
            WEBS[PLAIN], f"got {plain[-1]} as the answer to {plain.count(plain[-1])} of {PRESSES}"
        )
        paid, plainly_paid = (
            len(self.stage.charges(side, BUTTON.model)) for side in (LEASES, PLAIN)
        )
        self.narrator.say(
            "model",
            f"has billed {paid} call{'' if paid == 1 else 's'}; plain Celery {plainly_paid}",
        )
        self._promise(
            f"the button: presses answered with CoolingDown, of {PRESSES}", PRESSES, len(refused)
        )
        self._promise(f"the button: paid calls after {PRESSES + 1} presses", 1, paid)
        self._promise(
            "the button: message on its page", "Retry available in 5 minutes", self._show(BUTTON)
        )

    def _an_operator_who_looks(self) -> None:
        key, group = BUTTON.keys[0], f"model:{BUTTON.model}"
        self.narrator.scene("An operator examines the key, raises the quota, and lets the key run")
        self._operate("show", key)
        self._operate("group", "list")
        self.stage.trouble(BUTTON.model)
        self.narrator.say("model", f"{BUTTON.model} answers again, to both accounts")
        self._operate("group", "open", group)
        self._operate("retry", key, fields=False)
        self._press("write_summary", BUTTON)
        self._promise("the button: message on its page in the end", "Done", self._show(BUTTON))
        self._promise(
            "the button: paid calls in the end", 2, len(self.stage.charges(LEASES, BUTTON.model))
        )

    def _a_night_with_a_short_limit(self) -> None:
        number = len(NIGHT.documents)
        self._begin(
            NIGHT,
            f"{number} documents overnight, and a model with a rate limit of {SHORT_LIMIT} seconds",
        )
        self._limit(NIGHT, SHORT_LIMIT)
        self.stage.press("write_summary_overnight", 1, NIGHT.model, NIGHT.documents[:1])
        self.wait(lambda: self._events("GroupClosed", NIGHT.keys), 15, "a closed group")
        self._press("write_summary_overnight", NIGHT, documents=NIGHT.documents[1:])
        times = [charge.t for charge in self.stage.charges(LEASES, NIGHT.model)]
        early = [t for t in times[1:] if t < times[0] + SHORT_LIMIT]
        finished = self._account(NIGHT, LEASES).finished
        self._promise(f"the night: documents finished by themselves, of {number}", number, finished)
        self._promise("the night: paid calls, one of them refused", number + 1, len(times))
        self._promise("the night: calls before the end of the model's Retry-After", 0, len(early))

    def _a_model_that_talks_nonsense(self) -> None:
        self._begin(
            NONSENSE,
            "A model whose first two responses are incomplete: no response says how long to wait",
        )
        self.stage.trouble(NONSENSE.model, nonsense=2)
        self._press("write_summary_overnight", NONSENSE)
        settled = self._events("AttemptSettled", NONSENSE.keys)
        waits = [event["retry_after"] for event in settled if event["state"] == "cooling"]
        times = [charge.t for charge in self.stage.charges(LEASES, NONSENSE.model)]
        early = [
            wait
            for (before, t), wait in zip(pairwise(times), waits, strict=False)
            if t < before + wait
        ]
        promised, seen = (
            ", then ".join(f"{wait:g} s" for wait in each)
            for each in ([COOLDOWN, 2 * COOLDOWN], waits)
        )
        self._promise("the nonsense: cooldowns of the document", promised, seen)
        self._promise("the nonsense: calls during these cooldowns", 0, len(early))

    # -- small steps -------------------------------------------------------------------------------

    def _begin(self, scene: Scene, headline: str) -> None:
        self.narrator.scene(f"{headline} (model {scene.model})")

    def _limit(self, scene: Scene, seconds: float) -> None:
        self.stage.trouble(scene.model, limited_for=seconds)
        self.narrator.say(
            "model",
            f"{scene.model} refuses each account for {seconds} s from its first call",
        )

    def _press(
        self, task: str, scene: Scene, times: int = 1, documents: Sequence[int] | None = None
    ) -> None:
        self.stage.press(task, times, scene.model, documents or scene.documents)
        self.wait(self.all_answered, 25, "all answers")

    def _show(self, scene: Scene) -> str:
        says = self.stage.page(scene.keys[0])
        self.narrator.say(WEBS[LEASES], f"shows its reader: {says}", colour="green")
        return says

    def _operate(self, *words: str, fields: bool = True) -> None:
        printed = self.stage.operate(*words).splitlines()
        self.narrator.say("operator", f"celery leases {' '.join(words)}")
        self.narrator.quote(line for line in printed if fields or not line.startswith("  "))

    def _promise(self, what: str, promised: object, seen: object) -> None:
        self.promises.append(Promise(what, promised, seen))

    def _events(self, what: str, keys: Sequence[str]) -> list[Mapping[str, Any]]:
        return [
            event
            for event in self.stage.journal.events
            if event["what"] == what and event["key"] in keys
        ]

    def _answers(self, side: str) -> Iterator[Any]:
        results = self.stage.results()
        return (
            results.get(request.call_id)
            for request in self.stage.requests
            if request.web == WEBS[side]
        )

    def _account(self, scene: Scene, side: str) -> Account:
        asked = [
            request
            for request in self.stage.requests
            if request.web == WEBS[side] and request.key in scene.keys
        ]
        results = self.stage.results()
        finished = {
            request.key for request in asked if isinstance(results.get(request.call_id), dict)
        }
        billed = self.stage.charges(side, scene.model)
        cents = sum(charge.cents for charge in billed)
        return Account(
            scene.name, side, len(asked), len(billed), cents, len(scene.documents), len(finished)
        )


@click.command()
def main() -> None:
    """Run the demo and check its promises."""
    perform(Demo(PaidStage(), Narrator(done="summarised")))


if __name__ == "__main__":
    main(standalone_mode=False)
