"""CUDA graphs to capture, so that several draft sizes share one set. Pure.

A graph replays one shape. The naive scheme captures one per (draft size, batch size), for the target and for the
drafter (TLT section 5.1, figure 10 b), and its memory grows with every draft size. Here a graph is a bucket: it serves
any step that needs no more tokens, requests and tokens per request than it has. B requests with n nodes each need
B * (1 + n) tokens, whatever n is, so one ladder of token counts serves all draft sizes; `max_tokens` ends it, which
leaves the large sizes to small batches, where they pay. The drafter is captured apart: its steps compute one token per
request at any draft size, so all sizes share them too.

Symbols: B requests, n nodes per request, T tokens of a bucket. Plain steps (n = 0) are part of every plan.
`docs/concepts/graphs.md` has a worked example.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_specrollout.errors import ConfigError

CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Batch sizes that stock vLLM captures by default up to 256."""
MOST_CAPTURED = 512
"""Rows of the largest step that is captured unasked, vLLM's own bound on Hopper: beyond, arithmetic hides launches."""
_LARGE_SIZES = range(272, MOST_CAPTURED + 1, 16)  # as stock vLLM goes on
_STEPS_PER_OCTAVE = 8  # rungs between T and 2 T above the largest capture size: at most 1/8 of padding
_RIDGE = (
    256  # rows whose arithmetic takes as long as reading the weights, on Hopper in bf16: what padding is weighed by
)
_PIECEWISE = 64  # rows that would take as long as the launches of a step without a full graph


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """One captured graph: the largest step it can replay. All three are counts."""

    # rows of the forward pass
    num_tokens: int
    num_reqs: int
    # tokens of one request: its nodes and 1
    max_query_len: int

    def holds(self, num_reqs: int, num_tokens: int, max_query_len: int) -> bool:
        return self.num_tokens >= num_tokens and self.num_reqs >= num_reqs and self.max_query_len >= max_query_len


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The graphs to capture, each list in ascending order. Capture in descending order: they share one memory pool."""

    target: tuple[GraphBucket, ...]
    drafter: tuple[GraphBucket, ...] = ()

    @property
    def num_graphs(self) -> int:
        return len(self.target) + len(self.drafter)


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
    max_tokens: int,
    *,
    limit: int | None = None,
    drafter: bool = False,
) -> GraphPlan:
    """The shared buckets.

    A bucket exists for every rung that some step of B <= max_num_reqs requests with n nodes each rounds up to, where n
    is 0 or one of `draft_sizes` and B * (1 + n) <= max_tokens. It also serves steps whose requests have different
    numbers of nodes: T tokens may be any mix of up to T requests.

    Args:
        draft_sizes: nodes per request, each at least 1.
        batch_sizes: the lower rungs of the ladder; above the largest, 8 rungs follow per doubling.
        max_tokens: most tokens of a captured step; larger ones run piecewise.
        limit: most graphs, the drafter's included. What saves least is dropped first (see `_thin`); every step keeps a
            bucket, only a larger one.
        drafter: also plan the drafter's graphs.

    Raises:
        ConfigError: a number that makes no sense, or a limit that leaves a model without a graph.
    """
    sizes = _check(draft_sizes, batch_sizes, max_num_reqs, max_tokens)
    steps = [b * (1 + n) for n in sizes for b in range(1, min(max_num_reqs, max_tokens // (1 + n)) + 1)]
    most = 1 + max(sizes)
    largest = min(max_tokens, max_num_reqs * most)
    rungs = ladder(batch_sizes, largest)
    used = sorted({_up(rungs, tokens) for tokens in (*steps, largest)})
    target = tuple(GraphBucket(rung, min(rung, max_num_reqs), min(rung, most)) for rung in used)
    # only batches at which the smallest draft fits are drafted for
    drafted = min(max_num_reqs, max_tokens // (1 + sizes[1])) if drafter and len(sizes) > 1 else 0
    rungs = ladder(batch_sizes, drafted) if drafted else []
    plan = GraphPlan(target, tuple(GraphBucket(rung, rung, 1) for rung in rungs))
    if limit is None:
        return plan
    least = 1 + bool(plan.drafter)
    if limit < least:
        raise ConfigError(
            f"a limit of {limit} graphs, where each model needs one", f"allow {least} or more, or capture none at all"
        )
    return _thin(plan, limit, steps)


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
    pairs = [(n, b) for n in sizes for b in rungs if max_tokens is None or b * (1 + n) <= max_tokens]
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
        pool = max(pool, buckets[-1].num_tokens * shape.token_bytes)
    return (total + pool) / 2**20


def within_mib(plan: GraphPlan, limit_mib: float, memory: GraphMemory, drafter: GraphMemory | None = None) -> GraphPlan:
    """The plan's largest part that `estimate_mib` puts at or below `limit_mib`.

    Thinning frees graphs but not the pool, which the largest bucket pays; so at each step either the bucket that saves
    least is dropped, or the target's largest one, whichever costs less time per MiB freed. After the latter, the
    largest steps run piecewise.

    Raises:
        ConfigError: not even one graph fits.
    """
    while (mib := estimate_mib(plan, memory, drafter)) > limit_mib:
        if len(plan.target) == 1:
            raise ConfigError(
                f"the smallest set of graphs takes about {mib:.0f} MiB, and the limit is {limit_mib:g} MiB",
                "raise `--limit`, lower `--max-tokens`, or capture none at all",
            )
        shorter = replace(plan, target=plan.target[:-1])
        options = [shorter]
        thinner = _thin(plan, plan.num_graphs - 1, [bucket.num_tokens for bucket in plan.target])
        if thinner.num_graphs < plan.num_graphs:
            options.append(thinner)
        plan = min(options, key=lambda part: _loss(plan, part) / (mib - estimate_mib(part, memory, drafter)))
    return plan


def ladder(batch_sizes: Sequence[int], largest: int) -> list[int]:
    """Token counts, ascending: the batch sizes up to `largest`, then 8 per doubling, the last one `largest` itself."""
    rungs = [size for size in sorted(set(batch_sizes)) if size < largest]
    while not rungs or rungs[-1] < largest:
        last = rungs[-1] if rungs else 0
        step = max(1, (1 << max(last.bit_length() - 1, 0)) // _STEPS_PER_OCTAVE)
        rungs.append(largest if last < max(batch_sizes) else min(largest, last + step))
    return rungs


def _check(draft_sizes: Sequence[int], batch_sizes: Sequence[int], max_num_reqs: int, max_tokens: int) -> list[int]:
    """Draft sizes in ascending order, 0 first."""
    for what, values in (("draft sizes", draft_sizes), ("batch sizes", batch_sizes)):
        if not values or min(values) < 1:
            raise ConfigError(f"{what} are {list(values)}, and each must be at least 1", f"give {what} of 1 or more")
    if max_num_reqs < 1:
        raise ConfigError(f"at most {max_num_reqs} requests at once, and at least 1 is needed", "allow more requests")
    least = 1 + min(draft_sizes)
    if max_tokens < max(least, max_num_reqs):
        raise ConfigError(
            f"at most {max_tokens} tokens a step, where {max_num_reqs} plain requests need {max_num_reqs} and the"
            f" smallest draft {least}",
            f"allow {max(least, max_num_reqs)} tokens or more",
        )
    return sorted({0, *draft_sizes})


def _up(rungs: Sequence[int], tokens: int) -> int:
    return rungs[bisect_left(rungs, tokens)]


def _thin(plan: GraphPlan, limit: int, steps: Iterable[int]) -> GraphPlan:
    """Drop buckets until `limit` are left, those first whose loss costs least.

    Without it, its steps are padded to the next larger bucket. A step's time grows like _RIDGE + T, so the loss is
    (steps held) * (T of the next - T) / (_RIDGE + T), every (B, n) counted alike. The largest bucket of a model stays:
    whatever had a bucket keeps one.
    """
    lists = [list(plan.target), list(plan.drafter)]
    held = [Counter(_up([b.num_tokens for b in plan.target], t) for t in steps)]
    held.append(Counter({bucket.num_tokens: 1 for bucket in plan.drafter}))
    while len(lists[0]) + len(lists[1]) > limit:
        losses = [
            (held[k][a.num_tokens] * (b.num_tokens - a.num_tokens) / (_RIDGE + a.num_tokens), k, i)
            for k in (0, 1)
            for i, (a, b) in enumerate(zip(lists[k], lists[k][1:], strict=False))
        ]
        if not losses:
            break
        _, k, i = min(losses)
        dropped = lists[k].pop(i)
        held[k][lists[k][i].num_tokens] += held[k].pop(dropped.num_tokens, 0)
    return GraphPlan(tuple(lists[0]), tuple(lists[1]))


def _loss(plan: GraphPlan, part: GraphPlan) -> float:
    """Relative time that the steps of the dropped buckets lose, one step per bucket."""
    total = 0.0
    for before, after in ((plan.target, part.target), (plan.drafter, part.drafter)):
        sizes = [bucket.num_tokens for bucket in after]
        for bucket in set(before) - set(after):
            i = bisect_left(sizes, bucket.num_tokens)
            more = sizes[i] - bucket.num_tokens if i < len(sizes) else _PIECEWISE
            total += more / (_RIDGE + bucket.num_tokens)
    return total
