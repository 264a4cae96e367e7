"""The C++ core: numpy in, numpy out. `csrc/core` says what each function means; R requests, N nodes, K rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int32]
_Longs = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]
_Columns = tuple[_Ints, _Ints, _Ints, _Floats, _Ints]

class HistoryIndex:
    """Index over the answers to one problem. One caller at a time."""

    def __init__(self, *, min_match: int, max_match: int, max_matches: int) -> None: ...
    def set_prompt(self, token_ids: _Ints) -> None: ...
    def add(self, token_ids: _Ints, weight: int, epoch: int) -> int: ...
    def open(self, epoch: int, weight: int = ...) -> int: ...
    def append(self, doc: int, token_ids: _Ints) -> None: ...
    def sync(self, doc: int, token_ids: _Ints) -> bool: ...
    def set_weight(self, doc: int, weight: int) -> None: ...
    def remove(self, doc: int) -> None: ...
    def retire(self, before_epoch: int) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def check_integrity(self) -> None: ...

def sync_history(
    indices: Sequence[HistoryIndex], docs: Sequence[int], texts: list[_Ints], begins: Sequence[int]
) -> None:
    """Bring one document of each index up to its text [tokens] from `begins` on, as `sync` does; all in one call."""

def propose_history(
    indices: Sequence[HistoryIndex | None],
    docs: Sequence[int] | _Ints,
    max_nodes: Sequence[int] | _Ints,
    max_depth: Sequence[int] | _Ints,
    is_chain: Sequence[bool] | _Bools,
    siblings: bool = True,
    end_start: _Ints | None = None,
    end_ids: _Ints | None = None,
) -> tuple[_Ints, _Ints, _Ints, _Floats]:
    """node_start [R + 1], token_ids, parents, log_q [N]; docs [R]: each request's own document. No node has one of its
    request's end tokens, laid out as in `RequestBatch`."""

def open_nodes(node_start: _Ints, parents: _Ints, tokens: _Ints, end_start: _Ints, end_ids: _Ints) -> _Bools:
    """[N] whether no node from the root down to each one has an end token of its request."""

def depths(node_start: _Ints, parents: _Ints, num_requests: int) -> _Ints:
    """[N] depth of each node, 1 below the root. Raises ValueError: no trees."""

def check_batch(
    node_start: _Ints,
    token_ids: _Ints,
    parents: _Ints,
    log_q: _Floats,
    source: _Ints,
    num_requests: int,
    vocab_size: int,
) -> None:
    """Raises ValueError with the first fault: wrong dtypes or lengths, order of parents, tokens, probabilities."""

def merge_select(
    proposals: Sequence[_Columns],
    max_nodes: _Ints,
    max_depth: _Ints,
    is_chain: _Bools,
    calibration: _Doubles | None,
    width: int,
    prices: tuple[float, _Doubles, float, float] | None,
    least_nodes: int,
) -> tuple[_Ints, _Ints, _Ints, _Floats, _Ints, _Ints, _Floats, _Ints, float, float, int]:
    """node_start, token_ids, parents, log_q, source, depth, reach, num_proposed, ms, gain, best: see trees/merge.py."""

def tally(
    node_start: _Ints, parents: _Ints, log_q: _Floats, source: _Ints, num_accepted: _Ints, accepted: _Ints
) -> tuple[_Doubles, _Longs, _Longs]:
    """[3, SOURCES, TENTHS] nodes reached, their expected and accepted number; [SOURCES] verified, and accepted."""

def walk(node_start: _Ints, parents: _Ints, tokens: _Ints, sampled: _Longs) -> tuple[_Ints, _Longs, _Ints, _Ints]:
    """Exact match: output [R, W] padded with -1, its rows [R, W], num_accepted [R], accepted [sum].

    sampled: [R + N] the target's token after each root and each node, request by request.
    """

def follow(node_start: _Ints, parents: _Ints, tokens: _Ints, output: _Ints, counts: _Ints) -> tuple[_Ints, _Ints]:
    """Nodes that a walk along output [R, W] passes, of which counts [R] tokens count: num_accepted [R], accepted."""

def expand_paths(
    row_start: _Ints,
    base: _Ints,
    node_start: _Ints,
    parents: _Ints,
    block_table: _Ints,
    block_size: int,
    scratch: _Ints,
    zero_block: int,
) -> dict[str, Any]:
    """A batch laid out as root-to-leaf paths: arrays by name, as csrc/core/layout.h has them."""

def row_layout(node_start: _Ints, depth: _Ints) -> tuple[_Ints, _Ints]:
    """[R + N] request and depth of every logits row: a root's (depth 0), then its nodes', request after request."""

def by_depth(lists: Sequence[_Longs | None], node_start: _Ints, row_depth: _Ints) -> _Longs:
    """[R + N] the entry at each row's depth of its request's list; 0 where there is None. Raises: a list too short."""

def without_scratch(node_start: _Ints, parents: _Ints, roots: _Ints, block_size: int, num_scratch: int) -> _Bools:
    """[R] whether a tree must do without its branches for want of scratch blocks; roots [R]: positions of the roots."""

def copy_blocks(bases: npt.NDArray[np.uint64], strides: _Longs, copy_from: _Longs, copy_to: _Longs) -> None:
    """Copy whole KV blocks, in each of the caches at `bases`, a block being `strides` bytes."""

class Received:
    """Draft trees of the requests that one drafter elsewhere follows, the newest of each. One caller at a time.

    What came out of another process is looked at before it is used: `put` raises ValueError, and nothing of it is kept.
    """

    def open(self, handle: int, num_told: int) -> None:
        """Follow a request, of which the drafter was told so many tokens."""

    def close(self, handle: int) -> tuple[int, int, int]:
        """As `score`; the request is followed no more."""

    def score(self, handle: int) -> tuple[int, int, int]:
        """Positions for which something was drafted; at which the first choice, and any, was the target's token."""

    def put(
        self,
        handles: bytes,
        positions: bytes,
        node_start: bytes,
        token_ids: bytes,
        parents: bytes,
        ranks: bytes,
        log_q: bytes,
        vocab_size: int,
    ) -> int:
        """Trees as `cluster.messages.Drafted` has them. Returns how many of their requests are followed."""

    def fit(
        self,
        handles: _Longs,
        texts: Sequence[_Ints],
        most_nodes: _Ints,
        most_depth: _Ints,
        is_chain: _Bools,
    ) -> tuple[_Ints, _Ints, _Ints, _Floats, _Ints]:
        """What may be verified next: (node_start [R + 1], token_ids, parents, log_q, is_first). Handle 0: no request.

        texts [R]: tokens of each request so far.
        """

    def tell(self, handles: _Longs, texts: Sequence[_Ints]) -> tuple[_Ints, bytes, bytes, bytes]:
        """Tokens that the drafter was not told of, and now is.

        Returns: index [n] of the requests; and as `cluster.messages.Told` has them, their handles, counts and tokens.
        """
