"""Profiles of drafters: what one takes beside one model, and how often it is right, kept from engine to engine.

An engine learns them while it runs, and the next one plans by them: `placement: auto`, groups, `specrollout plan`.

Source: SpecActor, section 4.1 (offline profiles of D, V and acceptance); here nothing is run for them.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from vllm_specrollout.budgets.profile import ProfileKey, replace_file
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.cluster.link import Beat, Link
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.cluster.rehearsal import Match
from vllm_specrollout.config import envs
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord, StepTiming

logger = logging.getLogger("vllm.specrollout")

LEAST_RANKS = 256
"""Positions before a profile is kept; then whenever there are twice as many."""
MOST_RANKS = 4096
"""Positions that it keeps, the newest."""
_BEATS = 64  # of the last ones D is learned
_STEPS = 64  # of the last ones the mean number of drafts is taken


class DrafterProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One drafter beside one model. The same form is read from a file that somebody wrote."""

    # D(b) of one device, and V(b, w) by the target's ranks
    draft: AffineTime
    verify: dict[int, AffineTime]
    # share of positions at which the token was among the drafter's first 1, 2, ... choices
    among: tuple[float, ...] = ()
    # which choice each token was, in their order, in place of that: a digit each, 8: none of them
    ranks: str = ""
    # folders or names, and what the drafter runs on
    target: str = ""
    drafter: str = ""
    device: str = ""
    # what exactly the target is and runs on; None: somebody wrote this
    key: ProfileKey | None = None

    @property
    def fan_out(self) -> int:
        """Choices at each position."""
        return len(self.among) or max((int(rank) for rank in self.ranks if rank != "8"), default=0) + 1

    def match(self) -> Match:
        """
        Raises:
            ConfigError: shares that fall or are none, or ranks that are no digits.
        """
        if bool(self.among) is bool(self.ranks):
            raise ConfigError(
                "a profile has to say how drafts match, in one way",
                'give "among": [0.64, 0.77], shares of the first 1, 2, ... choices; or "ranks"',
            )
        if self.among:
            return Match.of_shares(self.among, np.random.default_rng(0))
        if not self.ranks.isdigit():
            raise ConfigError('"ranks" of a profile holds more than digits', 'write "0010820..."')
        return Match(np.frombuffer(self.ranks.encode(), np.uint8).astype(np.int32) - ord("0"))


class Elsewhere(Protocol):
    """The drafters of an engine; `drafters.decoupled.DecoupledDrafter` is one."""

    links: dict[str, Link]
    is_resting: bool


class Learning(Listener):
    """Learns D, V and matches of the drafters elsewhere, as an engine's steps go by.

    Args:
        keep: told of a profile whenever it rests on twice as many positions as the last one.
    """

    def __init__(self, elsewhere: Elsewhere, keep: Callable[[DrafterProfile], None] = lambda profile: None) -> None:
        self._elsewhere, self._keep, self._cost = elsewhere, keep, StepCost()
        # requests and draft nodes of each of the last steps
        self._last: deque[tuple[int, int]] = deque(maxlen=_STEPS)
        # model -> its ranks, of all links that it has had: one that is lent has a new link each time
        self._ranks: dict[str, deque[int]] = {}
        self._ranked: dict[str, int] = {}
        # link -> itself, and the ranks of it that are there
        self._taken: dict[str, tuple[Link, int]] = {}
        # model -> positions at which it is kept next
        self._due: dict[str, int] = {}

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        if timing is None or not timing.is_decode_only or self._elsewhere.is_resting:
            return
        self._cost.observe(timing)
        self._last.append((timing.batch, timing.nodes))
        for link in self._links():
            self._take(link)
            ranked = self._ranked.get(link.model, 0)
            if ranked >= self._due.get(link.model, LEAST_RANKS) and (found := self.profile(link)) is not None:
                self._due[link.model] = 2 * ranked
                self._keep(found)

    def _links(self) -> list[Link]:
        """Those that are there, and those that have gone since the last step: their requests ended as they went."""
        there = self._elsewhere.links
        return [*(one for one, _ in self._taken.values() if there.get(one.name) is not one), *there.values()]

    def _take(self, link: Link) -> None:
        """Its ranks since it was looked at last."""
        before, count = self._taken.get(link.name, (link, 0))
        new = link.ranked - (count if before is link else 0)
        self._taken[link.name] = link, link.ranked
        if new > 0 and link.model:
            self._ranked[link.model] = self._ranked.get(link.model, 0) + new
            own = self._ranks.setdefault(link.model, deque(maxlen=MOST_RANKS))
            own.extend(list(link.ranks)[-new:])

    def lines(self, link: Link) -> tuple[AffineTime, AffineTime] | None:
        """D and V of a drafter at the batch that runs; None: it drafted nothing yet, or there was no step."""
        draft = draft_line(link.beats)
        if draft is None or not self._cost.is_known:
            return None
        steps = sum(batch for batch, _ in self._last)
        drafts = sum(nodes for _, nodes in self._last) / steps if steps else 0.0
        batch = max((batch for batch, _ in self._last), default=1)
        return draft, line_at(self._cost, max(batch, len(link.open)), drafts)

    def profile(self, link: Link) -> DrafterProfile | None:
        """What is known of a drafter; None: nothing yet."""
        lines = self.lines(link)
        self._take(link)
        own = self._ranks.get(link.model)
        if lines is None or not own:
            return None
        ranks = "".join(str(min(rank, 8)) for rank in own)
        return DrafterProfile(draft=lines[0], verify={1: lines[1]}, ranks=ranks, drafter=link.model, device=link.device)


def draft_line(beats: deque[Beat]) -> AffineTime | None:
    """D(b) by what a drafter's process did lately; None: it did nothing yet. A pass gives each line one more level."""
    cost, streams, passes = StepCost(), 0, 0
    for beat in islice(beats, max(len(beats) - _BEATS, 0), None):
        if beat.passes and beat.streams and beat.busy_ms > 0.0:
            batch = max(round(beat.streams / beat.passes), 1)
            cost.observe(StepTiming(batch, batch, 0, 0, 0, beat.busy_ms / beat.passes, True))
            passes, streams = passes + beat.passes, streams + beat.streams
    return line_at(cost, round(streams / passes), 0.0) if passes else None


def line_at(cost: StepCost, batch: int, drafts: float) -> AffineTime:
    """The line through what is learned of steps of 1 request and of `batch`, without drafts and with so many each."""
    batch, nodes = max(batch, 1), round(max(batch, 1) * drafts)
    one, all_ms = cost.plain_ms(1), cost.plain_ms(batch)
    per_request = min((all_ms - one) / (batch - 1), one) if batch > 1 else 0.0
    per_row = (cost.predict(batch, nodes) - all_ms) / nodes if nodes else 0.0
    return AffineTime(per_request, one - per_request, per_row)


# --- files ------------------------------------------------------------------------------------------------------------


def save(profile: DrafterProfile) -> None:
    """Put it in the place of an older one of the same model, drafter and devices; whole or not at all.

    A disk that refuses is told of, and no more: nobody waits for a profile.
    """
    name = hashlib.sha256(msgspec.json.encode((profile.key, profile.drafter, profile.device))).hexdigest()[:16]
    try:
        replace_file(_folder() / f"{name}.json", msgspec.json.encode(profile))
    except OSError as error:
        logger.warning("Spec rollout: the profile of drafter `%s` is not kept: %s", profile.drafter, error)


def kept() -> list[DrafterProfile]:
    """All profiles of this user; those that cannot be read are left out."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        try:
            found.append(_decode(path.read_bytes()))
        except (OSError, msgspec.DecodeError, ConfigError) as error:
            logger.warning("The profile %s cannot be used (%s) and is ignored; it may be deleted", path, error)
    return found


def of_engine(profiles: Iterable[DrafterProfile], key: ProfileKey) -> list[DrafterProfile]:
    """Those of an engine's model on its devices; of a drafter on several devices, what rests on most positions."""
    found: dict[str, DrafterProfile] = {}
    for one in profiles:
        if one.key == key and len(one.ranks) > len(found[one.drafter].ranks if one.drafter in found else ""):
            found[one.drafter] = one
    return list(found.values())


def of_model(profiles: Iterable[DrafterProfile], target: str) -> list[DrafterProfile]:
    """Those of a model by its name or folder; what was measured on several numbers of ranks becomes one."""
    found: dict[tuple[str, str], DrafterProfile] = {}
    for one in profiles:
        if one.target == target:
            before = found.get((one.drafter, one.device))
            verify = one.verify if before is None else before.verify | one.verify
            found[one.drafter, one.device] = msgspec.structs.replace(one, verify=verify)
    return list(found.values())


def read(path: Path, flag: str) -> DrafterProfile:
    """A file that somebody wrote.

    Raises:
        ConfigError: it cannot be read, or is no profile.
    """
    try:
        found = _decode(path.read_bytes())
        found.match()
    except OSError as error:
        raise ConfigError(f"`{flag}` is `{path}`, which cannot be read: {error.strerror}", "name a file") from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"`{path}` is no profile of a drafter: {error}",
            'write {"draft": TIME, "verify": {"1": TIME}, "among": [0.64, 0.77]}, where a TIME is'
            ' {"fixed_ms": A, "per_request_ms": B, "per_row_ms": C}',
        ) from None
    if not found.verify:
        raise ConfigError(f"`{path}` says nothing of a verifier", 'give "verify": {"1": TIME}')
    return found


def _decode(body: bytes) -> DrafterProfile:
    return msgspec.json.decode(body, type=DrafterProfile)


def _folder() -> Path:
    return envs.cache_dir() / "profiles" / "drafters"
