"""All answers worth drafting from, of this engine and of those that share its directory. Indices: see index_cache.py.

At rest an answer is compressed tokens, in a file or (without `history.dir`) in memory, and some 40 bytes that say
where. Any thread may call a store. What waits for a disk longer than one write does (reading others' files, syncing,
rewriting) is given to `background`.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
from collections.abc import Callable
from pathlib import Path

from vllm_specrollout.drafter_config import HistoryConfig
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.epochs import MAX_EPOCH, EpochGuess, check_epoch
from vllm_specrollout.history.folder import Folder, Located
from vllm_specrollout.history.log import Reader
from vllm_specrollout.history.memory import Memory, decode_answer
from vllm_specrollout.history.records import EpochRecord, Record, RewardRecord
from vllm_specrollout.history.stats import Outcome, StoreStats, check_reward
from vllm_specrollout.history.table import IN_MEMORY, Place, Table, key_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Filter, Vocabulary

logger = logging.getLogger(__name__)


class HistoryStore:
    """Keeps answers, finds a problem's, knows the epoch.

    Args:
        config: `dir` is where; empty: in memory only.
        background: runs tasks one at a time, in the order given; in an engine, in a thread. Default: at once.
        vocabulary: the model's; answers in another one are never handed out.

    Raises:
        HistoryError: a file of the directory is damaged in its header, or of another version.
    """

    def __init__(
        self,
        config: HistoryConfig,
        background: Callable[[Callable[[], None]], object] = operator.call,
        vocabulary: Vocabulary = ANY_VOCABULARY,
    ) -> None:
        self._config = config
        self._filter = Filter(vocabulary, config.dir)
        self._background = background
        self._lock = threading.RLock()
        # held while settling, so that nobody gives the file away meanwhile; taken before the other one
        self._settling = threading.Lock()
        self._is_closed = False
        self._table = Table()
        self._guess = EpochGuess()
        self._is_guessing = True
        self._memory = Memory(config.max_mib << 20)
        # rows of this engine's answers that may still get a reward, by request
        self._requests: dict[str, int] = {}
        # rewards of requests that have not ended
        self._early: dict[str, float] = {}
        # while the own file is rewritten: rewards to write after it; None: it is not
        self._meanwhile: list[tuple[str, int, float]] | None = None
        self._rewards = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        self._evicted = self._write_errors = 0
        self._folder = Folder(Path(config.dir), self._table, self._lock, vocabulary) if config.dir else None
        self._epoch = self._folder.latest_epoch if self._folder else 0
        self._drop_old()

    @property
    def epoch(self) -> int:
        return self._epoch

    def arrived(
        self, problem_id: str, request_id: str, weights_version: int | None = None, continues: bool = False
    ) -> int:
        """A request was admitted; returns its epoch, which it may have begun (see epochs.py)."""
        with self._lock:
            begins = self._guess.arrived(problem_id, request_id, weights_version, continues) and self._is_guessing
            if begins:
                latest = self._folder.latest_epoch if self._folder else 0
                self._begin(min(max(self._epoch + 1, latest), MAX_EPOCH))
            epoch = self._epoch
        if begins:
            self._background(self._settle)
        return epoch

    def ended(self, request_id: str) -> None:
        """A request that was admitted is over; for those without an answer, or with one under another name."""
        with self._lock:
            self._guess.ended(request_id)
            self._early.pop(request_id, None)

    def append(self, answer: Answer) -> Answer:
        """Keep the answer of a request that is over; returns it with the reward that came before its end, if one did.

        A full disk is counted, and the answer kept in memory.
        """
        with self._lock:
            self._guess.ended(answer.request_id)
            if answer.request_id in self._early:
                answer = dataclasses.replace(answer, reward=self._early.pop(answer.request_id))
            self._requests[answer.request_id] = self._keep(answer)
            self._evict()
            return answer

    def report_reward(self, request_id: str, reward: float) -> Outcome:
        """Keep a reward, for the most recent answer of that id.

        Raises:
            ConfigError: the reward is not a finite number.
        """
        check_reward(request_id, reward)
        with self._lock:
            outcome = self._reward(request_id, float(reward))
            self._rewards[outcome.value] += 1
            return outcome

    def _reward(self, request_id: str, reward: float) -> Outcome:
        if self._guess.is_running(request_id):
            outcome = Outcome.REPEATED if request_id in self._early else Outcome.EARLY
            self._early[request_id] = reward
            return outcome
        row = self._requests.get(request_id)
        if row is None:
            return Outcome.UNKNOWN
        place = self._table.place(row)
        self._table.set_reward(row, reward)
        if self._meanwhile is not None:
            self._meanwhile.append((request_id, row, reward))
        elif place.file != IN_MEMORY:
            self._write(RewardRecord(place.sequence, request_id, reward))
        if place.reward is not None:
            return Outcome.REPEATED
        return Outcome.LATE if place.epoch < self._epoch else Outcome.RECORDED

    def begin_epoch(self, epoch: int | None = None) -> int:
        """The trainer begins an epoch, the next one or the one named; from now on none is guessed. Returns it.

        To name the present one begins nothing. Raises: as `check_epoch`.
        """
        with self._lock:
            begun = check_epoch(self._epoch, epoch)
            self._is_guessing = False
            if begun != self._epoch:
                self._guess.begin()
                self._begin(begun)
        self._background(self._settle)
        return begun

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        if self._folder is not None and self._meanwhile is None:
            self._write(EpochRecord(epoch))

    def _settle(self) -> None:
        """What a new epoch means for what is kept; may take as long as writing all of it does."""
        with self._settling:
            if self._folder is None:
                self._drop_old()
            elif not self._is_closed:
                self._settle_folder(self._folder)

    def _settle_folder(self, folder: Folder) -> None:
        try:
            folder.writer.sync()
            folder.refresh()
            self._drop_old()
            with self._lock:
                self._meanwhile = [] if folder.is_mostly_dead() else None
            lost = set() if self._meanwhile is None else folder.rewrite(self._epoch)
        except OSError as error:
            lost = set()
            self._note_error(error)
        with self._lock:
            self._requests = {name: row for name, row in self._requests.items() if row not in lost}
            self._catch_up(folder)

    def _catch_up(self, folder: Folder) -> None:
        """Write what came while the file was rewritten, and answers that could not be written before."""
        meanwhile, self._meanwhile = self._meanwhile or [], None
        try:
            for key, held in self._memory.items():
                folder.move_in(
                    held.row, dataclasses.replace(decode_answer(held.record), reward=self._table.place(held.row).reward)
                )
                self._memory.drop(key)
        except OSError as error:
            self._note_error(error)
        for request_id, row, reward in meanwhile:
            place = self._table.place(row)
            if self._requests.get(request_id) == row and place.file != IN_MEMORY:
                self._write(RewardRecord(place.sequence, request_id, reward))

    def _keep(self, answer: Answer) -> int:
        """Keep an answer on disk if that goes, otherwise in memory; returns its row."""
        if self._folder is not None and self._meanwhile is None:
            try:
                return self._folder.append(answer)
            except OSError as error:
                self._note_error(error)
        place = Place(IN_MEMORY, self._memory.reserve(), 0, answer.epoch, answer.reward, answer.num_tokens)
        row = self._table.add(key_of(answer.problem_id), place)
        self._memory.put(row, answer)
        return row

    def _evict(self) -> None:
        for held in self._memory.overflow():
            self._evicted += 1
            self._table.drop([held.row])
            if self._requests.get(held.request_id) == held.row:
                del self._requests[held.request_id]

    def _write(self, record: Record) -> None:
        """Write what can be done without."""
        try:
            if self._folder is not None:
                self._folder.append(record)
        except OSError as error:
            self._note_error(error)

    def _note_error(self, error: OSError) -> None:
        if not self._write_errors:
            logger.warning("the history in `%s` cannot be written, answers stay in memory: %s", self._config.dir, error)
        self._write_errors += 1

    def _drop_old(self) -> None:
        with self._lock:
            oldest = self._epoch - self._config.epochs
            rewardable = max(oldest, self._epoch - 1)
            self._requests = {
                name: row for name, row in self._requests.items() if self._table.place(row).epoch >= rewardable
            }
        while True:
            # a few at a time: whoever wants the lock need not wait for all of them
            with self._lock:
                dropped = self._table.drop(self._table.rows_before(oldest)[:1000])
                for place in dropped:
                    if place.file == IN_MEMORY:
                        self._memory.drop(place.offset)
                if self._folder is not None:
                    self._folder.dropped(dropped)
            if not dropped:
                return

    def find(self, problem_id: str | None) -> list[Located]:
        """A problem's answers (None: all problems') that may draft now, older epochs first."""
        with self._lock:
            places = self._table.find(None if problem_id is None else key_of(problem_id))
            oldest = self._epoch - self._config.epochs
            return [Located(place, self._source(place)) for place in places if place.epoch >= oldest]

    def _source(self, place: Place) -> Reader | bytes:
        if place.file == IN_MEMORY or self._folder is None:
            return self._memory.record(place.offset)
        return self._folder.reader(place.file)

    def read(self, located: Located, problem_id: str | None = None) -> Answer | None:
        """The answer; None: damaged since it was found, another problem's with the same hash, or another model's."""
        place, source = located
        answer = decode_answer(source) if isinstance(source, bytes) else source.read(place.offset)
        if not isinstance(answer, Answer) or problem_id not in (None, answer.problem_id):
            return None
        return dataclasses.replace(answer, reward=place.reward) if self._filter.passes(answer) else None

    def stats(self) -> StoreStats:
        with self._lock:
            readers = self._folder.readers() if self._folder else []
            scanners = [scanner for reader in readers if (scanner := reader.scanner()) is not None]
            return StoreStats(
                epoch=self._epoch,
                answers=len(self._table),
                problems=self._table.num_problems,
                tokens=self._table.num_tokens(),
                files=len(readers),
                file_bytes=sum(reader.descriptor.size() for reader in readers),
                memory_bytes=self._memory.num_bytes,
                damaged=sum(scanner.missing for scanner in scanners),
                evicted=self._evicted,
                write_errors=self._write_errors,
                foreign_files=len(self._folder.foreign) if self._folder else 0,
                foreign_answers=self._filter.refused,
                rewards=dict(self._rewards),
            )

    def close(self) -> None:
        """Wait until all is on disk, and let others have the file. What is in memory only is lost."""
        with self._settling, self._lock:
            if self._folder is not None and not self._is_closed:
                try:
                    self._folder.writer.close()
                except OSError as error:
                    self._note_error(error)
            self._is_closed = True
