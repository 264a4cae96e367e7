"""CUDA-graph plans: every step they promise has a bucket, and the buckets are those that save most."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.scheduling.cudagraphs import (
    CAPTURE_SIZES,
    MOST_CAPTURED,
    MOST_DRAFTED,
    GraphBucket,
    GraphMemory,
    GraphPlan,
    capture_sizes,
    estimate_mib,
    ladder,
    naive_plan,
    plan_graphs,
    within_mib,
)


def pick(plan: GraphPlan, num_reqs: int, num_tokens: int, max_query_len: int) -> GraphBucket | None:
    """The target's cheapest bucket that holds the step; None if none does: then it runs piecewise."""
    fitting = [bucket for bucket in plan.target if bucket.holds(num_reqs, num_tokens, max_query_len)]
    return min(fitting, key=lambda bucket: bucket.cost, default=None)


DRAFTS = (8, 16, 32, 64)
MODELS = {
    "7B": GraphMemory(layers=28, hidden=3584, ffn=18944, qkv=36 * 128),
    "0.5B": GraphMemory(layers=24, hidden=896, ffn=4864, qkv=18 * 64),
}
NUMBERS = st.fixed_dictionaries(
    {
        "draft_sizes": st.lists(st.integers(1, 64), min_size=1, max_size=5),
        "batch_sizes": st.lists(st.integers(1, 300), min_size=1, max_size=12),
        "max_num_reqs": st.integers(1, 64),
        "max_tokens": st.integers(65, 600),
    }
)


def _steps(numbers: dict[str, object]) -> list[tuple[int, int, int]]:
    """(B, rows, longest) of every uniform step within the bounds, and of those in which one request has most."""
    most = 1 + max(numbers["draft_sizes"])
    pairs = itertools.product(range(1, numbers["max_num_reqs"] + 1), numbers["draft_sizes"])
    uniform = [(b, b * (1 + n), 1 + n) for b, n in pairs if b * (1 + n) <= numbers["max_tokens"]]
    return uniform + [(b, rows, most) for b, rows, _ in uniform if b > 1]


@given(NUMBERS, st.none() | st.integers(2, 12))
def test_every_step_within_the_bounds_has_a_bucket_with_or_without_a_limit(numbers, limit) -> None:
    plan = plan_graphs(**numbers, limit=limit, drafter=True)
    for step in _steps(numbers):
        bucket = pick(plan, *step)
        assert bucket is not None
        assert (bucket.num_reqs, bucket.num_tokens, bucket.max_query_len) >= step
    assert limit is None or plan.num_graphs <= limit


@given(NUMBERS, st.data())
def test_requests_with_different_numbers_of_nodes_share_a_bucket(numbers, data) -> None:
    plan = plan_graphs(**numbers)
    most = 1 + max(numbers["draft_sizes"])
    most_reqs = min(numbers["max_num_reqs"], numbers["max_tokens"] // (1 + min(numbers["draft_sizes"])))
    rows = data.draw(st.lists(st.integers(1, most), min_size=1, max_size=most_reqs))
    if sum(rows) <= numbers["max_tokens"]:
        assert pick(plan, len(rows), sum(rows), max(rows)) is not None


def _naive_worth(numbers: dict[str, object], limit: int) -> list[float]:
    """Relative time of all steps, weighed, with one bucket, two, ...: the best is added each time."""
    most = 1 + max(numbers["draft_sizes"])
    most_reqs = min(numbers["max_num_reqs"], numbers["max_tokens"] // (1 + min(numbers["draft_sizes"])))
    rungs = ladder(numbers["batch_sizes"], min(numbers["max_tokens"], most_reqs * most))
    offered = [
        GraphBucket(rows, min(most_reqs, -(-rows // 2**k)), min(rows, longest))
        for rows in rungs
        for k in range(8)
        if 2**k < 2 * most
        for longest in (8, most)
        if longest <= most and rows <= min(most_reqs, -(-rows // 2**k)) * longest
    ]
    steps = [(b, GraphBucket(rows, b, longest)) for b, rows, longest in sorted(set(_steps(numbers)))]

    def time(buckets: list[GraphBucket]) -> float:
        total = 0.0
        for b, step in steps:
            fitting = [x.cost for x in buckets if x.holds(step.num_reqs, step.num_tokens, step.max_query_len)]
            total += min(fitting) / step.cost / b
        return total

    chosen, times = [GraphBucket(rungs[-1], most_reqs, min(rungs[-1], most))], []
    while True:
        times.append(time(chosen))
        if len(times) == limit:
            return times
        chosen.append(min(offered, key=lambda bucket: time([*chosen, bucket])))


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=3),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(25, 80),
)
def test_the_buckets_are_those_that_save_most_one_after_the_other(drafts, batches, max_num_reqs, max_tokens) -> None:
    numbers = {
        "draft_sizes": drafts,
        "batch_sizes": batches,
        "max_num_reqs": max_num_reqs,
        "max_tokens": max_tokens,
    }
    plan = plan_graphs(**numbers)
    steps = [(b, GraphBucket(rows, b, longest)) for b, rows, longest in set(_steps(numbers))]
    for count, expected in enumerate(_naive_worth(numbers, 4), 1):
        part = plan.first(min(count, plan.num_graphs))
        found = [pick(part, s.num_reqs, s.num_tokens, s.max_query_len).cost / s.cost / b for b, s in steps]
        assert sum(found) == pytest.approx(expected)


@given(NUMBERS, st.booleans(), st.integers(2, 12))
def test_no_shape_is_captured_twice_and_a_lower_limit_is_a_part_of_a_higher_one(numbers, drafter, limit) -> None:
    plan = plan_graphs(**numbers, drafter=drafter)
    for buckets in (plan.target, plan.drafter):
        assert len(buckets) == len(set(buckets))
    assert bool(plan.drafter) <= drafter
    # vLLM captures with rows in every place, as equal in number as can be
    assert all(-(-b.num_tokens // b.num_reqs) <= b.max_query_len <= b.num_tokens for b in plan.target)
    part = plan_graphs(**numbers, drafter=drafter, limit=limit)
    assert part == plan.first(limit) and part.target == plan.target[: len(part.target)]
    assert part.drafter == plan.drafter[: len(part.drafter)]


@given(NUMBERS, st.none() | st.integers(1, 12), st.data())
def test_a_larger_step_never_costs_less(numbers, limit, data) -> None:
    plan = plan_graphs(**numbers, limit=limit)
    step = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 600), st.integers(1, 70)))
    more = tuple(value + data.draw(st.integers(0, 50)) for value in step)
    small, large = pick(plan, *step), pick(plan, *more)
    assert large is None or (small is not None and small.cost <= large.cost)


@given(NUMBERS, st.sampled_from(sorted(MODELS)), st.floats(5.0, 600.0))
# the drafter has more graphs than the target
@example({"draft_sizes": [2], "batch_sizes": [1], "max_num_reqs": 16, "max_tokens": 65}, "0.5B", 135.0)
def test_a_limit_in_mib_holds_and_every_step_keeps_a_bucket(numbers, model, limit) -> None:
    plan, memory = plan_graphs(**numbers, drafter=True), MODELS[model]
    try:
        part = within_mib(plan, limit, memory, MODELS["0.5B"])
    except ConfigError as error:
        assert f"the limit is {limit:g} MiB" in error.cause
        return
    assert estimate_mib(part, memory, MODELS["0.5B"]) <= limit
    assert part == plan.first(part.num_graphs)
    # one more would be too much
    more = plan.first(part.num_graphs + 1)
    assert more == part or estimate_mib(more, memory, MODELS["0.5B"]) > limit
    assert all(pick(part, *step) is not None for step in _steps(numbers))


@pytest.mark.parametrize("model", MODELS)
def test_the_naive_scheme_costs_several_times_as_much(model) -> None:
    ours = estimate_mib(plan_graphs(DRAFTS, CAPTURE_SIZES, 256, limit=64), MODELS[model])
    assert estimate_mib(naive_plan(DRAFTS, CAPTURE_SIZES, 256), MODELS[model]) > 3 * ours
    bounded = naive_plan(DRAFTS, CAPTURE_SIZES, 256, MOST_DRAFTED)
    assert max(bucket.num_tokens for bucket in bounded.target) <= MOST_DRAFTED


def test_the_naive_scheme_has_one_graph_per_pair_for_target_and_drafter() -> None:
    plan = naive_plan([2, 3], [1, 4], 4, drafter=True)
    assert [(b.num_reqs, b.max_query_len) for b in plan.target] == [(1, 1), (1, 3), (1, 4), (4, 1), (4, 3), (4, 4)]
    assert [b.num_reqs for b in plan.drafter] == [1, 1, 4, 4]


def test_the_drafter_is_captured_only_at_batches_that_are_drafted_for() -> None:
    plan = plan_graphs([7], [1, 2, 4, 8, 16], 16, 64, drafter=True)
    assert sorted(plan.drafter) == [GraphBucket(b, b, 1) for b in (1, 2, 4, 8)]


def test_the_worked_example_of_the_docs() -> None:
    plan = plan_graphs([3, 7], [1, 2, 4, 8], 8, 32)
    shapes = [(32, 8, 8), (16, 4, 8), (8, 2, 8), (24, 6, 8), (4, 1, 4), (12, 3, 8)]
    shapes += [(20, 5, 8), (28, 7, 8), (8, 1, 8), (16, 2, 8), (24, 3, 8), (32, 4, 8)]
    assert plan.target == tuple(GraphBucket(*shape) for shape in shapes)
    six = plan_graphs([3, 7], [1, 2, 4, 8], 8, 32, limit=6)
    for step in ((3, 24, 8), (6, 24, 4), (4, 23, 8)):
        assert pick(six, *step) == GraphBucket(24, 6, 8)
    assert pick(plan, 3, 24, 8) == GraphBucket(24, 3, 8)
    assert pick(plan, 5, 40, 8) is None


def test_the_ladder_goes_on_with_eight_rungs_per_doubling() -> None:
    assert ladder([1, 2, 4, 8], 40) == [
        1,
        2,
        4,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        18,
        20,
        22,
        24,
        26,
        28,
        30,
        32,
        36,
        40,
    ]
    assert ladder([1, 2, 4, 8], 3) == [1, 2, 3]


def test_the_estimate_pays_every_graph_and_the_pool_once() -> None:
    memory = GraphMemory(layers=2, hidden=8, ffn=16, qkv=24)
    one, two = GraphPlan((GraphBucket(64, 8, 8),)), GraphPlan((GraphBucket(32, 8, 8), GraphBucket(64, 8, 8)))
    assert (estimate_mib(two, memory) - estimate_mib(one, memory)) * 2**20 == memory.graph_bytes
    assert estimate_mib(one, memory) * 2**20 == memory.graph_bytes + 64 * memory.token_bytes
    assert memory.token_bytes == 2 * (3 * 8 + 3 * 16)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"draft_sizes": []}, "draft sizes are [], and each must be at least 1"),
        ({"draft_sizes": [0, 8]}, "draft sizes are [0, 8], and each must be at least 1"),
        ({"batch_sizes": [0]}, "batch sizes are [0], and each must be at least 1"),
        ({"max_num_reqs": 0}, "at most 0 requests at once, and at least 1 is needed"),
        ({"max_tokens": 8}, "at most 8 tokens a step, where the smallest draft needs 9"),
        ({"limit": 0}, "a limit of 0 graphs, where each model needs one"),
        ({"limit": 1, "drafter": True}, "a limit of 1 graphs, where each model needs one"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(changes, cause) -> None:
    values = {"draft_sizes": [8], "batch_sizes": [1, 2, 4], "max_num_reqs": 4, "max_tokens": 64, **changes}
    with pytest.raises(ConfigError) as caught:
        plan_graphs(**values)
    assert caught.value.cause == cause


SIZES_OF_VLLM = (*CAPTURE_SIZES, *range(272, 513, 16))


@pytest.mark.parametrize(
    ("max_num_reqs", "stock", "last"),
    [
        # vLLM stops at twice the requests
        (1, (1, 2), 32),
        (4, (1, 2, 4, 8), 104),
        (16, (1, 2, 4, 8, 16, 24, 32), 400),
        (32, SIZES_OF_VLLM[:11], 512),
        # as far as steps go that are captured unasked
        (256, SIZES_OF_VLLM, 512),
        # a model or a platform for which vLLM captures more
        (256, (*SIZES_OF_VLLM, 1024), 1024),
    ],
)
def test_capture_sizes_go_on_until_they_hold_steps_with_24_drafts(max_num_reqs, stock, last) -> None:
    sizes = capture_sizes(stock, max_num_reqs, 24, 8192)
    assert sizes[: len(stock)] == list(stock)
    assert sizes[-1] == last and set(sizes[len(stock) :]) <= set(SIZES_OF_VLLM)


def test_no_size_is_captured_that_no_step_has() -> None:
    assert capture_sizes((1, 2, 4, 8), 4, 24, 100)[-1] == 100
    assert capture_sizes((1, 2), 1, 1, 8192) == [1, 2]
    assert capture_sizes((), 16, 24, 8192) == []


@given(st.integers(1, 600), st.integers(1, 64), st.integers(64, 9000), st.integers(1, 80))
def test_stocks_sizes_all_stay_and_nothing_comes_between_them(max_num_reqs, drafts, max_tokens, count) -> None:
    stock = [size for size in SIZES_OF_VLLM[:count] if size <= max_tokens]
    sizes = capture_sizes(stock, max_num_reqs, drafts, max_tokens)
    assert sizes == sorted(set(sizes)) and sizes[: len(stock)] == stock and sizes[-1] <= max(max_tokens, stock[-1])
    assert sizes[-1] >= min(max_num_reqs * (1 + drafts), MOST_CAPTURED, max_tokens)
