"""A target without a model, and a KV cache without memory, in which every misplaced token or block shows in the answer.

What belongs here: what a token follows from. The state behind a token is a hash of all tokens before it, and lies in a
slot of the KV cache; whoever reads another request's slot, or one that was never written, goes on with other tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VOCAB = 64
_MASK = (1 << 64) - 1


def extend(state: int, token: int) -> int:
    """The state behind one more token."""
    return (state * 6_364_136_223_846_793_005 + (token + 1) * 1_442_695_040_888_963_407) & _MASK


def state_of(tokens: Iterable[int]) -> int:
    state = 0
    for token in tokens:
        state = extend(state, token)
    return state


def following(state: int, weights: int, salt: int, parity: int | None = None) -> int:
    """The next token.

    Args:
        state: of all tokens before it.
        weights: which ones.
        salt: the request's seed, as it were.
        parity: what a grammar allows: even tokens (0), odd ones (1); None: all.
    """
    token = ((extend(extend(state, weights), salt) >> 17) * VOCAB >> 47) % VOCAB
    return token if parity is None else token - token % 2 + parity


@dataclass(frozen=True)
class Prompted:
    """What decides an answer beside the weights."""

    prompt: tuple[int, ...]
    salt: int
    has_grammar: bool

    def parity(self, position: int) -> int | None:
        """What the grammar allows at this place of the answer."""
        return position % 2 if self.has_grammar else None

    def go_on(self, answer: Sequence[int], count: int, weights: int) -> list[int]:
        """The next tokens behind this much of an answer, as plain decoding gives them."""
        state, found = state_of([*self.prompt, *answer]), []
        for position in range(len(answer), len(answer) + count):
            found.append(following(state, weights, self.salt, self.parity(position)))
            state = extend(state, found[-1])
        return found


class Cache:
    """A KV cache of states, one per slot."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._slots: dict[int, int] = {}

    def read(self, blocks: Sequence[int], position: int) -> int:
        """The state behind the token at this position; nonsense where none was written."""
        return 0 if position < 0 else self._slots.get(self._slot(blocks, position), 0xBAD)

    def write(self, blocks: Sequence[int], position: int, state: int) -> None:
        self._slots[self._slot(blocks, position)] = state

    def lose(self) -> None:
        """As the memory of a sleeping engine: all is gone."""
        self._slots.clear()

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size
