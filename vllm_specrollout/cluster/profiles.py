"""Profiles of drafters: what one takes beside one model, and how often it is right, kept from engine to engine.

An engine learns them while it runs, and the next one plans by them: `placement: auto`, groups, `specrollout plan`.

Source: SpecActor, section 4.1 (offline profiles of D, V and acceptance); here nothing is run for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_specrollout.budgets.profile import ProfileKey, digest, folder, read_file, write
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.cluster.link import Link
from vllm_specrollout.cluster.messages import Work
from vllm_specrollout.cluster.rates import AffineTime
from vllm_specrollout.errors import ConfigError, logger
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord, StepTiming

LEAST = 256
"""Positions before a profile is kept; then whenever there are twice as many."""
MOST = 8192
"""Positions after which older ones count half: weights change."""
_BEATS = 64  # of the last ones D is learned
_STEPS = 64  # of the last ones the mean number of drafts is taken


class OwnDrafts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine drafts with by itself, as history and n-grams, and what that brings: per request and step."""

    tokens: Annotated[float, Meta(ge=1.0)]
    drafts: Annotated[float, Meta(ge=0.0)]


class DrafterProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One drafter beside one model. The same form is read from a file that somebody wrote."""

    # D(b) of one device, and V(b, w) by the target's ranks
    draft: AffineTime
    verify: Annotated[dict[Annotated[int, Meta(ge=1)], AffineTime], Meta(min_length=1)]
    # p: share of positions at which the token was the drafter's first choice, and how many were looked at
    match: Annotated[float, Meta(ge=0.0, le=1.0)]
    positions: int = 0
    # None: it is not known
    own: OwnDrafts | None = None
    # folders or names, and what the drafter runs on
    target: str = ""
    drafter: str = ""
    device: str = ""
    # what exactly the target is and runs on; None: somebody wrote this
    key: ProfileKey | None = None

    def check(self) -> None:
        """
        Raises:
            ConfigError: what it says cannot be.
        """
        for devices, time in self.verify.items():
            if time.ms(1) <= 0.0:
                raise ConfigError(f"a verifier on {devices} devices takes no time", "measure it on 1 device or more")


class Learning(Listener):
    """Learns D, V and matches of the drafters elsewhere, as an engine's steps go by; and what it has without them.

    Args:
        links: of the engine, as they come and go.
        keep: told of a profile whenever it rests on twice as many positions as the last one.
    """

    def __init__(
        self, links: Mapping[str, Link], keep: Callable[[DrafterProfile], None] = lambda profile: None
    ) -> None:
        self._links, self._keep, self._cost = links, keep, StepCost()
        # requests and draft nodes of each of the last steps
        self._last: deque[tuple[int, int]] = deque(maxlen=_STEPS)
        # those that there were in the last step: one that is lent has a new link each time
        self._before: list[Link] = []
        # model -> positions, and those at which its first choice was right, of all links that it has had
        self._scores: dict[str, tuple[int, int]] = {}
        # model -> positions at all, and at which it is kept next
        self._seen: dict[str, int] = {}
        self._due: dict[str, int] = {}
        # requests, tokens and draft nodes of steps in which nobody elsewhere drafted
        self._own = (0, 0, 0)

    @property
    def own(self) -> OwnDrafts | None:
        """What the engine has without them; None: too few steps say so."""
        requests, tokens, nodes = self._own
        return OwnDrafts(max(tokens / requests, 1.0), nodes / requests) if requests >= LEAST else None

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        if timing is None or not timing.is_decode_only:
            return
        self._cost.observe(timing)
        self._last.append((timing.batch, timing.nodes))
        if not any(link.open for link in self._links.values()):
            half = 2 if self._own[0] > MOST else 1
            new = timing.batch, timing.tokens, timing.nodes
            self._own = tuple(old // half + more for old, more in zip(self._own, new, strict=True))  # type: ignore[assignment]
        # of those that have gone since, requests ended as they went
        for link in dict.fromkeys([*self._before, *self._links.values()]):
            self._take(link)
            seen = self._seen.get(link.model, 0)
            if seen >= self._due.get(link.model, LEAST) and (found := self.profile(link)) is not None:
                self._due[link.model] = 2 * seen
                self._keep(found)
        self._before = list(self._links.values())

    def _take(self, link: Link) -> None:
        """Its positions since it was looked at last."""
        new = link.new_score()
        if new.tried and link.model:
            self._seen[link.model] = self._seen.get(link.model, 0) + new.tried
            tried, matched = self._scores.get(link.model, (0, 0))
            half = 2 if tried > MOST else 1
            self._scores[link.model] = tried // half + new.tried, matched // half + new.matched

    def profile(self, link: Link) -> DrafterProfile | None:
        """What is known of a drafter, at the batch that runs; None: nothing yet."""
        self._take(link)
        draft, (tried, matched) = draft_line(link.beats), self._scores.get(link.model, (0, 0))
        if draft is None or not self._last or not tried:
            return None
        batch, steps = max(batch for batch, _ in self._last), sum(batch for batch, _ in self._last)
        drafts = sum(nodes for _, nodes in self._last) / max(steps, 1)
        return DrafterProfile(
            draft=draft,
            verify={1: line_at(self._cost, max(batch, len(link.open)), drafts)},
            match=matched / tried,
            positions=self._seen[link.model],
            own=self.own,
            drafter=link.model,
            device=link.device,
        )


def draft_line(beats: deque[Work]) -> AffineTime | None:
    """D(b) by what a drafter's process did lately; None: it did nothing yet. A pass gives each line one more level."""
    cost, streams, passes = StepCost(), 0, 0
    for beat in list(beats)[-_BEATS:]:
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
    name = digest((profile.key, profile.drafter, profile.device))
    try:
        write(_folder() / f"{name}.json", profile)
    except OSError as error:
        logger.warning("Spec rollout: the profile of drafter `%s` is not kept: %s", profile.drafter, error)


def kept() -> list[DrafterProfile]:
    """All profiles of this user; those that cannot be used are left out."""
    paths, check = sorted(_folder().glob("*.json")), DrafterProfile.check
    read = (read_file(path, DrafterProfile, check, "it may be deleted") for path in paths)
    return [one for one in read if one is not None]


def best_known(profiles: Iterable[DrafterProfile]) -> dict[str, DrafterProfile]:
    """Of each drafter what rests on most positions, where several engines or devices know it."""
    return {one.drafter: one for one in sorted(profiles, key=lambda one: one.positions)}


def of_engine(profiles: Iterable[DrafterProfile], key: ProfileKey) -> list[DrafterProfile]:
    """The best known ones of an engine's model on its devices."""
    return list(best_known(one for one in profiles if one.key == key).values())


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
        found = msgspec.json.decode(path.read_bytes(), type=DrafterProfile)
        found.check()
    except OSError as error:
        raise ConfigError(f"`{flag}` is `{path}`, which cannot be read: {error.strerror}", "name a file") from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"`{path}` is no profile of a drafter: {error}",
            'write {"draft": TIME, "verify": {"1": TIME}, "match": 0.64}, where a TIME is'
            ' {"fixed_ms": A, "per_request_ms": B, "per_row_ms": C}',
        ) from None
    return found


def _folder() -> Path:
    return folder() / "drafters"
