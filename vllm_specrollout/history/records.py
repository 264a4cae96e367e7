"""What a frame's payload means: an answer, a reward that came later, an epoch's beginning, whose file it is.

Bytes in, carriers out.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import NamedTuple

from vllm_specrollout.history.answers import MOST_TAIL, Answer
from vllm_specrollout.history.tokens import count_tokens, decode_tokens, encode_tokens
from vllm_specrollout.history.vocabulary import Vocabulary
from vllm_specrollout.types import FinishReason

_STATUSES = (FinishReason.FINISHED, FinishReason.TRUNCATED, FinishReason.ABORTED)
_KIND_ANSWER, _KIND_REWARD, _KIND_EPOCH, _KIND_VOCABULARY = 1, 2, 3, 4
# kind, status, has reward, reward, epoch, weights version, bytes of: problem id, request id, prompt tail
_ANSWER = struct.Struct("<BB?dqqIII")
# kind, sequence number of the answer in this file, reward
_REWARD = struct.Struct("<BId")
# kind, epoch
_EPOCH = struct.Struct("<Bq")

REWARD_BYTES = 64
"""Of a reward's record in a file, about: its request's id included."""


@dataclass(frozen=True, slots=True)
class RewardRecord:
    """A reward that came after its answer was written."""

    # the answer's sequence number in this file: request ids may repeat, it does not
    sequence: int
    request_id: str
    reward: float


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch began."""

    epoch: int


class AnswerHead(NamedTuple):
    """An answer but for its tokens, which take longer to decode than all the rest."""

    problem_id: str
    request_id: str
    epoch: int
    weights_version: int
    status: FinishReason
    reward: float | None
    num_tokens: int
    # bytes of the payload where the prompt's tail starts, and where the tokens do
    tail_start: int
    tokens_start: int


Record = Answer | RewardRecord | EpochRecord | Vocabulary
RecordHead = AnswerHead | RewardRecord | EpochRecord | Vocabulary


def encode_record(record: Record) -> bytes:
    if isinstance(record, RewardRecord):
        return _REWARD.pack(_KIND_REWARD, record.sequence, record.reward) + _as_bytes(record.request_id)
    if isinstance(record, EpochRecord):
        return _EPOCH.pack(_KIND_EPOCH, record.epoch)
    if isinstance(record, Vocabulary):
        return bytes([_KIND_VOCABULARY]) + json.dumps(asdict(record)).encode()
    problem, request = _as_bytes(record.problem_id), _as_bytes(record.request_id)
    tail = encode_tokens(record.prompt_tail)
    start = _ANSWER.pack(
        _KIND_ANSWER,
        _STATUSES.index(record.status),
        record.reward is not None,
        record.reward or 0.0,
        record.epoch,
        record.weights_version,
        len(problem),
        len(request),
        len(tail),
    )
    return b"".join((start, problem, request, tail, encode_tokens(record.token_ids)))


def with_reward(payload: bytes, reward: float | None) -> bytes:
    """An answer's payload with another reward, the rest untouched."""
    start = _ANSWER.unpack_from(payload)
    return _ANSWER.pack(*start[:2], reward is not None, reward or 0.0, *start[4:]) + payload[_ANSWER.size :]


def decode_head(payload: bytes) -> RecordHead:
    """The record, without an answer's tokens.

    Raises:
        ValueError: the bytes are no record, although their checksum is right.
    """
    try:
        if payload[:1] == bytes([_KIND_REWARD]):
            _, sequence, reward = _REWARD.unpack_from(payload)
            return RewardRecord(sequence, _as_text(payload[_REWARD.size :]), reward)
        if payload[:1] == bytes([_KIND_EPOCH]):
            return EpochRecord(_EPOCH.unpack(payload)[1])
        if payload[:1] == bytes([_KIND_VOCABULARY]):
            return _decode_vocabulary(payload[1:])
        kind, status, has_reward, reward, epoch, version, *lengths = _ANSWER.unpack_from(payload)
    except struct.error as error:
        raise ValueError(str(error)) from None
    problem, request, tail = (sum(lengths[:count]) + _ANSWER.size for count in (1, 2, 3))
    if kind != _KIND_ANSWER or status >= len(_STATUSES) or tail > len(payload):
        raise ValueError(f"a record of kind {kind} with parts of {lengths} bytes in {len(payload)}")
    if (count := count_tokens(payload[request : min(tail, request + 8)])) > MOST_TAIL:
        # what is not counted anywhere is to be small
        raise ValueError(f"{count} tokens of a prompt, above the {MOST_TAIL} that are kept of one")
    return AnswerHead(
        problem_id=_as_text(payload[_ANSWER.size : problem]),
        request_id=_as_text(payload[problem:request]),
        epoch=epoch,
        weights_version=version,
        status=_STATUSES[status],
        reward=reward if has_reward else None,
        num_tokens=count_tokens(payload[tail : tail + 8]),
        tail_start=request,
        tokens_start=tail,
    )


def decode_record(payload: bytes) -> Record:
    """The whole record.

    Raises:
        ValueError: the bytes are no record, although their checksum is right.
    """
    head = decode_head(payload)
    if not isinstance(head, AnswerHead):
        return head
    return Answer(
        problem_id=head.problem_id,
        request_id=head.request_id,
        epoch=head.epoch,
        weights_version=head.weights_version,
        status=head.status,
        token_ids=decode_tokens(payload[head.tokens_start :]),
        prompt_tail=decode_tokens(payload[head.tail_start : head.tokens_start]),
        reward=head.reward,
    )


def _decode_vocabulary(data: bytes) -> Vocabulary:
    try:
        found = Vocabulary(**json.loads(data))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a vocabulary without its parts: {error}") from None
    if not (isinstance(found.model, str) and isinstance(found.digest, str) and type(found.size) is int):
        raise ValueError(f"a vocabulary with parts of other types: {found}")
    return found


# ids come from users' JSON, which can hold half a surrogate pair
def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
