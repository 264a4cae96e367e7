"""An answer as a row of a database (database.py), and what is asked of such rows. Pure."""

from __future__ import annotations

from typing import NamedTuple

from vllm_specrollout.history.answers import MOST_TAIL
from vllm_specrollout.history.tokens import count_tokens, decode_tokens, encode_tokens
from vllm_specrollout.types import Answer, FinishReason

_STATUSES = (FinishReason.FINISHED, FinishReason.TRUNCATED, FinishReason.ABORTED)


class Row(NamedTuple):
    """An answer as it is at rest. Ids are bytes: users' JSON can hold half a surrogate pair."""

    problem: bytes
    request: bytes
    epoch: int
    version: int
    status: int
    reward: float | None
    num_tokens: int
    # as `encode_tokens` makes them
    tail: bytes
    tokens: bytes


class Reward(NamedTuple):
    """Of an answer that is at rest."""

    reward: float
    number: int
    request: bytes


class AnswerCounts(NamedTuple):
    answers: int
    tokens: int
    problems: int


def row_of(answer: Answer) -> Row:
    """Raises: ValueError, it is longer than an answer may be, or its weights have no version."""
    if not -(1 << 63) <= answer.weights_version < 1 << 63:
        raise ValueError(f"{answer.weights_version} is no version of weights")
    ids = as_bytes(answer.problem_id), as_bytes(answer.request_id)
    status, tail = _STATUSES.index(answer.status), encode_tokens(answer.prompt_ids)
    tokens = encode_tokens(answer.token_ids)
    return Row(*ids, answer.epoch, answer.weights_version, status, answer.reward, len(answer.token_ids), tail, tokens)


def answer_of(row: Row) -> Answer:
    """Raises: ValueError, it is damaged, and no more than its count was allocated."""
    try:
        if count_tokens(row.tokens[:8]) != row.num_tokens or count_tokens(row.tail[:8]) > MOST_TAIL or row.status < 0:
            raise ValueError("its counts are not those of its tokens")
        return Answer(
            problem_id=as_text(row.problem),
            request_id=as_text(row.request),
            epoch=int(row.epoch),
            weights_version=int(row.version),
            status=_STATUSES[row.status],
            token_ids=decode_tokens(row.tokens),
            prompt_ids=decode_tokens(row.tail),
            reward=None if row.reward is None else float(row.reward),
        )
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"a column of another type: {error}") from None


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
