"""Vocabulary in which an engine's answers are written: what a token id means. No files, no indices.

Ids of one vocabulary are noise in another, and those beyond its end would be read from outside the model's embeddings.
So every history file names the vocabulary of its writer, and answers are looked at again where they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specrollout.errors import logger
from vllm_specrollout.types import Answer, IntArray

ANY_TOKEN = 1 << 31
"""Size of a vocabulary that holds every token id."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of one model."""

    # the model's name or path, for people to read: checkpoints of one run have many
    model: str = ""
    # token ids are below it
    size: int = ANY_TOKEN
    # of all tokens' texts and ids; empty: not known
    digest: str = ""

    def fits(self, other: Vocabulary) -> bool:
        """Whether the other's token ids mean the same here, as far as is known.

        Embeddings may be padded, so sizes decide only where nothing better is known.
        """
        if self.digest and other.digest:
            return self.digest == other.digest
        return ANY_TOKEN in (self.size, other.size) or self.size == other.size

    def holds(self, token_ids: IntArray) -> bool:
        """Whether all of these are token ids here."""
        return not token_ids.size or bool(token_ids.min() >= 0 and token_ids.max() < self.size)


ANY_VOCABULARY = Vocabulary()
"""Of who does not know: every id is one."""


class Filter:
    """Lets answers pass that the model could have given; says once that there are others."""

    def __init__(self, vocabulary: Vocabulary, where: str) -> None:
        self._vocabulary = vocabulary
        self._where = where
        self.refused = 0
        """Times that an answer did not pass."""

    def passes(self, answer: Answer) -> bool:
        if self._vocabulary.holds(answer.token_ids) and self._vocabulary.holds(answer.prompt_ids):
            return True
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "answers with tokens outside the model's vocabulary of %d are not used, as that of request `%s`;"
                " was `%s` used with another model?",
                self._vocabulary.size,
                answer.request_id,
                self._where,
            )
        return False
