"""Sends each command to the Redis Cluster node that serves its key, and never retries a command
that may have been executed.

redis-py's own cluster client connects when it is made, retries commands, and fails a whole pipeline
if one node is down. Leases must not do any of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from celery_leases.stores.redis.errors import REDIS_ERRORS
from celery_leases.stores.redis.values import as_text

Node = tuple[str, int]
"""Host and port."""

_REDIRECTS: Final = 5
_ERRORS: Final = {"ASK": AskError, "MOVED": MovedError, "CLUSTERDOWN": ClusterDownError}


class Cluster:
    """The nodes of a Redis Cluster, which the first call finds through the *seeds*.

    *open_node* makes a client for a host and port, which must not retry commands. Finding the nodes
    takes about *timeout* seconds at most, and so does each node that does not answer. Nodes that
    did not answer the last time are asked last, and are skipped by a call that has already waited
    *timeout* seconds.
    """

    def __init__(
        self, seeds: Sequence[Node], open_node: Callable[[str, int], Any], timeout: float
    ) -> None:
        self._seeds = seeds
        self._open_node = open_node
        self._timeout = timeout
        self._clients: dict[Node, Any] = {}
        self._slot_owners: list[Node | None] = []
        self._stale = True
        self._failed: dict[Node, float] = {}

    def send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per command. The first argument of a command is its key; a script's
        keys belong to one slot.

        A node that does not answer fails only its own commands. A node that does not serve a key
        does not execute the command but names another node, to which the command is sent next.
        """
        began = time.monotonic()
        self._find_slots()
        replies: list[Any] = [None] * len(commands)
        slots = {place: key_slot(_key(command).encode()) for place, command in enumerate(commands)}
        asking: dict[int, Node] = {}
        waiting: Iterable[int] = slots
        for last in (False,) * _REDIRECTS + (True,):
            by_node: dict[Node, list[int]] = {}
            for place in waiting:
                node = asking.get(place) or self._slot_owners[slots[place]]
                if node is None:
                    replies[place] = ClusterDownError(
                        f"no node of the cluster serves slot {slots[place]}"
                    )
                    self._stale = True
                else:
                    by_node.setdefault(node, []).append(place)
            waiting = []
            for node, places in self._failed_last(by_node):
                if node in self._failed and time.monotonic() - began > self._timeout:
                    error = ClusterDownError(
                        f"{node[0]}:{node[1]} did not answer, and is not asked again yet"
                    )
                    answers = [error] * len(places)
                else:
                    answers = self._send_to_node(
                        node, [(commands[place], place in asking) for place in places]
                    )
                for place, answer in zip(places, answers, strict=True):
                    replies[place] = answer
                    if isinstance(answer, AskError) and not last:
                        self._follow_redirect(answer, node, place, slots[place], asking)
                        waiting.append(place)
            if not waiting:
                break
        return replies

    def primaries(self) -> list[Any]:
        """The clients of all nodes that serve slots."""
        self._find_slots()
        return [self._client(node) for node in dict.fromkeys(self._slot_owners) if node is not None]

    def clients(self) -> list[Any]:
        """The clients of all nodes that were used so far."""
        return list(self._clients.values())

    def _client(self, node: Node) -> Any:
        return self._clients.get(node) or self._clients.setdefault(node, self._open_node(*node))

    def _failed_last(self, by_node: dict[Node, list[int]]) -> Iterable[tuple[Node, list[int]]]:
        return sorted(by_node.items(), key=lambda item: self._failed.get(item[0], 0.0))

    def _send_to_node(
        self, node: Node, commands: Sequence[tuple[tuple[Any, ...], bool]]
    ) -> list[Any]:
        """One reply or error per command. ``True`` with a command: its slot is being migrated to
        *node*, which must be asked with ``ASKING``.
        """
        asked = [
            part
            for command, asking in commands
            for part in ([("ASKING",), command] if asking else [command])
        ]
        try:
            with self._client(node).pipeline(transaction=False) as pipeline:
                for command in asked:
                    pipeline.execute_command(*command)
                answers = [
                    _as_cluster_error(answer) for answer in pipeline.execute(raise_on_error=False)
                ]
        except REDIS_ERRORS as error:
            self._failed[node] = time.monotonic()
            self._stale = True
            return [error] * len(commands)
        self._failed.pop(node, None)
        if any(isinstance(answer, ClusterDownError) for answer in answers):
            self._stale = True
        return [
            answer for command, answer in zip(asked, answers, strict=True) if command != ("ASKING",)
        ]

    def _follow_redirect(
        self, redirect: AskError, by: Node, place: int, slot: int, asking: dict[int, Node]
    ) -> None:
        node = (redirect.host or by[0], int(redirect.port))
        if isinstance(redirect, MovedError):
            self._stale = True
            self._slot_owners[slot] = node
            asking.pop(place, None)
        else:
            asking[place] = node

    def _find_slots(self) -> None:
        """Read which node serves which slot, if that is not known or may have changed."""
        if not self._stale:
            return
        began = time.monotonic()
        error: Exception = ClusterDownError("no node is known")
        known = {node: None for node in (*self._slot_owners, *self._seeds) if node is not None}
        for node in sorted(known, key=lambda node: self._failed.get(node, 0.0)):
            if time.monotonic() - began > self._timeout:
                break
            try:
                self._slot_owners = _slot_owners(
                    self._client(node).execute_command("CLUSTER", "SLOTS"), node[0]
                )
            except REDIS_ERRORS as failed:
                self._failed[node] = time.monotonic()
                error = failed
            else:
                self._stale = False
                return
        if not self._slot_owners:
            raise ClusterDownError(f"no node of the cluster returned the slots: {error}") from error


def _key(command: tuple[Any, ...]) -> str:
    return str(command[3] if command[0] in ("EVALSHA", "EVAL") else command[1])


def _as_cluster_error(answer: Any) -> Any:
    """*answer*, or the error of its own class if an older redis-py returned a plain
    ``ResponseError`` for it.
    """
    word, _, rest = str(answer).partition(" ") if type(answer) is ResponseError else ("", "", "")
    return _ERRORS[word](rest) if word in _ERRORS else answer


def _slot_owners(ranges: Sequence[Any], asked: str) -> list[Node | None]:
    """The primary of each slot, from the reply of the node at host *asked*. A node that does not
    know its own host sends an empty one, which stands for *asked*.
    """
    serving: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, primary, *_ in ranges:
        host = as_text(primary[0]) if primary[0] else asked
        serving[first : last + 1] = [(host, int(primary[1]))] * (last + 1 - first)
    return serving
