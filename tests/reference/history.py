"""What a history draft is: the specification of the C++ index, written to be read, not to be fast.

The text of a problem is its prompts and answers. A place is any token of it; its context is what stands before it in
its own text, where an answer's text begins with its prompt. A request asks which places have a context that ends like
its own:

- The contexts looked up have up to three lengths: `max_match`, `min_match`, and one between where they are far apart.
  Longest first, the newest `max_matches` places with that context are looked at, newest in the order of writing. A
  shorter length is asked only if the longer ones gave fewer than `ENOUGH` places (or `max_matches`, if that is less).
- A place counts with the weight of its document, and not at all if that is 0, or if it is a sibling's and siblings are
  not asked. The request's own text, the prompts and everybody else's answers count alike.
- Of each place it is known how many tokens of context it shares, up to `REACH` or so, and places fall into classes.

What followed the places makes a trie. At each of its nodes the classes in turn, longest context first, share out the
probability that the longer ones left over (1 at first). Where a class has K places that go on with D different tokens,
it leaves over

    doubt * D^2 / (K + doubt * D^2)

and gives the rest to the tokens in proportion to weight. So one place proves little, many that agree a lot, many that
disagree less, and shorter contexts speak where longer ones are unsure. On the way down a node's context grows by two
tokens per drafted token: where a draft has been right so far, its place is a better one than a fresh one with the same
context, since most drafts begin where the last one failed. A place whose document ends there counts neither for nor
against what would come next.

All of it is integer arithmetic: the C++ twin and every tensor-parallel rank get the same bits. The nodes come best
first (trees/build.py), in a chain the best child of the best child and so on.

May enter: the carriers, `trees.build`. May not: the C++ module, torch, vLLM.
Source: RhymeRL, sections 5.2 and 5.3 (prefixes of 7 to 3 tokens; branches weighted by reward); the blending is ours.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_specrollout.config.drafters import MAX_MATCHES, HistoryConfig, NgramConfig
from vllm_specrollout.trees.build import order, select
from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree

ONE = 1 << 24
"""Fixed-point probability 1."""

WEIGHT_ONE = 1 << 8
"""Fixed-point weight 1."""
REACH = 33
"""Contexts are compared this far back, or `max_match` if that is more. The classes tell no longer ones apart."""
SYNC_WINDOW = 64
ENOUGH = 8
"""Asking on after 8 places found added 0.2 % to the tokens accepted, and doubled the time."""

DOUBT = (16, 12, 9, 9, 10, 13, 16, 11, 8, 6, 3, 2)
"""Class of context -> doubt in 1/16.

Fitted by likelihood on the first 32 recorded problems (bench/index/recorded.json.gz) in one epoch, then evened out by
hand; tested on the other 32 problems in the next epoch: predicted and observed acceptance differ by at most 0.05 in
every tenth. What else was tried, and the figures, are in docs/adr/0008-history-index.md.
"""


def context_class(num_tokens: int) -> int:
    """1 to 8 tokens have a class each; then 9-12, 13-16, 17-32, more."""
    return bisect.bisect_left((*range(1, 9), 12, 16, 32), num_tokens)


def context_lengths(min_match: int, max_match: int) -> list[int]:
    """The lengths looked up, shortest first; the one between is the geometric mean, rounded up."""
    between = [math.isqrt(min_match * max_match - 1) + 1] if max_match > 3 * min_match else []
    return sorted({min_match, *between, max_match})


@dataclass
class Document:
    """An answer, or a prompt (epoch None)."""

    epoch: int | None
    weight: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    # [tokens] when each was written, counted over the whole index
    written: list[int] = field(default_factory=list)


class Match(NamedTuple):
    """A place, by what it is worth."""

    shared: int
    weight: int
    # what followed, from the place on
    continuation: list[int]


class NaiveHistory:
    """One problem's text, with the interface of `_core.HistoryIndex`."""

    def __init__(self, config: HistoryConfig | NgramConfig, max_matches: int = MAX_MATCHES) -> None:
        self._config, self._max_matches = config, max_matches
        self.documents: dict[int, Document] = {}
        self._prompts: dict[tuple[int, ...], Document] = {}
        self._prompt: tuple[int, ...] = ()
        self._next_doc = 0
        self._clock = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(document.tokens) for document in self._all())

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    def set_prompt(self, token_ids: Sequence[int]) -> None:
        """The prompt of the documents added from now on."""
        self._prompt = tuple(token_ids)
        if self._prompt and self._prompt not in self._prompts:
            self._prompts[self._prompt] = Document(None, WEIGHT_ONE, ())
            self._write(self._prompts[self._prompt], token_ids)
        self._drop_prompts()

    def add(self, token_ids: Sequence[int], weight: int, epoch: int) -> int:
        doc = self.open(epoch, weight)
        self.append(doc, token_ids)
        return doc

    def open(self, epoch: int, weight: int = WEIGHT_ONE) -> int:
        self.documents[self._next_doc] = Document(epoch, weight, self._prompt)
        self._next_doc += 1
        return self._next_doc - 1

    def append(self, doc: int, token_ids: Sequence[int]) -> None:
        self._write(self.documents[doc], token_ids)

    def sync(self, doc: int, token_ids: Sequence[int]) -> bool:
        document = self.documents[doc]
        held = len(document.tokens)
        seen = range(max(0, held - SYNC_WINDOW), held)
        is_prefix = held <= len(token_ids) and all(document.tokens[i] == token_ids[i] for i in seen)
        if not is_prefix:
            document.tokens, document.written = [], []
        self._write(document, token_ids[len(document.tokens) :])
        return is_prefix

    def set_weight(self, doc: int, weight: int) -> None:
        self.documents[doc].weight = weight

    def remove(self, doc: int) -> None:
        del self.documents[doc]
        self._drop_prompts()

    def retire(self, before_epoch: int) -> int:
        old = [doc for doc, held in self.documents.items() if held.epoch is not None and held.epoch < before_epoch]
        for doc in old:
            del self.documents[doc]
        self._drop_prompts()
        return len(old)

    def _drop_prompts(self) -> None:
        """A prompt goes once all documents that were added behind it are gone, and another one is the present one."""
        wanted = {self._prompt, *(document.prompt for document in self.documents.values())}
        self._prompts = {prompt: text for prompt, text in self._prompts.items() if prompt in wanted}

    def propose(
        self,
        doc: int,
        max_nodes: int,
        max_depth: int,
        is_chain: bool = False,
        siblings: bool = True,
        ends: Sequence[int] = (),
    ) -> DraftTree:
        """The draft for an answer: the best `max_nodes` nodes, best first. None of them has one of its end tokens."""
        root = _Node(depth=0)
        if max_nodes > 0 and max_depth > 0:
            _grow(root, self._matches(self.documents[doc], siblings), max_depth)
        _drop(root, ends)
        return _as_chain(root, max_nodes) if is_chain else _as_tree(root, max_nodes)

    def _all(self) -> list[Document]:
        return [*self._prompts.values(), *self.documents.values()]

    def _write(self, document: Document, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            document.tokens.append(int(token))
            document.written.append(self._clock)
            self._clock += 1

    def _matches(self, asker: Document, siblings: bool) -> list[Match]:
        """The places found, longest shared context first, equal ones newest first."""
        recent = [*asker.prompt, *asker.tokens][-max(REACH, self._config.max_match) :]
        lengths = context_lengths(self._config.min_match, self._config.max_match)
        places = [(when, held, i) for held in self._all() for i, when in enumerate(held.written)]
        places.sort(key=lambda place: -place[0])
        shared = [_shared_context(document, i, recent) for _, document, i in places]
        found: list[Match] = []
        for which in range(len(lengths) - 1, -1, -1):
            longer = lengths[which + 1] if which + 1 < len(lengths) else math.inf
            looked_at = [n for n in range(len(places)) if shared[n] >= lengths[which]][: self._max_matches]
            for n in looked_at:
                _, document, i = places[n]
                is_sibling = document is not asker and document.epoch is not None and document.epoch == asker.epoch
                if document.weight > 0 and (siblings or not is_sibling) and shared[n] < longer:
                    found.append(Match(shared[n], document.weight, document.tokens[i:]))
            if len(found) >= min(ENOUGH, self._max_matches):
                break
        return sorted(found, key=lambda match: -match.shared)


@dataclass
class _Node:
    depth: int
    # in the order they were met
    children: dict[int, _Node] = field(default_factory=dict)
    # probability given the parent
    p: int = 0


def _shared_context(document: Document, place: int, recent: Sequence[int]) -> int:
    before = [*document.prompt, *document.tokens[:place]]
    length = 0
    while length < min(len(before), len(recent)) and before[-1 - length] == recent[-1 - length]:
        length += 1
    return length


def _grow(node: _Node, matches: list[Match], max_depth: int) -> None:
    """Share out the probability at the node, and below."""
    if node.depth == max_depth:
        return
    unexplained = ONE
    going_on = [match for match in matches if match.continuation]
    class_of = [context_class(match.shared + 2 * node.depth) for match in going_on]
    for its_class in dict.fromkeys(class_of):
        peers = [match for match, other in zip(going_on, class_of, strict=True) if other == its_class]
        tokens = dict.fromkeys(match.continuation[0] for match in peers)
        total_weight = sum(match.weight for match in peers)
        doubt = DOUBT[its_class] * len(tokens) ** 2
        left = unexplained * doubt // (16 * len(peers) + doubt)
        for token in tokens:
            weight = sum(match.weight for match in peers if match.continuation[0] == token)
            child = node.children.setdefault(token, _Node(node.depth + 1))
            child.p += (unexplained - left) * weight // total_weight
        unexplained = left
    for token, child in node.children.items():
        below = [Match(m.shared, m.weight, m.continuation[1:]) for m in going_on if m.continuation[0] == token]
        _grow(child, below, max_depth)


def _drop(node: _Node, tokens: Sequence[int]) -> None:
    """Leave these tokens out; what they were given is nobody's."""
    node.children = {token: child for token, child in node.children.items() if token not in tokens}
    for child in node.children.values():
        _drop(child, tokens)


def _log_q(node: _Node) -> np.float32:
    return np.float32(math.log(max(node.p, 1) / ONE))


def _as_chain(root: _Node, max_nodes: int) -> DraftTree:
    """The best child of the best child ... of a trie; its nodes have `p` (in units of 1 / `ONE`) and `children`."""
    path: list[tuple[int, _Node]] = []
    node = root
    while node.children and len(path) < max_nodes:
        # max() keeps the first of equals: the one met first
        token, node = max(node.children.items(), key=lambda item: item[1].p)
        path.append((token, node))
    return _arrays([(token, place - 1, node) for place, (token, node) in enumerate(path)])


def _as_tree(root: _Node, max_nodes: int) -> DraftTree:
    """The best nodes of such a trie, best first."""
    nodes: list[tuple[int, int, _Node]] = []

    def visit(node: _Node, index: int) -> None:
        for token, child in node.children.items():
            nodes.append((token, index, child))
            visit(child, len(nodes) - 1)

    visit(root, ROOT)
    ordered = order(_arrays(nodes))
    return select(ordered, range(min(max(max_nodes, 0), ordered.size)))


def _arrays(nodes: list[tuple[int, int, _Node]]) -> DraftTree:
    if not nodes:
        return EMPTY_TREE
    return DraftTree(
        np.asarray([token for token, _, _ in nodes], dtype=np.int32),
        np.asarray([parent for _, parent, _ in nodes], dtype=np.int32),
        np.asarray([_log_q(node) for _, _, node in nodes], dtype=np.float32),
        np.zeros(len(nodes), dtype=np.int32),
    )
