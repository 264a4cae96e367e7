"""The oracle: a drafter of recorded answers, right with a set probability; an engine gets it by its qualified name.

It knows the answers, so it measures what an engine makes of drafts of a given quality, at almost no drafting time.

May enter: the carriers, `trees.build`, numpy. May not: torch, vLLM, clocks, global randomness.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from vllm_specrollout.config.checks import FILE, Range
from vllm_specrollout.drafters.base import BaseDrafter, Place
from vllm_specrollout.trees.batch import proposed
from vllm_specrollout.trees.build import depths, order
from vllm_specrollout.types import ROOT, DraftLimits, DraftTree, IntArray, RequestBatch, RequestView, TreeBatch

ORACLE = "vllm_specrollout.bench.runner.oracle:OracleDrafter"
"""The name that a configuration gives it."""
Accuracy = tuple[Annotated[float, Range(0.0, 1.0, "give probabilities, for example [0.6, 0.2]")], ...]
"""Probability that the true token is the draft of rank 1, of rank 2, ...; more than one rank makes a tree."""
_INT32_MAX = 2**31 - 1
# odd constants of the counter-based generator (Steele et al., SplitMix64)
_POSITION_STEP = np.uint64(0x9E3779B97F4A7C15)
_DEPTH_STEP = np.uint64(0xD1B54A32D192ED03)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class _Form:
    """What all trees of the same bounds have in common: everything but the tokens."""

    # [N]
    parents: IntArray
    log_q: npt.NDArray[np.float32]
    # [N] node -> its rank among the drafts for its place, from 0
    rank: IntArray
    # [N] node -> its depth, from 0
    depth: IntArray
    # (parent, rank) -> node
    child: dict[tuple[int, int], int]


_NOTHING: IntArray = np.zeros(0, dtype=np.int32)
_EMPTY = _Form(_NOTHING, _NOTHING.astype(np.float32), _NOTHING, _NOTHING, {})


@dataclass(frozen=True, slots=True)
class _Recording:
    """One request's answer, and where its random numbers start."""

    token_ids: IntArray
    stream: np.uint64


class OracleDrafter(BaseDrafter):
    """Drafts the recorded answer at each place as rank r with probability `accuracy[r]`, among decoys.

    Where the true token is not among the drafts, and below a decoy, all is decoys. The draws depend on the seed, the
    request's key, the position and the depth alone: every rank and every run draws the same.

    Args:
        place: where it is in its engine.
        path: JSON file of each request's answer: key (its `problem_id`, or its id where it has none) -> tokens. Others
            go without drafts.
        accuracy: sums to 1 at most.
        seed: of the decoys, and of the ranks drawn.
    """

    name = "oracle"

    def __init__(self, place: Place, *, path: Annotated[str, FILE], accuracy: Accuracy = (1.0,), seed: int = 0) -> None:
        self._place, self._seed = place, seed
        self.replay(path, accuracy)

    def replay(self, path: str, accuracy: Sequence[float], position: int | None = None) -> None:
        """Other answers and another accuracy from now on.

        Args:
            path, accuracy: as at first.
            position: output tokens of each request after which nothing is right; None: never.
        """
        answers: dict[str, list[int]] = json.loads(Path(path).read_text(encoding="utf-8"))
        # accuracy before the position and behind it
        self._position, self._accuracy = position, (tuple(accuracy), (0.0,))
        self._up_to_rank = [np.cumsum(np.asarray(own, dtype=np.float64)) for own in self._accuracy]
        self._recordings = {key: self._record(key, token_ids) for key, token_ids in answers.items()}
        largest = max((max(token_ids, default=0) for token_ids in answers.values()), default=0)
        # decoys differ from the true token and from each other, so there must be one token more than ranks
        self._decoys_of = max(largest, *map(len, self._accuracy)) + 1

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        bounds = zip(
            limits.wanted(self._place.source).tolist(), limits.max_depth.tolist(), limits.is_chain.tolist(), strict=True
        )
        drafts = [self._draft(view, *bound) for view, bound in zip(batch.views, bounds, strict=True)]
        node_start = np.zeros(len(drafts) + 1, dtype=np.int32)
        np.cumsum([len(tokens) for tokens, _ in drafts], out=node_start[1:])
        columns = (
            np.concatenate([_NOTHING, *(tokens for tokens, _ in drafts)]),
            np.concatenate([_NOTHING, *(form.parents for _, form in drafts)]),
            np.concatenate([_NOTHING.astype(np.float32), *(form.log_q for _, form in drafts)]),
        )
        return proposed(batch.request_ids, node_start, *columns, self._place.source)

    def _record(self, key: str, token_ids: Sequence[int]) -> _Recording:
        digest = hashlib.blake2b(f"{self._seed}:{key}".encode(), digest_size=8).digest()
        return _Recording(np.asarray(token_ids, dtype=np.int32), np.uint64(int.from_bytes(digest, "little")))

    def _draft(self, view: RequestView, max_nodes: int, max_depth: int, is_chain: bool) -> tuple[IntArray, _Form]:
        """One request's tokens [N], and the form that they are put on."""
        recording = self._recordings.get(view.problem_id or view.request_id)
        if recording is None:
            return _NOTHING, _EMPTY
        position = len(view.token_ids) - view.num_prompt_tokens
        depth = min(max_depth, len(recording.token_ids) - position)
        if depth <= 0 or max_nodes <= 0:
            return _NOTHING, _EMPTY
        phase = int(self._position is not None and position >= self._position)
        form = _form(self._accuracy[phase], max_nodes, depth, is_chain)
        return self._fill(form, recording, position, depth, phase), form

    def _fill(self, form: _Form, recording: _Recording, position: int, depth: int, phase: int) -> IntArray:
        """Put tokens on the nodes: decoys first, then the answer as far down as its ranks are drafted."""
        truth = recording.token_ids[position : position + depth]
        ranks, decoys = self._draw(recording.stream, position, depth, phase)
        # true + 1 + x mod (vocabulary - 1) is never the true token, and consecutive x are different tokens
        others = (decoys[form.depth] + form.rank) % (self._decoys_of - 1)
        token_ids = ((truth[form.depth] + 1 + others) % self._decoys_of).astype(np.int32)
        node = ROOT
        for token, rank in zip(truth.tolist(), ranks.tolist(), strict=True):
            node = form.child.get((node, rank), ROOT)
            if node == ROOT:
                break
            token_ids[node] = token
        return token_ids

    def _draw(self, stream: np.uint64, position: int, depth: int, phase: int) -> tuple[IntArray, npt.NDArray[np.int64]]:
        """Per depth: the rank that holds the true token (one past the last: none), and where the decoys start."""
        steps = np.arange(depth, dtype=np.uint64)
        x = stream + (np.uint64(position) + steps) * _POSITION_STEP + steps * _DEPTH_STEP
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        x ^= x >> np.uint64(31)
        uniform = (x >> np.uint64(32)).astype(np.float64) * 2.0**-32
        decoys = (x & np.uint64(_INT32_MAX)).astype(np.int64)
        return np.searchsorted(self._up_to_rank[phase], uniform, side="right"), decoys


@functools.lru_cache(maxsize=4096)
def _form(accuracy: tuple[float, ...], max_nodes: int, max_depth: int, is_chain: bool) -> _Form:
    """The best tree of `max_nodes` nodes when rank r holds the true token with probability accuracy[r] everywhere."""
    log_q = np.log(np.maximum(np.asarray(accuracy, dtype=np.float64), 1e-9))
    ranks = np.argsort(-log_q, kind="stable")[: 1 if is_chain else None].tolist()
    nodes: list[tuple[int, int]] = []
    # the nodes that could come next: (cumulative log_q, parent, rank)
    reach = [(float(log_q[rank]), ROOT, rank) for rank in ranks]
    depth_of = {ROOT: 0}
    while reach and len(nodes) < max_nodes:
        best = max(reach, key=lambda entry: entry[0])
        reach.remove(best)
        total, parent, rank = best
        node = len(nodes)
        nodes.append((parent, rank))
        depth_of[node] = depth_of[parent] + 1
        if depth_of[node] < max_depth:
            reach += [(total + float(log_q[below]), node, below) for below in ranks]
    rank_of = np.asarray([rank for _, rank in nodes], dtype=np.int32)
    parents = np.asarray([parent for parent, _ in nodes], dtype=np.int32)
    # float32 rounds sums differently: order() has the last word, on ranks in the place of tokens
    tree = order(DraftTree(rank_of, parents, log_q[rank_of].astype(np.float32), np.zeros_like(rank_of)))
    columns = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    child = {key: node for node, key in enumerate(columns)}
    for shared in (tree.parents, tree.log_q):
        shared.flags.writeable = False
    return _Form(tree.parents, tree.log_q, tree.token_ids, depths(tree.parents) - 1, child)
