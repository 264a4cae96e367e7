"""Archive of histories: one process keeps what engines on several nodes have answered, and gives it to all of them.

Each node's folder has a courier (courier.py). It brings the rows of the folder's files, and the archive keeps each file
as a mirror: a file of the same rows under the same numbers. A row's number grows with time, so the newest one says all
that a mirror lacks; to bring a row twice changes nothing. What `Has` says is on disk, and outlives a killed archive.

Couriers ask and the archive answers, one message at a time, so neither holds more than a few MiB of the other's. Files
in another vocabulary than the asker's stay where they are.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from vllm_specrollout.cluster.mail import Office
from vllm_specrollout.cluster.messages import MOST_BYTES, MessageError
from vllm_specrollout.config.places import make_folder
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.history.database import ERRORS, SUFFIX, Database, HistoryError, Reward, Row
from vllm_specrollout.history.folder import Lock
from vllm_specrollout.history.vocabulary import Vocabulary

logger = logging.getLogger("vllm.specrollout")

OWN = re.compile(r"answers-[0-9]{4,5}")
"""Stem of a file that engines write."""
MIRROR = re.compile(r"[0-9a-f]{16}\.answers-[0-9]{4,5}")
"""Stem of its mirror: the folder's name, and its own."""
MOST_ROWS, MOST_ROW_BYTES, MOST_REWARDS = 256, MOST_BYTES // 4, 4096
"""In a message, but for one row that is longer by itself; what fits no message at all stays at home."""
_MOST_FILES = 4096
_REMEMBERED = 1 << 16
_POLL_S = 0.5

_Name = Annotated[str, Meta(pattern=f"^{MIRROR.pattern}$")]
_Node = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
_Text = Annotated[str, Meta(max_length=4096)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Rows = Annotated[tuple[tuple[_Number, Row], ...], Meta(max_length=MOST_ROWS)]
_Rewards = Annotated[tuple[tuple[_Name, Reward], ...], Meta(max_length=MOST_REWARDS)]


class Kind(Struct, frozen=True, array_like=True):
    """A vocabulary."""

    model: _Text
    size: _Number
    digest: _Text


class Bring(Struct, frozen=True, array_like=True, tag="bring"):
    """A courier: keep these rows of a file; without any: what do you have of it?"""

    turn: _Number  # of the courier's questions
    name: _Name
    kind: Kind
    epoch: _Number  # the file's last
    rows: _Rows
    rewards: Annotated[tuple[Reward, ...], Meta(max_length=MOST_REWARDS)]  # of rows that were brought before


class Has(Struct, frozen=True, array_like=True, tag="has"):
    """The archive: it has the file's rows up to this number."""

    turn: _Number
    upto: _Number
    life: _Node  # of this process of the archive: another one knows nothing of rewards that came before


class Want(Struct, frozen=True, array_like=True, tag="want"):
    """A courier: give me rows of others that my folder lacks."""

    turn: _Number
    node: _Node
    kind: Kind
    oldest: _Number  # epoch of which rows still draft
    have: Annotated[dict[_Name, _Number], Meta(max_length=_MOST_FILES)]  # what is not named there, it has nothing of
    life: str
    seen: _Number  # rewards of that life


class Page(Struct, frozen=True, array_like=True, tag="page"):
    """The archive: rows of one file, and rewards that came since; no name: there are no more rows at present."""

    turn: _Number
    life: _Node
    seen: _Number
    rewards: _Rewards
    name: str = ""
    kind: Kind | None = None
    epoch: _Number = 0
    rows: _Rows = ()
    upto: _Number = 0  # behind which there may be more


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """The archive: it could not do that."""

    turn: _Number
    reason: _Text


Note = Bring | Has | Want | Page | Refused
_decoder = msgspec.msgpack.Decoder(Note)


def read(data: bytes) -> Note:
    """
    Raises:
        MessageError: these bytes are no message to or from an archive.
    """
    try:
        note: Note = _decoder.decode(data)
        return note
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes are no message: {str(error)[:200]}") from None


def kind_of(vocabulary: Vocabulary) -> Kind:
    return Kind(vocabulary.model, vocabulary.size, vocabulary.digest)


def vocabulary_of(kind: Kind) -> Vocabulary:
    return Vocabulary(kind.model, kind.size, kind.digest)


def portion(source: Database, behind: int, oldest: int = 0) -> tuple[tuple[tuple[int, Row], ...], int]:
    """Rows behind a number that fit a message together, oldest first; and the number up to which nothing is left."""
    found, size, upto = list[tuple[int, Row]](), 0, behind
    for number, row in source.rows_behind(behind, oldest, MOST_ROWS):
        own = len(row.problem) + len(row.request) + len(row.tail) + len(row.tokens)
        if found and size + own > MOST_ROW_BYTES:
            break
        upto = number
        if own <= MOST_BYTES // 2:
            found.append((number, row))
            size += own
    return tuple(found), upto


class Mirrors:
    """The mirrors in a folder; one process writes them.

    Args:
        folder: made where it is not there.
        most_bytes: of all of them together; beyond it the answers of the oldest epochs go.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._open: dict[str, tuple[Database, Lock]] = {}
        self.upto: dict[str, int] = {}
        """Of each mirror: the newest number that it has had."""
        make_folder(folder)
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if MIRROR.fullmatch(path.stem):
                try:
                    self._opened(path.stem, Database(path).vocabulary)
                except (HistoryError, *ERRORS) as error:
                    logger.warning("a mirror cannot be used: %s", error)

    def __iter__(self) -> Iterator[tuple[str, Database]]:
        return iter([(name, database) for name, (database, _) in self._open.items()])

    def put(
        self, name: str, kind: Kind, rows: Sequence[tuple[int, Row]], rewards: Sequence[Reward], epoch: int
    ) -> None:
        """
        Raises:
            HistoryError, sqlite3.Error, OSError: it cannot be kept.
        """
        mirror = self._opened(name, vocabulary_of(kind))
        if rows or rewards or epoch > mirror.latest_epoch():
            mirror.put(rows, rewards, max(epoch, mirror.latest_epoch()))
        self.upto[name] = max([self.upto[name], *(number for number, _ in rows)])

    def _opened(self, name: str, vocabulary: Vocabulary) -> Database:
        if name not in self._open:
            if len(self._open) >= _MOST_FILES:
                raise HistoryError(f"there are {_MOST_FILES} files already", "clear the archive's folder")
            path = self._folder / (name + SUFFIX)
            lock = Lock(path)
            try:
                database = Database(path, True, vocabulary)
            except BaseException:
                lock.release()
                raise
            self._open[name], self.upto[name] = (database, lock), database.newest()
        found = self._open[name][0]
        if not found.vocabulary.fits(vocabulary):
            raise HistoryError(f"`{name}` is kept in another vocabulary", "name another `history.dir`")
        return found

    def trim(self, oldest: int = 0) -> None:
        """Drop what no longer drafts, and what there is no room for."""
        for _, mirror in self:
            if oldest:
                mirror.drop_before(oldest)
        while sum(mirror.used_bytes() for _, mirror in self) > self._most_bytes:
            filled = [(mirror.earliest_epoch(), name, mirror) for name, mirror in self if mirror.newest()]
            if not filled:
                break
            mirror = min(filled)[2]
            mirror.drop_oldest(1 + mirror.counts(0).answers // 16)
        for _, mirror in self:
            mirror.give_back()

    def close(self) -> None:
        for database, lock in self._open.values():
            database.close()
            lock.release()
        self._open = {}


class Archive:
    """The process that serves: `specrollout history serve`.

    Args:
        folder: of its mirrors.
        address: as `cluster.mail` takes it.
        most_bytes: of all mirrors together.

    Raises:
        ConfigError, MailError: nothing can be served there.
        HistoryError: another archive writes the folder.
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, address: str, most_bytes: int) -> None:
        make_folder(folder)
        self._lock = Lock(folder / "archive")
        self._mirrors = Mirrors(folder, most_bytes)
        self._office = Office(address, read)
        self._life = secrets.token_hex(8)
        # the newest of this life, and how many there have been
        self._rewards: deque[tuple[str, Reward]] = deque(maxlen=_REMEMBERED)
        self._told = 0
        self._written = 0
        self.address = self._office.address
        """Where couriers call; a secret, where it has a key."""

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Answer until it is over; that is asked twice a second."""
        while not is_over():
            self._office.wait(_POLL_S)
            for courier, note in self._office.receive():
                self._office.send(courier, self.answer(note))

    def answer(self, note: Note) -> Note:
        try:
            if isinstance(note, Bring):
                return self._kept(note)
            if isinstance(note, Want):
                return self._given(note)
            return Refused(note.turn, "it asks nothing")
        except (SpecRolloutError, OverflowError, *ERRORS) as error:
            # a number that no database holds is an OverflowError; whoever sends it ends nothing here
            logger.warning("an engine's courier was refused: %s", error)
            return Refused(note.turn, f"{type(error).__name__}: {error}"[:1000])

    def _kept(self, note: Bring) -> Has:
        self._mirrors.put(note.name, note.kind, note.rows, note.rewards, note.epoch)
        self._rewards += [(note.name, reward) for reward in note.rewards]
        self._told += len(note.rewards)
        self._written += len(note.rows)
        if self._written >= MOST_ROWS:
            self._written = 0
            self._mirrors.trim()
        return Has(note.turn, self._mirrors.upto[note.name], self._life)

    def _given(self, note: Want) -> Page:
        # who was told by an earlier life begins with what this one knows
        since = max(note.seen if note.life == self._life else 0, self._told - len(self._rewards))
        missed = list(islice(self._rewards, max(len(self._rewards) - self._told + since, 0), None))[:MOST_REWARDS]
        own = [(name, reward) for name, reward in missed if not name.startswith(note.node)]
        page = Page(note.turn, self._life, since + len(missed), tuple(own))
        for name, mirror in self._mirrors:
            behind = note.have.get(name, 0)
            if name.startswith(note.node) or self._mirrors.upto[name] <= behind:
                continue
            if not vocabulary_of(note.kind).fits(mirror.vocabulary):
                continue
            rows, upto = portion(mirror, behind, note.oldest)
            if rows or upto > behind:
                about = {"name": name, "kind": kind_of(mirror.vocabulary), "epoch": mirror.latest_epoch()}
                return msgspec.structs.replace(page, rows=rows, upto=upto, **about)
        return page

    def close(self) -> None:
        self._office.close()
        self._mirrors.close()
        self._lock.release()
