"""Archive of histories: one process keeps what engines on several nodes have answered, and gives it to all of them.

Each node's folder has a courier (courier.py). It brings the rows of the folder's files, and the archive keeps each file
as a mirror: a file of the same rows under the same numbers (mirrors.py). A row's number grows with time, so the newest
one says all that a mirror lacks; to bring a row twice changes nothing. What `Has` says is on disk, and outlives a
killed archive.

Epochs are numbers of one training run, and one node may count them otherwise than another. So the archive compares
those of one file alone: what drafts is what its last epochs hold, counted back from the newest one.

Couriers ask and the archive answers, one message at a time, so neither holds more than a few MiB of the other's. Files
in another vocabulary than the asker's stay where they are.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from vllm_specrollout.cluster.mail import MailServer
from vllm_specrollout.cluster.messages import MOST_BYTES, MessageError
from vllm_specrollout.config import envs
from vllm_specrollout.config.places import make_folder
from vllm_specrollout.errors import SpecRolloutError, logger
from vllm_specrollout.history.database import ERRORS, Database, Reward, Row
from vllm_specrollout.history.epochs import oldest_of
from vllm_specrollout.history.folder import Lock
from vllm_specrollout.history.mirrors import ARCHIVE, MIRROR, MOST_EPOCHS, Kind, Mirrors

MOST_ROWS, MOST_ROW_BYTES, MOST_REWARDS = 256, MOST_BYTES // 4, 4096
"""In a message, but for one row that is longer by itself; what fits no message at all stays at home."""
MOST_FILES = 1 << 15
"""Names that a courier says it has something of, at most."""
_REMEMBERED = 1 << 16
# of a row's columns
_TYPES = (bytes, bytes, int, int, int, float | None, int, bytes, bytes)
_POLL_S = 0.5
_UPKEEP_S = 3600.0
SILENCE_S = 5.0
"""After which a node's name may be another courier's."""

# a name becomes a file's: `$` would take a line's end too
_Name = Annotated[str, Meta(pattern=rf"^{MIRROR.pattern}\Z")]
_Node = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Text = Annotated[str, Meta(max_length=4096)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Epochs = Annotated[int, Meta(ge=0, le=MOST_EPOCHS)]
_Rows = Annotated[tuple[tuple[_Number, Row], ...], Meta(max_length=MOST_ROWS)]
_Rewards = Annotated[tuple[tuple[_Name, Reward], ...], Meta(max_length=MOST_REWARDS)]
_Own = Annotated[tuple[Reward, ...], Meta(max_length=MOST_REWARDS)]


class Bring(Struct, frozen=True, array_like=True, tag="bring"):
    """A courier: keep these rows of a file; without any: what do you have of it?"""

    turn: _Number  # of the courier's questions
    name: _Name
    kind: Kind
    epoch: _Number  # the file's last
    rows: _Rows
    rewards: _Own  # of rows that were brought before
    epochs: _Epochs = MOST_EPOCHS  # before that one, of which rows still draft
    courier: _Text = ""  # drawn by each; empty: not known


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
    epochs: _Epochs  # before a file's last, of which rows still draft
    have: Annotated[dict[_Name, _Number], Meta(max_length=MOST_FILES)]  # what is not named there, it has nothing of
    life: str
    seen: _Number  # rewards of that life
    courier: _Text = ""


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
    is_taken: bool = False  # another courier has the node's name


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


def portion(source: Database, behind: int, oldest: int = 0) -> tuple[tuple[tuple[int, Row], ...], int]:
    """Rows behind a number that fit a message together, oldest first; and the number up to which nothing is left."""
    numbers, end = source.behind(behind, oldest, MOST_ROWS)
    found, size, upto = list[tuple[int, Row]](), 0, behind
    for number in numbers:
        row = source.row(number)
        # a damaged file may hold anything, and what the other end cannot read would hold up all that is behind it
        is_sound = row is not None and 0 <= number < 1 << 62 and all(map(isinstance, row, _TYPES))
        own = sum(map(len, (row.problem, row.request, row.tail, row.tokens))) if row is not None and is_sound else 0
        if found and size + own > MOST_ROW_BYTES:
            return tuple(found), upto
        upto = number
        if row is not None and is_sound and own <= MOST_BYTES // 2:
            found.append((number, row))
            size += own
    return tuple(found), end


class Archive:
    """The process that serves: `specrollout history serve`.

    Args:
        folder: of its mirrors.
        address: as `cluster.mail` takes it.
        most_bytes: of all mirrors together.
        key_file: of an address of tcp, made where it is not there; empty: as the variable says, or in the folder.

    Raises:
        ConfigError, MailError: nothing can be served there.
        HistoryError: another archive writes the folder.
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, address: str, most_bytes: int, key_file: str = "") -> None:
        make_folder(folder)
        self._lock = Lock(folder / ARCHIVE)
        self.mirrors = Mirrors(folder, most_bytes)
        self.key_file = key_file or ("" if os.environ.get(envs.KEY) else str(folder / "key"))
        self._office = MailServer(address, read, self.key_file, is_brief=True)
        self._life = secrets.token_hex(8)
        # the newest of this life, and how many there have been
        self._rewards: deque[tuple[str, Reward]] = deque(maxlen=_REMEMBERED)
        self._told = 0
        self._written = 0
        # who speaks for a node's run, and when it was heard
        self._couriers: dict[tuple[str, str], tuple[str, float]] = {}
        self.address = self._office.address
        """Where couriers call."""

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Answer until it is over; that is asked twice a second."""
        due = time.monotonic()
        while not is_over():
            self._office.wait(_POLL_S)
            for courier, note in self._office.receive():
                self._office.send(courier, self.answer(note))
            if time.monotonic() >= due or self._written >= MOST_ROWS:
                due, self._written = time.monotonic() + _UPKEEP_S, 0
                try:
                    self.mirrors.trim()
                except (SpecRolloutError, *ERRORS) as error:
                    logger.warning("the archive's folder cannot be tidied: %s", error)

    def answer(self, note: Note) -> Note:
        try:
            if isinstance(note, Bring | Want) and self._is_taken(note):
                return Refused(note.turn, "another courier brings under this folder's name", True)
            if isinstance(note, Bring):
                return self._kept(note)
            if isinstance(note, Want):
                return self._given(note)
            return Refused(note.turn, "it asks nothing")
        except (SpecRolloutError, OverflowError, *ERRORS) as error:
            # a number that no database holds is an OverflowError; whoever sends it ends nothing here
            logger.warning("an engine's courier was refused: %s", error)
            return Refused(note.turn, f"{type(error).__name__}: {error}"[:1000])

    def _is_taken(self, note: Bring | Want) -> bool:
        """Of a folder and its copy one speaks: the other one's rows would go under the same numbers."""
        key = (note.name[:16] if isinstance(note, Bring) else note.node, note.kind.run)
        now = time.monotonic()
        courier, heard = self._couriers.get(key, (note.courier, now))
        is_taken = courier != note.courier and now - heard < SILENCE_S
        if not is_taken:
            self._couriers[key] = note.courier, now
        return is_taken

    def _kept(self, note: Bring) -> Has:
        self.mirrors.put(note.name, note.kind, note.rows, note.rewards, note.epoch, note.epochs)
        self._rewards += [(note.name, reward) for reward in note.rewards]
        self._told += len(note.rewards)
        self._written += len(note.rows)
        return Has(note.turn, self.mirrors.known[note.name].upto, self._life)

    def _given(self, note: Want) -> Page:
        # who was told by an earlier life begins with what this one knows
        since = max(note.seen if note.life == self._life else 0, self._told - len(self._rewards))
        missed = list(islice(self._rewards, max(len(self._rewards) - self._told + since, 0), None))[:MOST_REWARDS]
        own = [(name, reward) for name, reward in missed if not name.startswith(note.node)]
        page = Page(note.turn, self._life, since + len(missed), tuple(own))
        new = [(name, known) for name, known in self.mirrors.known.items() if known.upto > note.have.get(name, 0)]
        for name, known in sorted(new, key=lambda one: one[1].kind.run != note.kind.run):
            if name.startswith(note.node) or not note.kind.vocabulary.fits(known.kind.vocabulary):
                continue
            behind = note.have.get(name, 0)
            try:
                mirror = self.mirrors.opened(name)
                oldest = oldest_of(known.epoch, note.epochs, mirror.epochs(note.epochs + 1))
                rows, upto = portion(mirror, behind, oldest)
            except (SpecRolloutError, *ERRORS) as error:
                self.mirrors.leave_out(name, error)
                continue
            if rows or upto > behind:
                about = {"name": name, "kind": known.kind, "epoch": known.epoch}
                return msgspec.structs.replace(page, rows=rows, upto=upto, **about)
        return page

    def close(self) -> None:
        self._office.close()
        self.mirrors.close()
        self._lock.release()
