import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.budgets.builders import batch
from vllm_specrollout import _core
from vllm_specrollout.drafters.levels import Levels
from vllm_specrollout.types import SOURCES, TENTHS, DraftLimits, TreeBatch

SURVIVAL = np.linspace(0.05, 0.95, TENTHS)


def limits(depths: list[int], chains: list[bool]) -> DraftLimits:
    return DraftLimits(np.full(len(depths), 64, np.int32), np.asarray(depths, np.int32), np.asarray(chains, np.bool_))


def drafted(num_requests: int, depth: int, width: int, ends: np.ndarray | None = None) -> Levels:
    """Token 100 r + 10 level + rank: each says where it comes from."""
    levels = Levels(num_requests, SURVIVAL, 0.0, ends)
    for level in range(depth):
        rank = np.arange(width)
        tokens = 100 * np.arange(num_requests)[:, None] + 10 * level + rank
        levels.add(tokens.astype(np.int64), np.broadcast_to(np.log(0.8 / (1 + rank)), tokens.shape).astype(np.float32))
    return levels


def sound(trees: TreeBatch) -> None:
    columns = (trees.node_start, trees.token_ids, trees.parents, trees.log_q, trees.source)
    _core.check_batch(*columns, trees.num_requests, 10_000)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_a_request_gets_a_comb_of_its_own_depth_or_a_chain(
    requests: list[tuple[int, bool, bool]], depth: int, width: int
) -> None:
    index = [i for i, (_, _, is_drafted) in enumerate(requests) if is_drafted]
    if not index:
        return
    trees = drafted(len(index), depth, width).trees(
        batch(len(requests)), limits([d for d, _, _ in requests], [c for _, c, _ in requests]), np.asarray(index), 3
    )
    sound(trees)
    assert trees.node_start[-1] <= SOURCES * 64
    for r, (most, is_chain, is_drafted) in enumerate(requests):
        tree = trees.tree(r)
        own = min(most, depth) if is_drafted else 0
        ranks = 1 if is_chain else width
        at = 100 * index.index(r) if is_drafted else 0
        assert tree.token_ids.tolist() == [at + 10 * level + rank for level in range(own) for rank in range(ranks)]
        # every node of a level hangs on the chain's node above it
        assert tree.parents.tolist() == [
            (level - 1) * ranks if level else -1 for level in range(own) for _ in range(ranks)
        ]
        assert tree.source.tolist() == [3 + min(rank, 1) for _ in range(own) for rank in range(ranks)]


def test_drafting_ends_where_a_pass_costs_more_than_its_tokens_are_worth() -> None:
    levels = Levels(4, np.full(TENTHS, 0.5), token_ms=1.0)
    worth = []
    for _ in range(4):
        levels.add(np.zeros((4, 1), np.int64), np.log(np.full((4, 1), 0.7, np.float32)))
        worth.append([levels.is_enough(pass_ms) for pass_ms in (0.3, 0.7, 1.5)])
    # 4 requests reach the levels 2 to 5 with 1, 0.5, 0.25 and 0.125 tokens
    assert worth == [[False, False, True], [False, True, True], [True, True, True], [True, True, True]]


def test_where_it_is_not_known_what_a_token_is_worth_all_levels_are_drafted() -> None:
    levels = Levels(1, np.zeros(TENTHS), token_ms=0.0)
    levels.add(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32))
    assert not levels.is_enough(1e9)


def test_below_an_end_token_no_level_is_drafted_and_no_pass_is_worth_its_while() -> None:
    ends = np.asarray([[10, -1], [-1, -1], [201, 999]], np.int32)  # of the chain, none, beside the chain
    levels = drafted(3, 4, 2, ends)
    trees = levels.trees(batch(3), limits([4, 4, 4], [False] * 3), np.arange(3), 0)
    sound(trees)
    assert [int(trees.tree(i).size) for i in range(3)] == [4, 8, 8]
    assert trees.tree(0).token_ids.tolist() == [0, 1, 10, 11]
    alone = Levels(1, np.full(TENTHS, 0.5), 1.0, np.asarray([[0]], np.int32))
    alone.add(np.zeros((1, 1), np.int64), np.log(np.full((1, 1), 0.7, np.float32)))
    assert alone.is_enough(1e-9)
