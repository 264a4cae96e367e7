"""What a cache keeps per problem, and what it needs of an index. Carriers and a Protocol only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from vllm_specrollout.types import IntArray


class Index(Protocol):
    """What the cache needs of an index; the drafter needs more."""

    @property
    def nbytes(self) -> int: ...

    def set_prompt(self, token_ids: IntArray) -> None:
        """The prompt of the answers added from now on; cheap for one that the index has."""

    def add(self, token_ids: IntArray, weight: int, epoch: int) -> int:
        """Add a whole answer; returns its document's number."""

    def set_weight(self, document: int, weight: int) -> None: ...

    def remove(self, document: int) -> None: ...


IndexType = TypeVar("IndexType", bound=Index)


@dataclass(slots=True)
class Document:
    """An answer in an index."""

    number: int
    epoch: int
    reward: float | None


@dataclass(slots=True)
class Entry(Generic[IndexType]):
    """A problem's index, or the place for it."""

    # None: being built
    index: IndexType | None = None
    # requests that run now
    running: int = 0
    # of the index, as last seen, with the room made for its next answer
    num_bytes: int = 0
    # of this engine's and, once built from the store, of all answers: by request; the latest, where ids repeat
    documents: dict[str, Document] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexCacheStats:
    """What a cache holds, and what it went through."""

    indices: int
    building: int
    num_bytes: int
    built: int
    build_seconds: float
    dropped: int
    """Indices dropped for memory."""
    shortened: int
    """Indices built without their oldest answers, for memory."""
    given_up: int
    """Builds that came to nothing: no room, an error, or the requests were over before."""
