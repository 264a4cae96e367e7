"""Actions of `specrollout history`: look into files, merge, trim, remove. No printing: see cli/history.py."""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from vllm_specrollout.config.places import make_folder
from vllm_specrollout.history import database as db
from vllm_specrollout.history.database import SUFFIX, Database, HistoryError, OtherFileError, Row
from vllm_specrollout.history.folder import Lock, is_locked
from vllm_specrollout.history.mirrors import ARCHIVE, MIRROR
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class FileReport:
    """What one file holds."""

    path: str
    # of its writer; empty: not known
    model: str
    # None: not known
    vocab_size: int | None
    # the training run; empty: not known
    run: str
    is_being_written: bool
    answers: int
    rewards: int
    """Of answers that have one."""
    problems: int
    # None: no answers
    first_epoch: int | None
    last_epoch: int | None
    tokens: int
    file_bytes: int
    damaged: int
    """Answers that cannot be read."""
    integrity: str
    """`ok`, or what of the database is damaged."""
    bytes_per_token: float | None
    """Of the whole file, all its records included."""


def find(paths: Iterable[Path]) -> list[Path]:
    """The history files that are named, or lie in the folders that are.

    Raises:
        HistoryError: a path does not exist, or a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise HistoryError(f"`{path}` does not exist", "name a history file, or the directory in `history.dir`")
        inside = db.files(path) if path.is_dir() else [path]
        if not inside and is_archive(path):
            raise HistoryError(
                f"`{path}` is an archive without answers yet", "run an engine whose `history.url` names it"
            )
        if not inside:
            raise HistoryError(
                f"`{path}` has no history files (*{SUFFIX})",
                "name the directory in `history.dir`, or run a rollout first",
            )
        found += inside
    return list(dict.fromkeys(found))


def is_archive(folder: Path) -> bool:
    """Whether `specrollout history serve` keeps answers of other nodes there."""
    return (folder / f"{ARCHIVE}.lock").exists() or any(MIRROR.fullmatch(path.stem) for path in db.files(folder))


def inspect(path: Path) -> FileReport:
    """Read a whole file, whether it is being written or not. Tokens are decoded, so that nothing is taken on trust."""
    database = _opened(path)
    answers, damaged, integrity = list[tuple[str, int, int, bool]](), 0, database.integrity()
    try:
        for row in database.rows():
            try:
                answer = db.answer_of(row)
            except ValueError:
                damaged += 1
                continue
            answers.append((answer.problem_id, answer.epoch, len(answer.token_ids), answer.reward is not None))
    except sqlite3.Error as error:
        integrity = str(error)
    vocabulary, tokens, file_bytes = database.vocabulary, sum(count for _, _, count, _ in answers), db.size_of(path)
    return FileReport(
        path=str(path),
        model=vocabulary.model,
        vocab_size=None if vocabulary == ANY_VOCABULARY else vocabulary.size,
        run=database.run,
        is_being_written=is_locked(path),
        answers=len(answers),
        rewards=sum(has_reward for *_, has_reward in answers),
        problems=len({problem for problem, *_ in answers}),
        first_epoch=min((epoch for _, epoch, *_ in answers), default=None),
        last_epoch=max((epoch for _, epoch, *_ in answers), default=None),
        tokens=tokens,
        file_bytes=file_bytes,
        damaged=damaged,
        integrity=integrity,
        bytes_per_token=file_bytes / tokens if tokens else None,
    )


def _opened(path: Path) -> Database:
    try:
        return Database(path)
    except FileNotFoundError:
        raise HistoryError(f"`{path}` has no history in it yet", "ask again, or remove it") from None


def merge(sources: list[Path], into: Path) -> int:
    """Write the answers of all files into a new one, those that are there twice once; returns how many.

    Raises:
        HistoryError: the new file exists, a source cannot be read, or they are in several vocabularies.
        OSError: it cannot be written; then it is not there.
    """
    if into.exists():
        raise HistoryError(f"`{into}` exists already", "name a file that does not exist, or remove this one first")
    if into.suffix != SUFFIX:
        raise HistoryError(f"`{into}` does not end in `{SUFFIX}`, so no engine would read it", f"name it *{SUFFIX}")
    # before anything is made: a source may turn out to be unreadable
    opened = [_opened(source) for source in sources]
    vocabulary = _common_vocabulary(opened)
    make_folder(into.parent)
    unfinished = into.with_name(into.name + ".merging")
    db.remove(unfinished)
    seen = set[tuple[bytes, bytes, int, int, bytes]]()
    try:
        # epochs of several runs are no one's
        runs = {one.run for one in opened}
        with closing(Database(unfinished, True, vocabulary, runs.pop() if len(runs) == 1 else "")) as target:
            new = (row for one in opened for row in one.rows() if _is_new(row, seen))
            while few := list(itertools.islice(new, _AT_ONCE)):
                target.write(few, (), None)
            target.write((), (), max(one.latest_epoch() for one in opened))
        os.rename(unfinished, into)
    except BaseException:
        db.remove(unfinished)
        raise
    return len(seen)


def _is_new(row: Row, seen: set[tuple[bytes, bytes, int, int, bytes]]) -> bool:
    try:
        db.answer_of(row)
    except ValueError:
        return False
    key = (row.problem, row.request, row.epoch, row.num_tokens, row.tokens[-64:])
    is_new = key not in seen
    seen.add(key)
    return is_new


def _common_vocabulary(sources: list[Database]) -> Vocabulary:
    """That of all files; not known if one of them does not say."""
    first = sources[0]
    for source in sources:
        if not source.vocabulary.fits(first.vocabulary):
            raise HistoryError(
                f"`{source.path}` is in the vocabulary of `{source.vocabulary.model}`,"
                f" and `{first.path}` in that of `{first.vocabulary.model}`",
                "merge the files of each model apart",
            )
    known = [source.vocabulary for source in sources]
    return ANY_VOCABULARY if ANY_VOCABULARY in known else first.vocabulary


def trim(paths: list[Path], epochs: int) -> dict[Path, tuple[int, int]]:
    """Keep the last `epochs` epochs of each run's files; returns each file's answers before and after.

    Raises:
        LockedError: one of the files is being written; then none is changed.
    """
    with ExitStack() as held:
        for path in paths:
            held.callback(Lock(path).release)
        opened = [(path, held.enter_context(closing(_opened(path)))) for path in paths]
        newest = dict[str, int]()
        for _, one in opened:
            newest[one.run] = max([newest.get(one.run, 0), *(place.epoch for place in one.places(None, 0, 1))])
        changed = {}
        for path, one in opened:
            oldest = newest[one.run] - epochs + 1
            before, after = one.counts(0).answers, one.counts(oldest).answers
            changed[path] = before, after
            if after < before:
                with closing(Database(path, writes=True)) as written:
                    written.drop_before(oldest)
                    written.compact()
        return changed


def clear(paths: list[Path]) -> int:
    """Remove the files; returns how many bytes that frees.

    Raises:
        LockedError: one of the files is being written; then none is removed.
        HistoryError: one of them is no history file, whatever it is called; likewise.
    """
    with ExitStack() as held:
        for path in paths:
            held.callback(Lock(path).release)
            try:
                Database(path).close()
            except FileNotFoundError:
                pass
            except OtherFileError as error:
                raise HistoryError(error.cause + ", so it stays", "remove it by hand, if at all") from None
            except HistoryError:
                pass  # damaged, or of a later version
        freed = sum(db.size_of(path) for path in paths)
        for path in paths:
            db.remove(path)
    return freed
