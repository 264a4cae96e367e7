"""What `specrollout history` does: look into files, merge, trim, remove. No printing: see history_cli.py."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm_specrollout.config.places import make_folder
from vllm_specrollout.history import log
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.frames import HEADER, HistoryError, expect_history
from vllm_specrollout.history.locking import is_locked, lock
from vllm_specrollout.history.log import SUFFIX, Reader, Writer
from vllm_specrollout.history.records import AnswerHead, EpochRecord, RewardRecord, decode_record
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary


@dataclass(frozen=True, slots=True)
class FileReport:
    """What one file holds."""

    path: str
    # None: it has no header yet
    version: int | None
    # of its writer; empty: not known, as in files of version 1
    model: str
    # None: not known
    vocab_size: int | None
    is_being_written: bool
    records: int
    answers: int
    rewards: int
    """Of answers that have one."""
    problems: int
    # None: no answers
    first_epoch: int | None
    last_epoch: int | None
    tokens: int
    file_bytes: int
    missing: int
    """Records that were written and cannot be read."""
    damaged: int
    """Stretches without a good record, between good ones."""
    torn_bytes: int
    """Behind the last good record: one being written, or torn by a kill; its next writer cuts them."""

    @property
    def bytes_per_token(self) -> float | None:
        """Of the whole file, all its records included."""
        return self.file_bytes / self.tokens if self.tokens else None


def find(paths: Iterable[Path]) -> list[Path]:
    """The history files that are named, or lie in the folders that are.

    Raises:
        HistoryError: a path does not exist, or a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise HistoryError(f"`{path}` does not exist", "name a history file, or the directory in `history.dir`")
        inside = log.files(path) if path.is_dir() else [path]
        if not inside:
            raise HistoryError(
                f"`{path}` has no history files (*{SUFFIX})",
                "name the directory in `history.dir`, or run a rollout first",
            )
        found += inside
    return list(dict.fromkeys(found))


def inspect(path: Path) -> FileReport:
    """Read a whole file, whether it is being written or not. Tokens are decoded, so that nothing is taken on trust."""
    reader = Reader(path)
    num_records = num_tokens = num_undecodable = 0
    problems: set[str] = set()
    epochs: list[int] = []
    rewarded: set[int] = set()
    answers: set[int] = set()
    for frame, head in reader.records():
        num_records += 1
        if isinstance(head, AnswerHead):
            try:
                decode_record(frame.payload)
            except ValueError:
                num_undecodable += 1
                continue
            answers.add(frame.sequence)
            problems.add(head.problem_id)
            epochs.append(head.epoch)
            num_tokens += head.num_tokens
            if head.reward is not None:
                rewarded.add(frame.sequence)
        elif isinstance(head, RewardRecord):
            rewarded.add(head.sequence)
    scanner = reader.scanner()
    vocabulary = reader.vocabulary()
    size = reader.descriptor.size()
    return FileReport(
        path=str(path),
        version=reader.version,
        model=vocabulary.model,
        vocab_size=None if vocabulary == ANY_VOCABULARY else vocabulary.size,
        is_being_written=is_locked(path),
        records=num_records,
        answers=len(answers),
        rewards=len(rewarded & answers),
        problems=len(problems),
        first_epoch=min(epochs, default=None),
        last_epoch=max(epochs, default=None),
        tokens=num_tokens,
        file_bytes=size,
        missing=0 if scanner is None else scanner.missing + reader.undecodable + num_undecodable,
        damaged=0 if scanner is None else scanner.damaged,
        torn_bytes=size if scanner is None else max(0, size - max(scanner.position, HEADER.size)),
    )


def answers_of(path: Path) -> Iterator[Answer]:
    """All answers of a file that can be read, with their last rewards, in the order they were written."""
    rewards = {head.sequence: head.reward for _, head in Reader(path).records() if isinstance(head, RewardRecord)}
    for frame, head in Reader(path).records():
        if not isinstance(head, AnswerHead):
            continue
        try:
            answer = decode_record(frame.payload)
        except ValueError:
            continue
        assert isinstance(answer, Answer), "its head is an answer's"
        yield dataclasses.replace(answer, reward=rewards.get(frame.sequence, answer.reward))


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
    vocabulary = _common_vocabulary(sources)
    for source in sources:
        # before anything is made: a source may turn out to be unreadable
        for _ in Reader(source).records():
            break
    make_folder(into.parent)
    unfinished = into.with_name(into.name + ".merging")
    unfinished.unlink(missing_ok=True)
    seen: set[tuple[str, str, int, int, bytes]] = set()
    try:
        writer = Writer(unfinished, vocabulary=vocabulary)
        for source in sources:
            for answer in answers_of(source):
                tokens = answer.token_ids.tobytes()[-64:]
                key = (answer.problem_id, answer.request_id, answer.epoch, answer.num_tokens, tokens)
                if key not in seen:
                    writer.append(answer)
                seen.add(key)
        writer.sync()
        writer.close()
        os.rename(unfinished, into)
        log.sync_folder(into.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return len(seen)


def _common_vocabulary(sources: list[Path]) -> Vocabulary:
    """That of all files; not known if one of them does not say."""
    found = {source: Reader(source).vocabulary() for source in sources}
    first = next(iter(found), None)
    for source, vocabulary in found.items():
        if first is not None and not vocabulary.fits(found[first]):
            raise HistoryError(
                f"`{source}` is in the vocabulary of `{vocabulary.model}`,"
                f" and `{first}` in that of `{found[first].model}`",
                "merge the files of each model apart",
            )
    return ANY_VOCABULARY if first is None or ANY_VOCABULARY in found.values() else found[first]


def trim(paths: list[Path], epochs: int) -> dict[Path, tuple[int, int]]:
    """Keep the last `epochs` epochs of those in any of the files; returns each file's answers before and after.

    Raises:
        LockedError: one of the files is being written; then none is changed.
    """
    with ExitStack() as open_writers:
        writers: dict[Path, Writer] = {}
        for path in paths:
            writers[path] = Writer(path)
            open_writers.callback(writers[path].close, sync=False)
        found = {path: [answer.epoch for answer in answers_of(path)] for path in paths}
        latest = max(itertools.chain.from_iterable(found.values()), default=0)
        changed = {}
        for path, writer in writers.items():
            num_kept = sum(epoch > latest - epochs for epoch in found[path])
            changed[path] = (len(found[path]), num_kept)
            if num_kept < len(found[path]):
                live = (answer for answer in answers_of(path) if answer.epoch > latest - epochs)
                writer.rewrite(itertools.chain([EpochRecord(latest)], live))
        return changed


def clear(paths: list[Path]) -> int:
    """Remove the files; returns how many bytes that frees.

    Raises:
        LockedError: one of the files is being written; then none is removed.
        HistoryError: one of them is no history file, whatever it is called; likewise.
    """
    held = [lock(path) for path in paths]
    for descriptor, path in zip(held, paths, strict=True):
        expect_history(descriptor, path)
    freed = sum(descriptor.size() for descriptor in held)
    for path in paths:
        path.unlink()
    return freed
