"""Courier of a history folder: brings its answers to the archive (archive.py), and those of other folders from there.

It is a thread beside an engine, which reads and writes files alone: what it brings lies in the folder as other engines'
files do, and what it takes away is what engines have written there. So no step waits for it, and with an archive that
is gone or slow engines go on with what they have. Of the engines of one folder and run one has it at a time.

What comes goes into two files: of the same run on other nodes, and of other runs. Its epochs become ours: those of a
node of the same run that stands at the same one, or beside it, are the same; the newest of any other node is taken for
the present one, of another run for the last. So who counts otherwise, by a jump, a restart or another beginning, moves
nobody else's epochs, and ages as ours begin.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import socket
import threading
import time
from pathlib import Path
from typing import Any

from vllm_specrollout.cluster.mail import MailClient
from vllm_specrollout.cluster.messages import MOST_BYTES, encode
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import logger
from vllm_specrollout.history.archive import (
    MOST_FILES,
    MOST_REWARDS,
    SILENCE_S,
    Bring,
    Has,
    Note,
    Page,
    Refused,
    Want,
    portion,
    read,
)
from vllm_specrollout.history.database import (
    ERRORS,
    SUFFIX,
    DamagedError,
    Database,
    ForeignError,
    HistoryError,
    OtherFileError,
    Reward,
    remove,
)
from vllm_specrollout.history.epochs import MAX_EPOCH
from vllm_specrollout.history.folder import OWN, Lock, names_of
from vllm_specrollout.history.mirrors import kind_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

PAUSE_S = 1.0
"""Between two looks at the folder and the archive."""
_PATIENCE_S = 5.0
_PAGES = 64
"""Messages in a look, at most, before the folder is looked at again."""
_SAID_S = 3600.0
"""After which the archive hears again of a file in which nothing changes: it forgets those that nobody speaks of."""
_MOST_FETCHED = 100  # of the folder's runs


class AwayError(Exception):
    """The archive does not answer."""


class RefusedError(Exception):
    """The archive does not take a file."""


class TakenError(Exception):
    """Another courier has this folder's name: one of the two folders is a copy."""


class Courier:
    """
    Args:
        config: `dir` and `url` are its two ends; `epochs` and `max_disk_mib` bound what it brings.
        vocabulary: of the answers that the engines of the folder can use.

    Raises:
        ConfigError: no such address, or no key.
        OSError: the folder's names cannot be read.
    """

    def __init__(self, config: HistoryConfig, vocabulary: Vocabulary = ANY_VOCABULARY) -> None:
        self._folder, self._vocabulary = Path(config.dir), vocabulary
        self._epochs, self._most_bytes = config.epochs, config.max_disk_mib << 20
        self._node, own = names_of(self._folder)
        self._run_name = config.run or own
        self._kind = kind_of(vocabulary, self._run_name)
        self._box = MailClient(config.url, read, config.key_file, is_brief=True)
        # the folder's courier, whichever engine has it: another one is that of a copy
        here = self._folder.stat()
        self._id = f"{socket.gethostname()} {here.st_dev} {here.st_ino}"
        # while this is held, no other engine's courier goes
        self._lock: Lock | None = None
        self._fetched: Fetched | None = None
        self._sources: dict[str, _Source] = {}
        self._turns = itertools.count(1)
        # the archive's process, and how many of its rewards have come
        self._life, self._seen = "", 0
        # since when another courier has this folder's name
        self._taken: float | None = None
        self.brought = self.fetched = 0
        """Answers that the archive has got from here, and that have come from there."""
        self.problem = ""
        """Why the last look failed; empty: it did not."""
        self.left_out: dict[str, str] = {}
        """Files that stay at home, and why."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specrollout-history-courier", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                is_done = self._look()
                problem, self._taken = "", None
            except TakenError:
                is_done, problem = True, "another folder has this one's name there: one of the two is a copy"
                self._taken = time.monotonic() if self._taken is None else self._taken
            except Exception as error:
                is_done = True
                problem = f"{type(error).__name__}: {error}"
            if self._ended.is_set():
                break  # what it was asked for is given up, and nobody's fault
            if problem and not self.problem:
                logger.warning(
                    "the archive at %s is not used at present, and answers stay on this node: %s",
                    self._box.address,
                    problem,
                )
            elif self.problem and not problem:
                logger.info("the archive at %s is used again", self._box.address)
            self.problem = problem
            if is_done:
                self._ended.wait(PAUSE_S)
        self._leave()

    def _look(self) -> bool:
        """Bring and fetch what there is; whether that was all."""
        if self._lock is None:
            try:
                self._lock = Lock(self._folder / f"courier-{self._run_name}")
            except HistoryError:
                return True  # another engine's goes
        # longer than one that was killed is remembered
        if self._taken is not None and time.monotonic() - self._taken > 2 * SILENCE_S:
            logger.warning("`%s` is a copy of another folder, and has another name at the archive now", self._folder)
            self._node, _ = names_of(self._folder, draws=True)
            self._sources, self._taken = {}, None
        epoch, here = 0, self._own_files()
        self.left_out = {stem: why for stem, why in self.left_out.items() if stem in here}
        for stem in here:
            try:
                epoch = max(epoch, self._bring(stem))
                self.left_out.pop(stem, None)
            except FileNotFoundError:
                pass
            except (RefusedError, ValueError, *ERRORS) as error:
                # it is looked at anew the next time; all other files go their way
                self._sources.pop(stem, None)
                if stem not in self.left_out:
                    logger.warning("`%s` is not brought to the archive, and all else is: %s", stem + SUFFIX, error)
                self.left_out[stem] = f"{type(error).__name__}: {error}"
        return self._fetch(epoch)

    def _own_files(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}") if OWN.fullmatch(path.stem))

    # --- to the archive ----------------------------------------------------------------------------------------------

    def _bring(self, stem: str) -> int:
        """All that is new in a file of our run; returns the file's epoch."""
        source = self._sources.get(stem)
        if source is None or not source.file.is_current:
            source = self._sources[stem] = _Source(Database(self._folder / (stem + SUFFIX)))
        if source.file.run not in ("", self._run_name):
            return 0
        # an archive that was begun anew may have lost what it had, and knows no rewards
        if source.life != self._life:
            source.life, source.stamp, source.changes, source.said = "", 0, -1, -_SAID_S
        if time.monotonic() - source.said > _SAID_S and (upto := self._say(stem, source)) != source.upto:
            source.upto, source.changes = upto, -1
        epoch = source.file.latest_epoch()
        changes = source.file.changes()
        if changes == source.changes:
            return epoch
        while True:
            rows, upto = portion(source.file, source.upto)
            if upto == source.upto:
                break
            if rows:
                self._say(stem, source, rows)
            self.brought += len(rows)
            source.upto = upto
        while few := source.file.rewards(source.stamp, MOST_REWARDS):
            self._say(stem, source, rewards=tuple(reward for _, reward in few))
            source.stamp = few[-1][0]
        source.changes = changes
        return epoch

    def _say(self, stem: str, source: _Source, rows: tuple[Any, ...] = (), rewards: tuple[Reward, ...] = ()) -> int:
        """Returns: up to which number the archive has the file's rows."""
        file = source.file
        name, kind = f"{self._node}.{stem}-{file.part}", kind_of(file.vocabulary, file.run or self._run_name)
        note = Bring(next(self._turns), name, kind, file.latest_epoch(), rows, rewards, self._epochs, self._id)
        found = self._ask(note)
        if not isinstance(found, Has):
            raise AwayError("it answers something else")
        if found.life != self._life:
            self._life, self._seen = found.life, 0
        # one that was begun meanwhile has not heard the rewards that were told before: the next look tells them all
        source.life, source.said = source.life or found.life, time.monotonic()
        return found.upto

    # --- from the archive --------------------------------------------------------------------------------------------

    def _fetch(self, epoch: int) -> bool:
        if self._fetched is None:
            self._fetched = Fetched(self._folder, self._vocabulary, self._run_name)
        own, is_done, before = self._fetched, False, self.fetched
        try:
            own.follow(epoch, self._epochs)
            for _ in range(_PAGES):
                have = dict(list(own.have.items())[-MOST_FILES:])
                note = Want(
                    next(self._turns), self._node, self._kind, self._epochs, have, self._life, self._seen, self._id
                )
                page = self._ask(note)
                if not isinstance(page, Page):
                    raise AwayError("it answers something else")
                if page.name.startswith(self._node):
                    raise AwayError("it gives this folder what it has brought itself")
                self.fetched += own.take(page)
                self._life, self._seen = page.life, page.seen
                if not page.name and not page.rewards:
                    is_done = True
                    break
            if self.fetched != before:
                own.trim(self._most_bytes)
        except ERRORS:
            # what is fetched is a copy: it is looked at anew, and fetched again where it is damaged
            self._fetched = None
            own.close()
            raise
        return is_done

    # --- both --------------------------------------------------------------------------------------------------------

    def _ask(self, note: Bring | Want) -> Note:
        """What the archive answers to this."""
        if (size := len(encode(note))) > MOST_BYTES:
            raise RefusedError(f"a message of {size} bytes, above {MOST_BYTES}")
        until, is_sent = time.monotonic() + _PATIENCE_S, False
        while (left := until - time.monotonic()) > 0.0 and not self._ended.is_set():
            # nothing is queued for an archive that is not there, and no second message behind one that waits
            is_sent = is_sent or (self._box.has_room(min(left, 0.2)) and self._box.send(note))
            self._box.wait(min(left, 0.2 if is_sent else 0.0))
            for found in self._box.receive():
                if found.turn != note.turn:
                    continue  # an answer that was given up
                if isinstance(found, Refused):
                    raise TakenError if found.is_taken else RefusedError(found.reason)
                return found
        raise AwayError(f"it did not answer for {_PATIENCE_S:.0f} s")

    def as_dict(self) -> dict[str, Any]:
        """In plain JSON types."""
        return {
            "url": self._box.address,
            "run": self._run_name,
            "goes": self._lock is not None,
            "problem": self.problem,
            "brought": self.brought,
            "fetched": self.fetched,
            "left_out": dict(self.left_out),
        }

    def _leave(self) -> None:
        self._box.close()
        if self._fetched is not None:
            self._fetched.close()
        if self._lock is not None:
            self._lock.release()

    def close(self) -> None:
        """It brings nothing more; what the folder has, the next engine's brings."""
        self._ended.set()
        self._thread.join(_PATIENCE_S)


class _Source:
    """A file of this folder, and what the archive has of it."""

    def __init__(self, file: Database) -> None:
        self.file = file
        self.upto = 0
        # of the archive that has said so; empty: none has yet
        self.life = ""
        # of the last reward that was told to it
        self.stamp = 0
        # as the file counted them when it was looked at
        self.changes = -1
        # when the archive heard of it, by a clock that begins at 0 or later
        self.said = -_SAID_S


class Fetched:
    """What other nodes have answered, in two files of this folder.

    Args:
        run: ours, whose epochs its answers get.

    Raises:
        HistoryError, sqlite3.Error, OSError: they cannot be kept.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, run: str) -> None:
        self._folder, self._vocabulary, self._run = folder, vocabulary, run
        self._epoch = self._epochs = 0
        self._open = contextlib.ExitStack()
        try:
            self.siblings, self.strangers = self._opened("siblings"), self._opened("strangers")
        except BaseException:
            self.close()
            raise
        self.have = self.siblings.fetched() | self.strangers.fetched()
        """Of each file elsewhere: up to which number its rows are here."""

    def _opened(self, kind: str) -> Database:
        for number in range(_MOST_FETCHED):
            path = self._folder / f"{kind}-{number:04d}{SUFFIX}"
            try:
                lock = Lock(path)
            except (HistoryError, OSError):
                continue  # of another run that goes on here; or it leads elsewhere
            for _ in range(2):
                try:
                    found = Database(path, True, self._vocabulary, self._run)
                    self._open.callback(lock.release)
                    self._open.callback(found.close)
                    return found
                except (ForeignError, DamagedError, OtherFileError):
                    # it is a copy, and fetched again
                    remove(path)
                except (HistoryError, *ERRORS):
                    break
            lock.release()
        raise HistoryError(f"no file for others' answers can be made in `{self._folder}`", "see to the directory")

    def follow(self, epoch: int, epochs: int) -> None:
        """Our epoch is this one now, and answers of so many before it draft."""
        known = self.siblings.begun_epoch()
        if not 0 <= epoch - known <= 1:
            # our numbers have jumped, and those of what is here stand for what they stood for before
            for file in (self.siblings, self.strangers):
                file.clear()
            self.have = {}
        if epoch != known or epochs != self._epochs:
            for file in (self.siblings, self.strangers):
                file.put((), (), epoch)
                file.drop_before(epoch - epochs)
        self._epoch, self._epochs = epoch, epochs

    def take(self, page: Page) -> int:
        """Returns: how many answers it brings."""
        if page.rewards:
            rewards = [one._replace(number=_number(name, one.number)) for name, one in page.rewards]
            for file in (self.siblings, self.strangers):
                file.put((), rewards, None)
        if not page.name or page.kind is None:
            return 0
        is_sibling, lead = page.kind.run == self._run, page.epoch - self._epoch
        shift = 0 if is_sibling and abs(lead) <= 1 else -lead if is_sibling else -lead - min(1, self._epochs)
        rows = [
            (_number(page.name, number), row._replace(epoch=row.epoch + shift))
            for number, row in page.rows
            if self._epoch - self._epochs <= row.epoch + shift <= MAX_EPOCH
        ]
        upto = max(page.upto, self.have.pop(page.name, 0))
        (self.siblings if is_sibling else self.strangers).put(rows, (), None, {page.name: upto})
        # the one that came last stands last
        self.have[page.name] = upto
        return len(page.rows)

    def trim(self, most_bytes: int) -> None:
        """Of other runs a quarter at most."""
        for file, room in ((self.strangers, most_bytes // 4), (self.siblings, most_bytes - most_bytes // 4)):
            while file.used_bytes() > room and file.drop_oldest(1 + file.counts(-MAX_EPOCH).answers // 16):
                pass
            file.give_back()

    def close(self) -> None:
        self._open.close()


def _number(name: str, number: int) -> int:
    """Of a row that has this number in a file elsewhere: two nodes give out the same ones."""
    return int.from_bytes(hashlib.blake2b(f"{name} {number}".encode(), digest_size=8).digest(), "big") >> 2
