"""The `decoupled` drafter: models in processes of their own, which draft ahead while the target verifies.

What belongs here: which drafters elsewhere the engine is linked to, and the one tree that theirs become. It never
waits: what has come is proposed, and a request for which nothing has come decodes plainly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from vllm_specrollout.cluster.child import DrafterProcess
from vllm_specrollout.cluster.link import Link, SamplingOf
from vllm_specrollout.cluster.mail import MailClient, check_served
from vllm_specrollout.config.checks import check_range, check_type
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.errors import ConfigError, shown
from vllm_specrollout.trees.batch import merge_select
from vllm_specrollout.types import Answer, DraftLimits, RequestBatch, TreeBatch, empty_trees

MOST_LINKS = 16
"""Drafters elsewhere that one engine is linked to, at most: each costs a step the time to hear it."""
MOST_WINDOW, MOST_FAN_OUT = 64, 8
_MOST_NAME = 128  # characters

Connect = Callable[[str], MailClient]
"""From an address to the mail of a drafter that serves there."""


def connect(address: str, key_file: str = "") -> MailClient:
    """
    Raises:
        ConfigError: no such address, or no key.
        MailError: nobody serves there.
    """
    check_served(address)
    return MailClient(address, key_file=key_file)


class DecoupledDrafter(BaseDrafter):
    """Proposes what has arrived.

    Args:
        sampling: how the engine's requests are sampled.
        source: index of the drafter; alternatives count as the next one.
        vocab_size: the target's.
        window, fan_out: as in `Link`, where a link names no others.
        clock: seconds, from any zero.
    """

    name = "decoupled"
    num_sources = 2

    def __init__(
        self,
        sampling: SamplingOf,
        source: int,
        *,
        vocab_size: int,
        window: int = 4,
        fan_out: int = 4,
        connect: Connect = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.links: dict[str, Link] = {}
        self.works_ahead = False
        self._sampling, self._vocab_size = sampling, vocab_size
        self._window, self._fan_out = window, fan_out
        self._connect, self._clock = connect, clock
        # of links that are no more: trees that came, and tokens wasted
        self._gone = (0, 0)

    # --- steps -------------------------------------------------------------------------------------------------------

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.receive()
        links = [link for link in self.links.values() if link.is_there]
        if not links:
            return empty_trees(batch.request_ids)
        self._share_out(links)
        texts, wanted = [view.token_ids for view in batch.views], limits.wanted(self.source)
        found = [link.propose(batch, texts, limits, wanted, self.source) for link in links]
        return found[0] if len(found) == 1 else merge_select(found, replace(limits, max_nodes=wanted)).trees

    @staticmethod
    def _share_out(links: list[Link]) -> None:
        """Drafters of one model share the requests: for the same one they would draw the same tokens."""
        alike: dict[str, list[Link]] = {}
        for link in links:
            if link.only is None:
                alike.setdefault(link.model or link.name, []).append(link)
        for own in alike.values():
            for place, link in enumerate(own):
                link.share(place, len(own))

    def receive(self) -> None:
        """Take in what has come, and look after the drafters."""
        for link in self.links.values():
            link.receive()
            link.watch()

    def finish(self, ending: Answer) -> None:
        self.forget(ending.request_id)

    def forget(self, request_id: str) -> None:
        for link in self.links.values():
            link.forget(request_id)

    def close(self) -> None:
        """The engine ends."""
        processes = [link.process for link in self.links.values() if link.process is not None]
        for name in list(self.links):
            self._drop(name, "the engine ends")
        for process in processes:
            process.stop()

    # --- links -------------------------------------------------------------------------------------------------------

    def link(self, name: str, mail: MailClient, process: DrafterProcess | None = None, **given: Any) -> Link:
        """Link to a drafter; it drafts from the step on after it has said that it is ready.

        Args:
            given: `window`, `fan_out` and `only` of `Link`, where they are others than the engine's.
        """
        own = {"window": self._window, "fan_out": self._fan_out, "vocab_size": self._vocab_size, **given}
        link = Link(name, mail, self._sampling, process=process, clock=self._clock, **own)
        link.greet()
        self.links[name] = link
        self.works_ahead = True
        return link

    def attach(
        self,
        name: str,
        address: str,
        window: int | None = None,
        fan_out: int | None = None,
        request_ids: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Link to a drafter that runs and serves at an address. Requests in flight are drafted for as well.

        Args:
            name: what it is called from now on.
            address: as the drafter prints it: `ipc://PATH`, or `tcp://HOST:PORT`.
            window, fan_out: None: the engine's.
            request_ids: requests that it drafts for, by the engine's names or their clients'; None: all.

        Returns:
            `Link.state`.

        Raises:
            ConfigError, MailError: something cannot be used; nothing has changed then.
        """
        check_type("name", name, (str,))
        if not 0 < len(name) <= _MOST_NAME:
            raise ConfigError(f"a drafter's name has {len(name)} characters", f"use 1 to {_MOST_NAME}")
        if name in self.links:
            raise ConfigError(f"drafter `{name}` is attached already", "detach it first, or choose another name")
        if len(self.links) >= MOST_LINKS:
            raise ConfigError(f"{MOST_LINKS} drafters are attached, which is the most", "detach one first")
        check_type("address", address, (str,))
        given: dict[str, Any] = {"only": _names(request_ids)}
        for key, value, highest in (("window", window, MOST_WINDOW), ("fan_out", fan_out, MOST_FAN_OUT)):
            if value is not None:
                check_range(key, value, 1, highest)
                given[key] = value
        return self.link(name, self._connect(address), **given).state()

    def detach(self, name: str) -> dict[str, Any]:
        """Let go of a drafter. It stays warm where it was told to; one that the engine began ends.

        Returns:
            `Link.state`, as it was.

        Raises:
            ConfigError: there is none of this name.
        """
        state = self._link(name).state()
        self._drop(name, "the drafter was detached")
        return state

    def assign(self, name: str, request_ids: Iterable[str] | None) -> dict[str, Any]:
        """Have a drafter draft for these requests alone from now on; None: for all.

        Returns:
            `Link.state`.

        Raises:
            ConfigError: there is none of this name, or these are no names.
        """
        link = self._link(name)
        link.restrict(_names(request_ids))
        return link.state()

    def state(self) -> dict[str, Any]:
        """All drafters that are attached, in plain JSON types: name -> `Link.state`, with what has come until now."""
        self.receive()
        return {name: link.state() for name, link in self.links.items()}

    def totals(self) -> tuple[int, int, int]:
        """Drafters that are there now; trees that came, and tokens wasted, from all that were ever attached."""
        trees, wasted = self._gone
        for link in self.links.values():
            trees, wasted = trees + link.counts.trees, wasted + link.counts.wasted
        return sum(link.is_there for link in self.links.values()), trees, wasted

    def _link(self, name: str) -> Link:
        if name not in self.links:
            known = ", ".join(self.links) or "none"
            raise ConfigError(f"no drafter `{name}` is attached", f"attached are: {known}")
        return self.links[name]

    def _drop(self, name: str, why: str) -> None:
        link = self.links.pop(name)
        link.leave(why)
        trees, wasted = self._gone
        self._gone = trees + link.counts.trees, wasted + link.counts.wasted
        self.works_ahead = bool(self.links)


def _names(request_ids: Iterable[str] | None) -> frozenset[str] | None:
    if request_ids is None:
        return None
    names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    if isinstance(request_ids, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"`request_ids` is {shown(request_ids)}, no list of names", "give a list, or None for all requests"
        )
    return frozenset(names)
