"""CUDA graphs to capture, so that several draft sizes share one set. Pure.

A graph replays one shape. The naive scheme captures one per (draft size, batch size), for the target and for the
drafter (TLT section 5.1, figure 10 b), and its memory grows with every draft size. Here a graph is a bucket: it serves
any step that needs no more rows, requests and rows per request than it has, and a step takes the cheapest that holds
it. What a bucket pads costs time: rows are computed, and the attention kernel launches programs for every request and
row of a request that could be there. So buckets differ in all three, and those are captured that save most. The drafter
is captured apart: its steps compute one token per request at any draft size, so all sizes share them too.

Symbols: B requests, n nodes per request; T, R and Q: rows, requests and rows per request of a bucket. Steps without
drafts are stock vLLM's, graphs included. `docs/concepts/graphs.md` has a worked example.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from vllm_specrollout.errors import ConfigError

CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Batch sizes that stock vLLM captures by default up to 256."""
MOST_CAPTURED = 512
"""Rows of the largest step that is captured unasked, vLLM's own bound on Hopper: beyond, arithmetic hides launches."""
_LARGE_SIZES = range(272, MOST_CAPTURED + 1, 16)  # as stock vLLM goes on
_STEPS_PER_OCTAVE = 8  # rungs between T and 2 T above the largest capture size: at most 1/8 of padding
MOST_DRAFTED = 256
"""Rows of the largest step whose drafts get graphs of their own: their arithmetic takes as long as reading the weights,
on Hopper in bf16. Beyond, drafting pays little, and arithmetic hides launches."""
_SLOT = 0.1
"""Rows that cost as much as one more of R * Q: ten programs of a layer's attention that find nothing to do. Estimated
for Hopper (4 ns a program, 0.45 us a row of a 7B layer), not measured."""
_SHORT = 8
"""Rows of a request that one tile of the tree kernel holds, with up to 8 query heads per KV head."""


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """One captured graph: the largest step it can replay. All three are counts."""

    # rows of the forward pass
    num_tokens: int
    num_reqs: int
    # tokens of one request: its nodes and 1
    max_query_len: int

    @property
    def cost(self) -> float:
        """Time of a step in it, in rows: the weights are read as well, as long as `MOST_DRAFTED` rows take."""
        return MOST_DRAFTED + self.num_tokens + _SLOT * self.num_reqs * self.max_query_len

    def holds(self, num_reqs: int, num_tokens: int, max_query_len: int) -> bool:
        return self.num_tokens >= num_tokens and self.num_reqs >= num_reqs and self.max_query_len >= max_query_len


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The graphs to capture, each list in the order of their worth: the first holds every step that has a bucket.

    Capture those with most rows first: all share one memory pool.
    """

    target: tuple[GraphBucket, ...]
    drafter: tuple[GraphBucket, ...] = ()

    @property
    def num_graphs(self) -> int:
        return len(self.target) + len(self.drafter)

    def first(self, limit: int) -> GraphPlan:
        """The most useful graphs; of the drafter at most half of them, or what the target leaves.

        Raises:
            ConfigError: a limit that leaves a model without a graph.
        """
        if limit < (least := 1 + bool(self.drafter)):
            hint = f"allow {least} or more, or capture none at all"
            raise ConfigError(f"a limit of {limit} graphs, where each model needs one", hint)
        drafter = self.drafter[: max(limit // 2, limit - len(self.target))]
        return GraphPlan(self.target[: limit - len(drafter)], drafter)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """What the memory of a model's graphs is reckoned from: an estimate, not a measurement.

    Two terms. Every graph holds its kernel nodes: parameters, and the driver's own records. And all graphs share one
    pool for what flows through a layer; vLLM captures the largest graph first and the others reuse its memory, so the
    largest is paid once. Logits, KV cache and attention workspaces lie outside of the graphs and do not count.
    `bytes_per_node` is the weak point: it differs by driver, so compare plans by this, and trust a capture on the GPU.
    """

    layers: int
    # elements of one token
    hidden: int
    ffn: int
    # elements of one token's queries, keys and values: (heads + 2 * kv heads) * head size
    qkv: int
    dtype_bytes: int = 2
    # kernels of a layer: 2 norms, 4 products, rotary, cache write, attention and its reduction, activation, one spare
    nodes_per_layer: int = 12
    # embedding, last norm, copies in and out
    nodes_beside: int = 6
    bytes_per_node: int = 16 << 10

    @property
    def graph_bytes(self) -> int:
        return (self.layers * self.nodes_per_layer + self.nodes_beside) * self.bytes_per_node

    @property
    def token_bytes(self) -> int:
        """Most that is alive at once of one token: residual, input, output, and the wider half of a layer."""
        return self.dtype_bytes * (3 * self.hidden + max(self.qkv + self.hidden, 3 * self.ffn))


def capture_sizes(stock: Sequence[int], max_num_reqs: int, max_draft_tokens: int, max_tokens: int) -> list[int]:
    """vLLM's capture sizes, continued until they hold steps with drafts.

    vLLM stops at twice the requests it runs at once: nothing in its configuration says that their steps have more rows.

    Args:
        stock: what vLLM would capture, ascending; empty: nothing, and so it stays.
        max_draft_tokens: most nodes of a request.
        max_tokens: most rows of any step.

    Returns:
        Sizes in ascending order. All of stock's are among them and none between them, so steps that stock would capture
        are captured as ever.
    """
    rows = min(max_num_reqs * (1 + max_draft_tokens), MOST_CAPTURED, max_tokens)
    if not stock or stock[-1] >= rows:
        return list(stock)
    pattern = (*CAPTURE_SIZES, *_LARGE_SIZES)
    end = bisect_left(pattern, rows)
    return [*stock, *(size for size in pattern[:end] if size > stock[-1]), min(pattern[end], max_tokens)]


def plan_graphs(
    draft_sizes: Sequence[int],
    batch_sizes: Sequence[int],
    max_num_reqs: int,
    max_tokens: int = MOST_DRAFTED,
    *,
    limit: int | None = None,
    drafter: bool = False,
) -> GraphPlan:
    """The shared buckets.

    They are chosen for the steps of B <= max_num_reqs requests with n nodes each, where n is one of `draft_sizes` and
    B * (1 + n) <= max_tokens; and for such steps in which some request has most. Every such step has a bucket, at
    whatever limit. They serve any mix within their bounds.

    Args:
        draft_sizes: nodes per request, each at least 1.
        batch_sizes: the lower rungs of the ladder; above the largest, 8 rungs follow per doubling.
        max_tokens: most rows of a captured step; larger ones run piecewise.
        limit: most graphs, the drafter's included; None: as many as save anything.
        drafter: also plan the drafter's graphs.

    Raises:
        ConfigError: a number that makes no sense, or a limit that leaves a model without a graph.
    """
    sizes = _check(draft_sizes, batch_sizes, max_num_reqs, max_tokens)
    most, most_reqs = 1 + sizes[-1], min(max_num_reqs, max_tokens // (1 + sizes[0]))
    steps = {
        GraphBucket(b * (1 + n), b, longest)
        for n in sizes
        for b in range(1, min(most_reqs, max_tokens // (1 + n)) + 1)
        for longest in (1 + n, most if b > 1 else 1 + n)
    }
    rungs = ladder(batch_sizes, min(max_tokens, most_reqs * most))
    largest = GraphBucket(rungs[-1], most_reqs, min(rungs[-1], most))
    buckets = {
        GraphBucket(rung, reqs, min(rung, longest))
        for rung in rungs
        for longest in (min(_SHORT, most), most)
        for reqs in {min(most_reqs, -(-rung >> k)) for k in range(most.bit_length() + 1)}
        if rung <= reqs * longest  # a step can be as large, and so can the one that is captured
    }
    target = _by_worth(largest, buckets, steps)
    # its steps have a row for each request that is drafted for
    rows = [GraphBucket(b, b, 1) for b in range(1, most_reqs + 1)]
    alone = {GraphBucket(rung, rung, 1) for rung in ladder(batch_sizes, most_reqs)}
    plan = GraphPlan(target, _by_worth(rows[-1], alone, rows) if drafter else ())
    return plan if limit is None else plan.first(limit)


def naive_plan(
    draft_sizes: Sequence[int],
    batch_sizes: Sequence[int],
    max_num_reqs: int,
    max_tokens: int | None = None,
    *,
    drafter: bool = False,
) -> GraphPlan:
    """One graph per (draft size, batch size), to compare with; `max_tokens` None leaves the large ones in.

    Raises:
        ConfigError: a number that makes no sense.
    """
    sizes = _check(draft_sizes, batch_sizes, max_num_reqs, max_tokens or max_num_reqs * (1 + max(draft_sizes)))
    rungs = ladder(batch_sizes, max_num_reqs)
    pairs = [(n, b) for n in (0, *sizes) for b in rungs if max_tokens is None or b * (1 + n) <= max_tokens]
    return GraphPlan(
        tuple(sorted(GraphBucket(b * (1 + n), b, 1 + n) for n, b in pairs)),
        tuple(sorted(GraphBucket(b, b, 1) for n, b in pairs if n)) if drafter else (),
    )


def estimate_mib(plan: GraphPlan, memory: GraphMemory, drafter: GraphMemory | None = None) -> float:
    """MiB that the plan's graphs take, by the model of `GraphMemory`.

    Args:
        drafter: the drafter's shape; its graphs count nothing without it. Both models share the pool.
    """
    total, pool = 0, 0
    for buckets, shape in ((plan.target, memory), (plan.drafter, drafter)):
        if shape is None or not buckets:
            continue
        total += len(buckets) * shape.graph_bytes
        pool = max(pool, max(bucket.num_tokens for bucket in buckets) * shape.token_bytes)
    return (total + pool) / 2**20


def within_mib(plan: GraphPlan, limit_mib: float, memory: GraphMemory, drafter: GraphMemory | None = None) -> GraphPlan:
    """The plan's most useful graphs, as many as `estimate_mib` puts at or below `limit_mib`.

    Raises:
        ConfigError: not even one graph fits.
    """
    least = 1 + bool(plan.drafter)
    for limit in range(plan.num_graphs, least - 1, -1):
        part = plan.first(limit)
        if (mib := estimate_mib(part, memory, drafter)) <= limit_mib:
            return part
    raise ConfigError(
        f"the smallest set of graphs takes about {mib:.0f} MiB, and the limit is {limit_mib:g} MiB",
        "raise `--limit`, lower `--max-tokens`, or capture none at all",
    )


def ladder(batch_sizes: Sequence[int], largest: int) -> list[int]:
    """Token counts, ascending: the batch sizes up to `largest`, then 8 per doubling, the last one `largest` itself."""
    rungs = [size for size in sorted(set(batch_sizes)) if size < largest]
    while not rungs or rungs[-1] < largest:
        last = rungs[-1] if rungs else 0
        step = max(1, (1 << max(last.bit_length() - 1, 0)) // _STEPS_PER_OCTAVE)
        rungs.append(largest if last < max(batch_sizes) else min(largest, last + step))
    return rungs


def _check(draft_sizes: Sequence[int], batch_sizes: Sequence[int], max_num_reqs: int, max_tokens: int) -> list[int]:
    """Draft sizes in ascending order."""
    for what, values in (("draft sizes", draft_sizes), ("batch sizes", batch_sizes)):
        if not values or min(values) < 1:
            raise ConfigError(f"{what} are {list(values)}, and each must be at least 1", f"give {what} of 1 or more")
    if max_num_reqs < 1:
        raise ConfigError(f"at most {max_num_reqs} requests at once, and at least 1 is needed", "allow more requests")
    if max_tokens < (least := 1 + min(draft_sizes)):
        cause = f"at most {max_tokens} tokens a step, where the smallest draft needs {least}"
        raise ConfigError(cause, f"allow {least} tokens or more")
    return sorted(set(draft_sizes))


def _by_worth(
    largest: GraphBucket, buckets: Iterable[GraphBucket], steps: Iterable[GraphBucket]
) -> tuple[GraphBucket, ...]:
    """The buckets that save anything, one after the other the one that then saves most; `largest` is the first.

    What counts is time relative to that of a bucket as large as the step, and every doubling of the batch alike.
    """
    # the plugin reads this file's constants, and is imported into every process
    import numpy as np

    ordered, needs = [largest, *sorted(set(buckets) - {largest})], sorted(steps)
    # [buckets, 3], [steps, 3]
    offered, needed = (np.array([astuple(bucket) for bucket in some]) for some in (ordered, needs))
    cost = np.array([b.cost for b in ordered]) / np.array([s.cost for s in needs])[:, None]
    # [steps, buckets] relative time; infinite: it does not hold the step
    time = np.where((offered[None] >= needed[:, None]).all(-1), cost, np.inf)
    chosen, best = [0], time[:, 0]
    while True:
        saved = (1.0 / needed[:, 1]) @ np.maximum(best[:, None] - time, 0.0)
        found = int(saved.argmax())
        if saved[found] <= 0.0:
            return tuple(ordered[i] for i in chosen)
        chosen.append(found)
        best = np.minimum(best, time[:, found])
