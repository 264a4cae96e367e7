"""Histories of format versions 1 and 2, which were no databases: read once, and written anew. Nothing else reads them.

    header  magic 8 | version u32 | identity 16 | crc32 u32
    frame   marker 4 | length u32 | sequence u32 | crc32 of these, u32 | crc32 of the payload, u32 | payload

All little-endian; both checksums of a frame start from that of the identity. What is damaged is passed over.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from vllm_specrollout.history.database import Database, HistoryError, Row, remove
from vllm_specrollout.history.epochs import MAX_EPOCH
from vllm_specrollout.history.tokens import count_tokens
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

_MAGIC = b"SRHIST\r\n"
_HEADER = struct.Struct("<8sI16sI")
_FRAME = struct.Struct("<4sIIII")
_MARKER = b"\xf5SR\n"
_ANSWER, _REWARD, _EPOCH, _VOCABULARY = 1, 2, 3, 4
# kind, status, has reward, reward, epoch, weights version, bytes of: problem id, request id, prompt tail
_ANSWER_HEAD = struct.Struct("<BB?dqqIII")
_REWARD_HEAD = struct.Struct("<BId")
_EPOCH_HEAD = struct.Struct("<Bq")
# bytes of damaged payloads, in sizes of the file, after which a frame's own word for its length is taken
_MOST_REREAD = 4
_AT_ONCE = 200


def is_old(path: Path) -> bool:
    """Whether the file begins like one of these. Not to be asked of a database that this process has open: closing any
    descriptor of a file drops its locks."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def convert(path: Path) -> int:
    """Put a database with the file's answers in its place; returns how many. A crash leaves either of them, whole.

    Raises:
        HistoryError: an engine writes it, or its header is damaged.
        OSError, sqlite3.Error: the disk is full or gone; the file stays.
    """
    spare = path.with_name(path.name + ".new")
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            cause = f"`{path}` is being written by an engine of an earlier vllm-specrollout"
            raise HistoryError(cause, "end that engine first; nothing else is lost") from None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            remove(spare)
            try:
                count = _write(spare, data, _seed_of(path, data))
                # who made the file wider than ours are meant to share it
                os.chmod(spare, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
                os.replace(spare, path)
            except BaseException:
                remove(spare)
                raise
    return count


def _write(spare: Path, data: mmap.mmap, seed: int) -> int:
    vocabulary, epoch, rewards = ANY_VOCABULARY, 0, dict[int, float]()
    for sequence, payload in _records(data, seed):
        if payload[0] == _REWARD and len(payload) >= _REWARD_HEAD.size:
            _, of, reward = _REWARD_HEAD.unpack_from(payload)
            rewards[of] = reward
        elif payload[0] == _EPOCH and len(payload) == _EPOCH_HEAD.size:
            begun = _EPOCH_HEAD.unpack(payload)[1]
            epoch = max(epoch, begun) if begun <= MAX_EPOCH else epoch
        elif payload[0] == _VOCABULARY and sequence == 0:
            vocabulary = _vocabulary_of(payload)
    database = Database(spare, writes=True, vocabulary=vocabulary)
    seen, waiting = set[int](), list[Row]()
    for sequence, payload in _records(data, seed):
        if payload[0] == _ANSWER and sequence not in seen and (row := _row_of(payload)) is not None:
            seen.add(sequence)
            waiting.append(row._replace(reward=rewards.get(sequence, row.reward)))
        if len(waiting) == _AT_ONCE:
            database.write(waiting, (), None)
            waiting = []
    database.write(waiting, (), epoch)
    database.close()
    return len(seen)


def _seed_of(path: Path, data: mmap.mmap) -> int:
    head = data[: _HEADER.size]
    if len(head) < _HEADER.size or struct.unpack("<I", head[-4:])[0] != zlib.crc32(head[:-4]):
        raise HistoryError(f"the header of `{path}` is damaged, so none of its records can be trusted", "remove it")
    _, version, identity, _ = _HEADER.unpack(head)
    if version not in (1, 2):
        cause = f"`{path}` has format version {version}, and no vllm-specrollout known here writes that"
        raise HistoryError(cause, "run the vllm-specrollout that wrote it, or move the file out of the directory")
    return zlib.crc32(identity)


def _records(data: mmap.mmap, seed: int) -> Iterator[tuple[int, bytes]]:
    """Sequence number and payload of each record with right checksums."""
    offset, spare = data.find(_MARKER, _HEADER.size), _MOST_REREAD * len(data)
    while 0 <= offset <= len(data) - _FRAME.size:
        _, length, sequence, own, checksum = _FRAME.unpack_from(data, offset)
        start, step = offset + _FRAME.size, 1
        if start + length <= len(data) and zlib.crc32(data[offset : offset + 12], seed) == own:
            payload = data[start : start + length]
            if length and zlib.crc32(payload, own) == checksum:
                yield sequence, payload
                step = _FRAME.size + length
            else:
                # not past the claimed length, as a piece may be missing; but not the same bytes again and again
                spare -= length
                step = 1 if spare >= 0 else _FRAME.size + length
        offset = data.find(_MARKER, offset + step)


def _row_of(payload: bytes) -> Row | None:
    """None: right checksums, and no answer all the same."""
    try:
        _, status, has_reward, reward, epoch, version, *lengths = _ANSWER_HEAD.unpack_from(payload)
        problem, request, tail = (sum(lengths[:count]) + _ANSWER_HEAD.size for count in (1, 2, 3))
        if tail > len(payload) or not 0 <= epoch <= MAX_EPOCH:
            return None
        count = count_tokens(payload[tail : tail + 8])
    except (struct.error, ValueError):
        return None
    ids = payload[_ANSWER_HEAD.size : problem], payload[problem:request]
    own = reward if has_reward else None
    return Row(*ids, epoch, version, status, own, count, payload[request:tail], payload[tail:])


def _vocabulary_of(payload: bytes) -> Vocabulary:
    try:
        found = Vocabulary(**json.loads(payload[1:]))
    except (TypeError, ValueError, RecursionError):
        return ANY_VOCABULARY
    is_one = isinstance(found.model, str) and isinstance(found.digest, str) and type(found.size) is int
    return found if is_one else ANY_VOCABULARY
