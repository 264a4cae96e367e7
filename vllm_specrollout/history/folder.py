"""The directory of a store: the file this process writes, and those that others write. No epochs' logic.

Only the table is shared with the store's callers, so only its changes take the lock. `write`, `refresh` and `rewrite`
wait for the disk and are for one thread at a time; they take the lock themselves. The rest is called with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vllm_specrollout.history import log
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.claiming import claim, is_ours_by_name, unlink_if_unused
from vllm_specrollout.history.epochs import MAX_EPOCH
from vllm_specrollout.history.frames import Frame, HistoryError
from vllm_specrollout.history.records import (
    REWARD_BYTES,
    AnswerHead,
    EpochRecord,
    Record,
    RecordHead,
    RewardRecord,
    with_reward,
)
from vllm_specrollout.history.source import NO_ROW, Source
from vllm_specrollout.history.table import Place, Table, key_of
from vllm_specrollout.history.turns import parts
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

logger = logging.getLogger("vllm.specrollout")

OWN = 1
"""Number of the own file; others count on from there."""
# rewriting below it saves nothing worth the work
_LEAST_REWRITTEN = 1 << 20


class Folder:
    """Opens the directory, claims a file in it and reads all others, but for those that it cannot use.

    Args:
        expects_own: a file in another vocabulary is an error, now; one that comes later is left out.

    Raises:
        HistoryError: the directory cannot be used.
        ForeignError: it holds a file in another vocabulary now, and none was expected.
    """

    def __init__(
        self,
        path: Path,
        table: Table,
        lock: threading.RLock,
        vocabulary: Vocabulary = ANY_VOCABULARY,
        expects_own: bool = False,
    ) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._table = table
        self._lock = lock
        self._sources: dict[int, Source] = {OWN: Source(None)}
        self._expects_own = expects_own
        # what cannot be used, and why; and what of it was named already
        self._unusable: dict[Path, str] = {}
        self._warned: set[Path] = set()
        self.foreign: set[Path] = set()
        """Files that are left out, since their token ids mean something else."""
        self.latest_epoch = 0
        """Of all that was read."""
        own = self._sources[OWN]
        self.writer = claim(path, lambda frame, head: self._take(OWN, own, frame, head), vocabulary, self._pass_over)
        own.reader = self.writer.reader
        self.refresh()
        # from here on nobody would hear of an error, and upkeep would end with it
        self._expects_own = False

    @property
    def path(self) -> Path:
        """Of the own file."""
        return self.writer.path

    def readers(self) -> list[log.Reader]:
        return [source.reader for source in list(self._sources.values()) if source.reader is not None]

    def num_bytes(self) -> int:
        """Of all files, as far as they were read."""
        others = [reader.seen_bytes for reader in self.readers() if reader is not self.writer.reader]
        return self.writer.size + sum(others)

    def reader(self, file: int) -> log.Reader:
        """Who reads the file now; it goes on reading it even if another one is put in its place."""
        reader = self._sources[file].reader
        assert reader is not None, "a file whose answers are known was opened"
        return reader

    def write(self, record: Record | bytes) -> Frame:
        """Hand a record, or its bytes, to the operating system. What it means for the table is told by `wrote_*`.

        Raises:
            OSError: the disk is full or gone.
            ValueError: the record is larger than one may be.
        """
        return self.writer.append(record)

    def wrote_answer(self, frame: Frame, row: int, num_tokens: int) -> None:
        """The answer of this row is in the own file now; NO_ROW: it was dropped meanwhile."""
        own = self._sources[OWN]
        own.num_tokens += num_tokens
        if row != NO_ROW:
            self._table.move(row, OWN, frame.offset, frame.sequence)
            own.set_row(frame.sequence, row)

    def wrote_reward(self) -> None:
        """The own file has a reward more."""
        self._sources[OWN].reward_bytes += REWARD_BYTES

    def refresh(self) -> None:
        """Read what others have written since. Files that cannot be used are left out, with one warning for all.

        Raises:
            OSError: the directory cannot be read.
        """
        known = {source.reader.path: number for number, source in self._sources.items() if source.reader is not None}
        paths = [path for path in log.files(self._path) if path != self.path]
        # what is gone need not be remembered
        self._unusable = {path: why for path, why in self._unusable.items() if path in set(paths)}
        for path, number in known.items():
            reader = self._sources[number].reader
            if number != OWN and (path not in paths or reader is None or not reader.is_current):
                self._forget(number)
        for path in paths:
            number = known.get(path, 0)
            if number not in self._sources:
                number = max(self._sources) + 1
            try:
                self._read_on(number, path)
                self._unusable.pop(path, None)
            except (HistoryError, OSError) as error:
                self._pass_over(path, error)
        self._name_unusable()

    def _pass_over(self, path: Path, error: Exception) -> None:
        if self._expects_own and isinstance(error, log.ForeignError):
            raise error
        self._unusable[path] = str(error)

    def _name_unusable(self) -> None:
        """Say what is left out: a warning for all that are new."""
        new = [path for path in self._unusable if path not in self._warned]
        self._warned = set(self._unusable)
        if new:
            more = f" ({len(new) - 1} more: {', '.join(path.name for path in new[1:6])})" if new[1:] else ""
            logger.warning("answers of another engine are not used: %s%s", self._unusable[new[0]], more)

    def _read_on(self, number: int, path: Path) -> None:
        if number not in self._sources:
            reader = log.Reader(path)
            self._expect_own_vocabulary(reader)
            self._sources[number] = Source(reader)
        source = self._sources[number]
        assert source.reader is not None, "only the own file has none, while it is opened"
        for frame, head in source.reader.records():
            with self._lock:
                self._take(number, source, frame, head)

    def _expect_own_vocabulary(self, reader: log.Reader) -> None:
        found = reader.vocabulary()
        if self._vocabulary.fits(found):
            self.foreign.discard(reader.path)
            return
        self.foreign.add(reader.path)
        raise log.ForeignError(
            f"`{reader.path}` was written for `{found.model}`, which has another vocabulary than"
            f" `{self._vocabulary.model}`",
            "give each model its own `history.dir`; nothing else is lost",
        )

    def _take(self, number: int, source: Source, frame: Frame, head: Record | RecordHead) -> int:
        """Note a record that is in a file; returns an answer's row, otherwise -1."""
        row = NO_ROW
        if isinstance(head, (Answer, AnswerHead, EpochRecord)) and not 0 <= head.epoch <= MAX_EPOCH:
            # no writer of ours numbers epochs so, and no index could hold it
            return row
        if isinstance(head, (Answer, AnswerHead)):
            place = Place(number, frame.offset, frame.sequence, head.epoch, head.reward, head.num_tokens)
            row = self._table.add(key_of(head.problem_id), place)
            source.set_row(frame.sequence, row)
            source.num_tokens += head.num_tokens
            self.latest_epoch = max(self.latest_epoch, head.epoch)
        elif isinstance(head, RewardRecord):
            source.reward_bytes += REWARD_BYTES
            if (known := source.row(head.sequence)) != NO_ROW:
                self._table.set_reward(known, head.reward)
        elif isinstance(head, EpochRecord):
            self.latest_epoch = max(self.latest_epoch, head.epoch)
        return row

    def _forget(self, number: int) -> None:
        with self._lock:
            known = self._table.of_file(number)
        # only this thread drops answers of files
        for rows in parts(known.rows.tolist()):
            with self._lock:
                self._table.drop(rows)
        with self._lock:
            del self._sources[number]

    def dropped(self, places: list[Place]) -> None:
        """These rows are gone, and may be others' soon. Called with the lock."""
        for place in places:
            if place.file in self._sources:
                self._sources[place.file].set_row(place.sequence, NO_ROW)

    def is_mostly_dead(self) -> bool:
        """Whether more than half of the own file is of no use any more. Called with the lock."""
        own = self._sources[OWN]
        if self.writer.size < _LEAST_REWRITTEN:
            return False
        is_old = 2 * self._table.num_tokens(OWN) < own.num_tokens
        return is_old or 2 * own.reward_bytes > self.writer.size

    def oldest_beyond(self, most_bytes: int) -> list[int]:
        """Tickets of the own file's answers for which there is no room in so many bytes."""
        with self._lock:
            found = self._table.of_file(OWN)
        found = found.picked(np.argsort(found.offsets))
        # an answer ends where the next one begins, at the latest
        sizes = np.diff(found.offsets, append=self.writer.size)
        newest_first = np.lexsort((-found.offsets, -found.epochs))
        beyond = np.cumsum(sizes[newest_first]) > most_bytes
        return found.picked(newest_first[beyond]).tickets()

    def remove_stale(self, oldest: int, most_bytes: int) -> None:
        """Remove files that former engines left behind, if none of their answers may draft, or there is no room.

        Only files that this engine might have written: named like its own, of its vocabulary, and nobody's now.
        """
        stale: list[tuple[float, int, int, log.Reader]] = []
        for number, source in self._sources.items():
            if number != OWN and source.reader is not None and is_ours_by_name(source.reader.path):
                # one that its file server no longer knows is nobody's to remove
                with contextlib.suppress(OSError):
                    found = os.fstat(source.reader.descriptor.fd)
                    stale.append((found.st_mtime, number, found.st_size, source.reader))
        room = most_bytes - sum(size for _, _, size, _ in stale)
        for _, number, size, reader in sorted(stale, key=lambda one: one[:2]):
            with self._lock:
                epochs = self._table.of_file(number).epochs
            is_alive = bool(np.any(epochs >= oldest))
            if (is_alive and room >= 0) or not unlink_if_unused(reader):
                continue
            room += size
            self._forget(number)

    def rewrite(self, epoch: int) -> set[int]:
        """Write the own file anew, with the answers that the table still has. Nothing may be appended meanwhile.

        Returns the rows of answers that turned out to be damaged; the table has them no longer.

        Raises:
            OSError: the disk is full or gone; all stays as it was.
        """
        # numbers rather than objects: a file may hold a million answers
        with self._lock:
            found = self._table.of_file(OWN)
            reader = self.writer.reader
        rows = found.rows[np.argsort(found.offsets)]
        # of the answers that could be read: row; and, with the epoch before them, where they are now
        written, offsets = array("i"), array("q")

        def live() -> Iterator[Record | bytes]:
            yield EpochRecord(epoch)
            for row in map(int, rows):
                place = self._table.place(row)
                payload = reader.payload(place.offset)
                if payload is not None:
                    written.append(row)
                    yield with_reward(payload, place.reward)

        last = self.writer.rewrite(live(), lambda frame: offsets.append(frame.offset))
        own = Source(self.writer.reader)
        first = last.sequence + 1 - len(written)
        own.rows = array("i", [NO_ROW]) * first + written
        with self._lock:
            # all at once: from here on, places are those in the new file
            own.num_tokens = self._table.move_all(np.array(written, dtype=np.int64), OWN, offsets[1:], first)
            self._sources[OWN] = own
            lost = set(rows.tolist()) - set(written) if len(written) < len(rows) else set()
            self._table.drop(lost)
            return lost
