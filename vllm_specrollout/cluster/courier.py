"""Courier of a history folder: brings its answers to the archive (archive.py), and those of other folders from there.

It is a thread beside an engine, which reads and writes files alone: what it brings lies in the folder as other engines'
files do, and what it takes away is what engines have written there. So no step waits for it, and with an archive that
is gone or slow engines go on with what they have. Of the engines of one folder one has it at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from vllm_specrollout.cluster.archive import (
    MOST_REWARDS,
    OWN,
    Bring,
    Has,
    Mirrors,
    Note,
    Page,
    Refused,
    Want,
    kind_of,
    portion,
    read,
)
from vllm_specrollout.cluster.mail import Box
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.config.places import opener
from vllm_specrollout.history.database import SUFFIX, Database, HistoryError, Reward
from vllm_specrollout.history.folder import Lock
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

logger = logging.getLogger("vllm.specrollout")

PAUSE_S = 1.0
"""Between two looks at the folder and the archive."""
_PATIENCE_S = 5.0
_PAGES = 64
"""Messages in a look, at most, before the folder is looked at again."""


class AwayError(Exception):
    """The archive does not answer."""


class Courier:
    """
    Args:
        config: `dir` and `url` are its two ends; `epochs` and `max_disk_mib` bound what it brings.
        vocabulary: of the answers that the engines of the folder can use.

    Raises:
        ConfigError: no such address.
    """

    def __init__(self, config: HistoryConfig, vocabulary: Vocabulary = ANY_VOCABULARY) -> None:
        self._folder, self._kind = Path(config.dir), kind_of(vocabulary)
        self._epochs, self._most_bytes = config.epochs, config.max_disk_mib << 20
        self._box = Box(config.url, read)
        self._node = _name_of(self._folder)
        # while this is held, no other engine's courier goes
        self._lock: Lock | None = None
        self._mirrors: Mirrors | None = None
        self._sources: dict[str, _Source] = {}
        self._turn = 0
        # the archive's process, and how many of its rewards have come
        self._life, self._seen = "", 0
        self.brought = self.fetched = 0
        """Answers that the archive has got from here, and that have come from there."""
        self.problem = ""
        """Why the last look failed; empty: it did not."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specrollout-history-courier", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                is_done = self._look()
                problem = ""
            except Exception as error:
                is_done = True
                problem = f"{type(error).__name__}: {error}"
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
                self._lock = Lock(self._folder / "courier")
            except HistoryError:
                return True  # another engine's goes
            self._mirrors = Mirrors(self._folder, self._most_bytes)
        epoch = 0
        for name in self._own_files():
            with contextlib.suppress(FileNotFoundError):
                epoch = max(epoch, self._bring(name))
        return self._fetch(epoch)

    def _own_files(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}") if OWN.fullmatch(path.stem))

    # --- to the archive ----------------------------------------------------------------------------------------------

    def _bring(self, stem: str) -> int:
        """All that is new in a file of ours; returns the file's epoch."""
        source = self._sources.get(stem)
        # an archive that was begun anew may have lost what it had, and knows no rewards
        if source is None or not source.file.is_current or source.life != self._life:
            file = Database(self._folder / (stem + SUFFIX))
            source = self._sources[stem] = _Source(file)
            self._say(stem, source)
        epoch = source.file.latest_epoch()
        changes = source.file.changes()
        if changes == source.changes:
            return epoch
        while True:
            rows, upto = portion(source.file, source.upto)
            if upto == source.upto:
                break
            self._say(stem, source, rows)
            self.brought += len(rows)
            source.upto = max(upto, source.upto)
        new = [one for one in source.file.rewards(max(epoch - 1, 0)) if source.rewards.get(one.number) != one.reward]
        for start in range(0, len(new), MOST_REWARDS):
            self._say(stem, source, rewards=tuple(new[start : start + MOST_REWARDS]))
        source.rewards = {one.number: one.reward for one in source.file.rewards(max(epoch - 1, 0))}
        source.changes = changes
        return epoch

    def _say(self, stem: str, source: _Source, rows: tuple[Any, ...] = (), rewards: tuple[Reward, ...] = ()) -> None:
        file = source.file
        kind, epoch = kind_of(file.vocabulary), file.latest_epoch()
        found = self._ask(Bring(self._next(), f"{self._node}.{stem}", kind, epoch, rows, rewards))
        if not isinstance(found, Has):
            raise AwayError("it answers something else")
        source.upto = max(found.upto, source.upto)
        if found.life != self._life:
            self._life, self._seen = found.life, 0
        # one that was begun meanwhile has not heard the rewards that were told before: the next look tells them all
        source.life = source.life or found.life

    # --- from the archive --------------------------------------------------------------------------------------------

    def _fetch(self, epoch: int) -> bool:
        assert self._mirrors is not None
        oldest = self._oldest(epoch)
        before, is_done = self.fetched, False
        for _ in range(_PAGES):
            have = dict(self._mirrors.upto)
            page = self._ask(Want(self._next(), self._node, self._kind, oldest, have, self._life, self._seen))
            if not isinstance(page, Page):
                raise AwayError("it answers something else")
            self._take(page)
            if not page.name and not page.rewards:
                is_done = True
                break
        if self.fetched != before:
            self._mirrors.trim(self._oldest(epoch))
        return is_done

    def _oldest(self, epoch: int) -> int:
        """Epoch of which answers still draft, of ours and of others'."""
        return max(max([epoch, *(mirror.latest_epoch() for _, mirror in self._mirrors or ())]) - self._epochs, 0)

    def _take(self, page: Page) -> None:
        assert self._mirrors is not None
        known = dict(self._mirrors)
        for name, mirror in known.items():
            if own := [reward for of, reward in page.rewards if of == name]:
                mirror.put((), own, None)
        if page.name and page.kind is not None:
            if page.name.startswith(self._node):
                raise AwayError("it gives this folder what it has brought itself")
            self._mirrors.put(page.name, page.kind, page.rows, (), page.epoch)
            self._mirrors.upto[page.name] = max(self._mirrors.upto[page.name], page.upto)
            self.fetched += len(page.rows)
        self._life, self._seen = page.life, page.seen

    # --- both --------------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _ask(self, note: Bring | Want) -> Note:
        """What the archive answers to this."""
        until = time.monotonic() + _PATIENCE_S
        self._box.send(note)
        while (left := until - time.monotonic()) > 0.0 and not self._ended.is_set():
            self._box.wait(min(left, 0.2))
            for found in self._box.receive():
                if found.turn != note.turn:
                    continue  # an answer that was given up
                if isinstance(found, Refused):
                    raise AwayError(found.reason)
                return found
        raise AwayError(f"it did not answer for {_PATIENCE_S:.0f} s")

    def as_dict(self) -> dict[str, Any]:
        """In plain JSON types."""
        return {
            "url": self._box.address,
            "goes": self._lock is not None,
            "problem": self.problem,
            "brought": self.brought,
            "fetched": self.fetched,
        }

    def _leave(self) -> None:
        self._box.close()
        if self._mirrors is not None:
            self._mirrors.close()
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
        # of the archive that has said so; None: none has yet
        self.life: str | None = None
        # number -> what was told
        self.rewards: dict[int, float] = {}
        # as the file counted them when it was looked at
        self.changes = -1


def _name_of(folder: Path) -> str:
    """The folder's name at the archive, drawn once."""
    path = folder / "node"
    with contextlib.suppress(FileExistsError):
        draft = folder / f"node.{secrets.token_hex(8)}"
        with open(draft, "w", opener=opener) as file:
            file.write(secrets.token_hex(8))
        try:
            # whole, or not at all
            os.link(draft, path)
        finally:
            draft.unlink()
    name = path.read_text()
    if not re.fullmatch("[0-9a-f]{16}", name):
        raise HistoryError(f"`{path}` names no folder", "remove the file: another name is drawn")
    return name
