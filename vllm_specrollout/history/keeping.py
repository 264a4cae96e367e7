"""Where a store's answers are: in its file, or in memory; and which go first where there is no room for all.

What belongs here: the table, the memory and the folder, kept in step. Not: names of requests, guessing epochs. What
comes is in memory at once, and `write` takes it to the disk later: only `write`, `settle` and `close` wait for one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.folder import Folder
from vllm_specrollout.history.log import Reader
from vllm_specrollout.history.memory import Memory
from vllm_specrollout.history.records import EpochRecord, RewardRecord, with_reward
from vllm_specrollout.history.source import NO_ROW
from vllm_specrollout.history.table import IN_MEMORY, Place, Table, key_of
from vllm_specrollout.history.turns import parts
from vllm_specrollout.history.vocabulary import Vocabulary

logger = logging.getLogger("vllm.specrollout")

PER_MIB = 768
"""Answers for each MiB of `history.max_mib`: Python takes some 600 bytes for what it knows of one, wherever it is."""


class Keeping:
    """Answers by row. Called with the lock; `write`, `settle` and `close` take it, and are for one thread at a time.

    Raises:
        HistoryError: the directory cannot be used, or holds what `history.foreign` refuses.
    """

    def __init__(
        self, config: HistoryConfig, lock: threading.RLock, vocabulary: Vocabulary, gone: Callable[[str, int], None]
    ) -> None:
        self._config = config
        # told the request and ticket of an answer that made room for a later one
        self._gone = gone
        self._lock = lock
        self.table = Table()
        self._most = config.max_mib * PER_MIB
        # of the own file: it, and the copy that takes its place, are to be below the limit together
        self._most_bytes = config.max_disk_mib << 19
        self.memory = Memory(config.max_mib << 20, self._most)
        # answers in the file whose rewards are to be written: ticket -> request
        self._rewards: dict[int, str] = {}
        self._begun = self._epoch_written = 0
        self._is_rewriting = False
        # where making room has failed: the size at which it is tried again
        self._next_bytes = 0
        self.evicted = self.write_errors = 0
        self.folder: Folder | None = None
        if config.dir:
            is_strict = config.foreign == "refuse"
            self.folder = Folder(Path(config.dir), self.table, lock, vocabulary, is_strict)
            self._begun = self._epoch_written = self.folder.latest_epoch

    @property
    def latest_epoch(self) -> int:
        return self.folder.latest_epoch if self.folder else 0

    @property
    def is_full(self) -> bool:
        """Whether `settle` is to make room."""
        if self.folder is None or self._is_rewriting:
            return False
        return len(self.table) > self._most or self.folder.writer.size > max(self._most_bytes, self._next_bytes)

    @property
    def num_waiting(self) -> int:
        """Answers that are to be written, and could not be so far."""
        return 0 if self.folder is None else len(self.memory)

    @property
    def is_behind(self) -> bool:
        """Whether `write` has something to do."""
        is_any = bool(len(self.memory) or self._rewards or self._begun > self._epoch_written)
        return self.folder is not None and is_any

    def add(self, answer: Answer) -> int | None:
        """Keep an answer, and returns its ticket; the oldest in memory make room for it. None: it cannot be kept."""
        try:
            row = self._add_to_memory(answer)
        except ValueError as error:
            # longer than a record may be
            self.note_error(error)
            return None
        ticket = self.table.ticket(row)
        # the newest one is to reach the disk, however large it is
        for held in self.memory.overflow(0 if self.folder is None else 1):
            self.evicted += 1
            self._gone(held.request_id, self.table.ticket(held.row))
            self.table.drop([held.row])
        return ticket

    def _add_to_memory(self, answer: Answer) -> int:
        key = self.memory.put(answer)
        place = Place(IN_MEMORY, key, 0, answer.epoch, answer.reward, answer.num_tokens)
        row = self.table.add(key_of(answer.problem_id), place)
        self.memory.set_row(key, row)
        return row

    def set_reward(self, request_id: str, row: int, reward: float) -> None:
        """Keep an answer's reward; one that it has already is not written again."""
        place = self.table.place(row)
        if place.reward == reward:
            return
        self.table.set_reward(row, reward)
        if place.file != IN_MEMORY:
            self._rewards[self.table.ticket(row)] = request_id
            if len(self._rewards) > self._most:
                # nobody has written for long, and answers count for more
                del self._rewards[next(iter(self._rewards))]

    def begin(self, epoch: int) -> None:
        """An epoch begins."""
        self._begun = epoch

    def note_error(self, error: Exception) -> None:
        if not self.write_errors:
            logger.warning(
                "the history in `%s` cannot be written, answers stay in memory: %s: %s",
                self._config.dir,
                type(error).__name__,
                error,
            )
        self.write_errors += 1

    def source(self, place: Place) -> Reader | bytes:
        if place.file == IN_MEMORY or self.folder is None:
            return self.memory.record(place.offset)
        return self.folder.reader(place.file)

    # --- writing, in the background ----------------------------------------------------------------------------------

    def write(self) -> None:
        """Write what has come since: answers, the oldest first, then the epoch and rewards. Nobody waits meanwhile."""
        folder = self.folder
        if folder is None:
            return
        try:
            with self._lock:
                waiting = self.memory.keys()
            for key in waiting:
                self._write_answer(folder, key)
            if (epoch := self._begun) > self._epoch_written:
                folder.write(EpochRecord(epoch))
                self._epoch_written = epoch
            with self._lock:
                rewards = list(self._rewards)
            for ticket in rewards:
                self._write_reward(folder, ticket)
        except OSError as error:
            self.note_error(error)

    def _write_answer(self, folder: Folder, key: int) -> None:
        with self._lock:
            held = self.memory.get(key)
            if held is None:
                return
            place = self.table.place(held.row)
        try:
            frame = folder.write(with_reward(held.record, place.reward))
        except ValueError as error:
            # too long for a file: it stays where it is
            self.note_error(error)
            return
        with self._lock:
            # it may have been dropped, or got another reward, since
            is_held = self.memory.get(key) is held
            folder.wrote_answer(frame, held.row if is_held else NO_ROW, place.num_tokens)
            if is_held:
                self.memory.drop(key)
                if self.table.place(held.row).reward != place.reward:
                    self._rewards[self.table.ticket(held.row)] = held.request_id

    def _write_reward(self, folder: Folder, ticket: int) -> None:
        with self._lock:
            row = self.table.row(ticket)
            place = None if row is None else self.table.place(row)
            request_id = self._rewards.get(ticket, "")
            if row is None or place is None or place.file == IN_MEMORY or place.reward is None:
                self._rewards.pop(ticket, None)
                return
        folder.write(RewardRecord(place.sequence, request_id, place.reward))
        with self._lock:
            folder.wrote_reward()
            if self.table.row(ticket) is None or self.table.place(row).reward == place.reward:
                self._rewards.pop(ticket, None)

    def close(self) -> None:
        """What waits is written, if it goes now; then others may have the file."""
        if self.folder is None:
            return
        self.write()
        try:
            self.folder.writer.close()
        except Exception as error:
            self.note_error(error)

    # --- settling, in the background ---------------------------------------------------------------------------------

    def settle(self, epoch: int) -> None:
        """Drop what is too old, then what there is no room for. May take as long as writing all of it does."""
        oldest = epoch - self._config.epochs
        self.write()
        if self.folder is not None:
            for step in (self.folder.writer.sync, self.folder.refresh):
                try:
                    step()
                except Exception as error:
                    # whatever it was: old answers are dropped all the same
                    self.note_error(error)
        self.drop_old(epoch)
        if len(self.table) > self._most:
            # a sixteenth more than has to go, so that this is not done for every answer
            with self._lock:
                found = self.table.of_problem(None)
            surplus = len(found.rows) - self._most * 15 // 16
            self._drop(found.oldest_first().tickets()[:surplus], is_evicted=True)
        if self.folder is not None:
            self._settle_folder(self.folder, epoch, oldest)

    def _settle_folder(self, folder: Folder, epoch: int, oldest: int) -> None:
        try:
            if folder.writer.size > self._most_bytes:
                self._drop(folder.oldest_beyond(self._most_bytes // 2), is_evicted=True)
                is_dead = True
            else:
                with self._lock:
                    is_dead = folder.is_mostly_dead()
            folder.remove_stale(oldest, 2 * self._most_bytes - folder.writer.size)
            if is_dead:
                self._is_rewriting = True
                folder.rewrite(epoch)
                self._epoch_written = epoch
        except Exception as error:
            # whatever it was: what waits is written all the same
            self.note_error(error)
        finally:
            self._is_rewriting = False
            self._next_bytes = folder.writer.size + self._most_bytes // 16
            self.write()

    def drop_old(self, epoch: int) -> None:
        """Drop the answers that are too old in this epoch."""
        with self._lock:
            old = self.table.before(epoch - self._config.epochs)
        self._drop(old.tickets())

    def _drop(self, tickets: list[int], is_evicted: bool = False) -> None:
        for some in parts(tickets):
            with self._lock:
                found = (self.table.row(ticket) for ticket in some)
                dropped = self.table.drop([row for row in found if row is not None])
                self.evicted += len(dropped) if is_evicted else 0
                for place in dropped:
                    if place.file == IN_MEMORY:
                        self.memory.drop(place.offset)
                if self.folder is not None:
                    self.folder.dropped(dropped)
