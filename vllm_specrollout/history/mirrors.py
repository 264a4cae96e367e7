"""Mirrors in an archive's folder: a file for each file that couriers bring. How many there are costs no descriptors:
they are opened when something is put into one or taken from it, and those used last stay open.

A mirror is a copy. One that is damaged is removed, and its courier brings it again.
"""

from __future__ import annotations

import re
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import DatabaseError
from typing import Annotated

from msgspec import Meta, Struct

from vllm_specrollout.config.places import make_folder
from vllm_specrollout.errors import logger
from vllm_specrollout.history.database import (
    ERRORS,
    SUFFIX,
    DamagedError,
    Database,
    HistoryError,
    OtherFileError,
    Reward,
    Row,
    remove,
)
from vllm_specrollout.history.epochs import MAX_EPOCH, oldest_of
from vllm_specrollout.history.folder import Lock
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

ARCHIVE = "archive"
"""Whose lock lies in a folder of mirrors that is served."""
MIRROR = re.compile(r"[0-9a-f]{16}\.answers-[0-9]{4,5}(?:-[0-9a-f]{8})?")
"""Stem of a mirror: the folder's name, the file's own, and what was drawn when that was made."""
NODE_S, RUN_S = 86400.0, 7 * 86400.0
"""A mirror goes when nobody has spoken of it for so long, and its run went on; and all of a run, if it did not."""
_MOST_OPEN = 256
MOST_EPOCHS = 1024
"""Before a file's last one, whose answers draft, at most."""


_Text = Annotated[str, Meta(max_length=4096)]
_Run = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")]


class Kind(Struct, frozen=True, array_like=True):
    """Whose answers: of which vocabulary, and of which training run."""

    model: _Text
    size: Annotated[int, Meta(ge=0, lt=1 << 62)]
    digest: _Text
    run: _Run = ""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.model, self.size, self.digest)


def kind_of(vocabulary: Vocabulary, run: str = "") -> Kind:
    return Kind(vocabulary.model[:1024], vocabulary.size, vocabulary.digest[:1024], run)


@dataclass(slots=True)
class Known:
    """What is known of a mirror while it is closed."""

    kind: Kind
    # the newest number that it has had
    upto: int
    # the newest that it was told of, and the earliest of its answers
    epoch: int
    first: int
    num_bytes: int
    # by the clock of this process: to the archive's own start, or to whoever spoke of it last
    heard: float
    # it was read whole, and nothing in it is damaged
    is_checked: bool = False


class Mirrors:
    """The mirrors in a folder; one process writes them.

    Args:
        folder: made where it is not there.
        most_bytes: of all of them together; beyond it the oldest epochs go, of the run that takes most.
        clock: seconds, from any zero: what the host's clock says decides nothing.
    """

    def __init__(self, folder: Path, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._most_bytes, self._clock = folder, most_bytes, clock
        # four descriptors each, of half of those that there may be; the last one was used last
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_open = max(4, min(_MOST_OPEN, limit // 8)) if limit != resource.RLIM_INFINITY else _MOST_OPEN
        self._open: OrderedDict[str, tuple[Database, Lock]] = OrderedDict()
        self.known: dict[str, Known] = {}
        self.left_out: dict[str, str] = {}
        """What cannot be used, and why."""
        make_folder(folder)
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if MIRROR.fullmatch(path.stem):
                try:
                    self._know(path.stem, Database(path))
                except (HistoryError, *ERRORS) as error:
                    self.leave_out(path.stem, error)

    def leave_out(self, name: str, error: Exception) -> None:
        """It costs itself alone, and is read whole when it is opened again; said once."""
        self._close(name)
        if name in self.known:
            self.known[name].is_checked = False
        if name not in self.left_out:
            logger.warning("a mirror cannot be used, and all others are: %s", error)
        self.left_out[name] = f"{type(error).__name__}: {error}"

    def put(
        self,
        name: str,
        kind: Kind,
        rows: Sequence[tuple[int, Row]],
        rewards: Sequence[Reward],
        epoch: int,
        epochs: int = MOST_EPOCHS,
    ) -> None:
        """
        Args:
            epochs: before `epoch`, of which answers still draft; older ones go.

        Raises:
            HistoryError, sqlite3.Error, OSError: it cannot be kept.
        """
        mirror = self.opened(name, kind)
        known = self.known[name]
        if not mirror.vocabulary.fits(kind.vocabulary):
            raise HistoryError(f"`{name}` is kept in another vocabulary", "name another `history.dir`")
        mirror.expect_run(kind.run)
        known.first = min([known.first, *(row.epoch for _, row in rows)])
        newest = max([epoch, known.epoch, *(row.epoch for _, row in rows if row.epoch <= MAX_EPOCH)])
        if rows or rewards or newest > known.epoch:
            try:
                mirror.put(rows, rewards, newest)
                if newest > known.epoch:
                    mirror.drop_before(oldest_of(newest, epochs, mirror.epochs(epochs + 1)))
                    mirror.give_back()
                    known.first = mirror.earliest_epoch()
            except DatabaseError as error:
                # one of which nothing is wrong but the disk is an OperationalError
                if type(error) is DatabaseError:
                    self.leave_out(name, error)
                raise
        known.epoch, known.num_bytes, known.heard = newest, mirror.used_bytes(), self._clock()
        known.upto = max([known.upto, *(number for number, _ in rows)])

    def opened(self, name: str, kind: Kind | None = None) -> Database:
        """
        Args:
            kind: of one that is not known, and has to be made.

        Raises:
            HistoryError, sqlite3.Error, OSError: it cannot be used.
        """
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name][0]
        while len(self._open) >= self._most_open:
            self._close(next(iter(self._open)))
        path, known = self._folder / (name + SUFFIX), self.known.get(name)
        kind = known.kind if known is not None else kind or kind_of(ANY_VOCABULARY)
        lock = Lock(path)
        try:
            try:
                found = Database(path, True, kind.vocabulary, kind.run, known is not None and known.is_checked)
            except (DamagedError, OtherFileError) as error:
                logger.warning("a mirror is begun anew, and its node brings it again: %s", error)
                remove(path)
                self.known.pop(name, None)
                found = Database(path, True, kind.vocabulary, kind.run)
            if name not in self.known:
                self._know(name, found)
            self.known[name].is_checked = True
        except BaseException:
            lock.release()
            raise
        self.left_out.pop(name, None)
        self._open[name] = found, lock
        return found

    def _know(self, name: str, mirror: Database) -> None:
        epochs = mirror.latest_epoch(), mirror.earliest_epoch()
        kind = kind_of(mirror.vocabulary, mirror.run)
        self.known[name] = Known(kind, mirror.newest(), *epochs, mirror.used_bytes(), self._clock())

    def _close(self, name: str) -> None:
        if name in self._open:
            database, lock = self._open.pop(name)
            database.close()
            lock.release()

    # --- upkeep ------------------------------------------------------------------------------------------------------

    def trim(self) -> None:
        """Drop what nobody speaks of any more, and what there is no room for."""
        self._forget_silent()
        sizes = Counter[str]()
        for known in self.known.values():
            sizes[known.kind.run] += known.num_bytes
        filled = {name for name, known in self.known.items() if known.upto}
        while sizes.total() > self._most_bytes and filled:
            # one run takes no other's room
            largest = max({self.known[name].kind.run for name in filled}, key=lambda run: sizes[run])
            of_run = [name for name in filled if self.known[name].kind.run == largest]
            name = min(of_run, key=lambda name: (self.known[name].first, name))
            mirror, known = self.opened(name), self.known[name]
            mirror.drop_oldest(1 + mirror.counts(0).answers // 16)
            sizes[largest] -= known.num_bytes - mirror.used_bytes()
            known.first, known.num_bytes = mirror.earliest_epoch(), mirror.used_bytes()
            if not mirror.newest():
                filled.discard(name)
            mirror.give_back()

    def _forget_silent(self) -> None:
        now, runs = self._clock(), dict[str, float]()
        for known in self.known.values():
            runs[known.kind.run] = max(known.heard, runs.get(known.kind.run, 0.0))
        for name, known in list(self.known.items()):
            goes_on = now - runs[known.kind.run] < NODE_S
            if now - known.heard > (NODE_S if goes_on else RUN_S):
                self._close(name)
                remove(self._folder / (name + SUFFIX))
                del self.known[name]

    def runs(self) -> dict[str, tuple[int, int]]:
        """Of each run: its files, and the newest epoch that one of them was told of."""
        found = dict[str, tuple[int, int]]()
        for known in self.known.values():
            files, epoch = found.get(known.kind.run, (0, 0))
            found[known.kind.run] = files + 1, max(epoch, known.epoch)
        return found

    def close(self) -> None:
        for name in list(self._open):
            self._close(name)
