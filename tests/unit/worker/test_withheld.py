from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.trees import batch_of, chain
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.trees.batch import chains
from vllm_specrollout.types import EMPTY_TREE, RequestBatch, RequestView
from vllm_specrollout.worker.withheld import (
    MOST_DIFFERING,
    SELF_CHECK,
    STEPS_PER_TOKEN,
    TOKENS_PER_TIE,
    WINDOW,
    SelfCheckError,
    Withheld,
)


@dataclass
class Engine:
    """A batch whose requests draft chains, hold what they are told to, and decode plainly meanwhile."""

    num_requests: int
    most_levels: int
    seed: int
    # probability that the token which a draft was verified to have is another one than that of plain decoding
    wrong: float = 0.0
    is_strict: bool = False
    stopped: bool = False
    told: list[tuple[int, int]] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    # tokens of withheld verdicts, and those of them that were decoded plainly since
    withheld: int = 0
    plain: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.guard = Guard(is_strict=self.is_strict)
        self.checks = Withheld(self.guard, self.stop, lambda checked, differing: self.told.append((checked, differing)))
        self.lengths = {f"r{i}": int(self.rng.integers(1, 50)) for i in range(self.num_requests)}

    def stop(self) -> None:
        self.stopped = True

    def step(self, *, has_branches: bool = False) -> None:
        rng, checks, names = self.rng, self.checks, list(self.lengths)
        levels = [0 if name in checks.held else int(rng.integers(0, self.most_levels + 1)) for name in names]
        trees = chains(names, [[7] * count for count in levels])
        chosen = checks.choose(trees) if checks.drafted >= checks.due and trees.num_nodes else ""
        if trees.num_nodes:
            checks.drafted += int(np.count_nonzero(trees.sizes))
        for name, most in zip(names, levels, strict=True):
            accepted, length = int(rng.integers(0, most + 1)), self.lengths[name]
            if name in checks.held:
                self.plain += 1
                checks.compare(name, [length % 97], length, 0)
            elif name == chosen and accepted:
                self.withheld += accepted
                path = [(length + 1 + i) % 97 + 100 * (rng.random() < self.wrong) for i in range(accepted)]
                checks.hold(name, path, length + 1, 0, has_branches=has_branches)
            elif most:
                self.lengths[name] += accepted
            self.lengths[name] += 1


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1 << 30))
@example(40, 2, 0)
def test_no_more_is_decoded_plainly_than_its_share_of_the_steps_with_drafts(
    num_requests: int, most_levels: int, seed: int
) -> None:
    engine = Engine(num_requests, most_levels, seed)
    for _ in range(120):
        engine.step()
        assert engine.plain <= engine.withheld <= engine.checks.drafted / STEPS_PER_TOKEN
    assert sum(checked for checked, _ in engine.told) == engine.checks.checked == engine.plain
    assert engine.checks.differing == 0 and not engine.stopped


def test_nobody_is_held_before_it_is_paid_for_and_then_what_is_earned_is_spent() -> None:
    engine = Engine(16, 6, seed=3)
    while engine.checks.drafted < STEPS_PER_TOKEN * 6:
        engine.step()
        assert not engine.checks.held
    for _ in range(1500):
        engine.step()
    unspent = engine.checks.drafted / STEPS_PER_TOKEN - engine.withheld
    assert 0 <= unspent <= 2 * 6 < engine.withheld, "what is earned is spent"


def test_a_deeper_draft_than_any_before_waits_until_it_is_paid_for() -> None:
    checks = Withheld(Guard(), lambda: None, lambda checked, differing: None)
    checks.drafted = checks.due
    assert checks.choose(chains(["a"], [[1, 2, 3]])) == "" and checks.due == 3 * STEPS_PER_TOKEN
    checks.drafted = checks.due
    assert checks.choose(chains(["a"], [[1, 2, 3, 4]])) == "" and checks.due == 4 * STEPS_PER_TOKEN
    checks.drafted = checks.due
    assert checks.choose(chains(["none", "a"], [[], [1]])) == "a", "and who has no draft is not chosen"


def held(tokens: list[int], *, is_strict: bool = False, has_branches: bool = False) -> Engine:
    engine = Engine(1, 4, seed=0, is_strict=is_strict)
    engine.checks.hold("r0", tokens, 10, 0, has_branches=has_branches)
    return engine


def test_tokens_come_one_by_one_or_several_at_once_and_more_than_were_withheld() -> None:
    engine = held([4, 5, 6])
    engine.checks.compare("r0", [4], 10, 0)
    assert engine.checks.held and engine.checks.checked == 1
    engine.checks.compare("r0", [5, 6, 9], 11, 0)
    assert not engine.checks.held and engine.checks.checked == 3 and engine.checks.differing == 0
    assert engine.told == [(1, 0), (2, 0)]


@pytest.mark.parametrize(("at", "version"), [(11, 0), (9, 0), (10, 1)])
def test_another_text_or_other_weights_end_a_comparison(at: int, version: int) -> None:
    engine = held([4, 5])
    engine.checks.compare("r0", [9], at, version)
    assert not engine.checks.held and engine.told == [] and not engine.guard.failures


def test_a_request_that_is_over_is_compared_no_more() -> None:
    engine = held([4, 5])
    engine.checks.compare("r0", [4], 10, 0)
    engine.checks.drop("r0")
    engine.checks.drop("never seen")
    assert not engine.checks.held and engine.checks.checked == 1


def test_behind_a_difference_the_path_is_void() -> None:
    engine = held([4, 5, 6])
    engine.checks.compare("r0", [9], 10, 0)
    assert (engine.checks.checked, engine.checks.differing) == (1, 1) and not engine.checks.held


def test_where_rows_are_alike_one_difference_ends_branches_and_one_more_drafts(caplog) -> None:
    engine = held([4, 5], has_branches=True)
    engine.checks.is_exact = True
    # held beside it, before branches were given up
    engine.checks.hold("r1", [4], 10, 0, has_branches=True)
    engine.checks.compare("r0", [4, 8], 10, 0)
    engine.checks.compare("r1", [8], 10, 0)
    assert not engine.checks.may_branch and not engine.stopped
    assert "had token 5 behind 11 tokens, and plain decoding has 8 there" in caplog.text
    assert "self-check failed; drafts are chains from now on" in caplog.text and len(caplog.records) == 1
    engine.checks.hold("r0", [4], 20, 0, has_branches=False)
    engine.checks.compare("r0", [8], 20, 0)
    assert engine.stopped and not engine.checks.is_on and engine.guard.failures == {SELF_CHECK: 2}
    assert "nothing is drafted from now on" in caplog.text and len(caplog.records) == 2
    engine.checks.hold("r0", [4], 30, 0, has_branches=False)
    assert not engine.checks.held, "nothing is checked any more"


def test_a_strict_guard_raises_the_difference() -> None:
    engine = held([4], is_strict=True)
    engine.checks.is_exact = True
    with pytest.raises(SelfCheckError, match="token 4"):
        engine.checks.compare("r0", [8], 10, 0)
    assert engine.stopped


def compare(engine: Engine, tokens: int, *, differs: bool) -> None:
    """So many withheld tokens, the last of which may be another one."""
    path = [4] * tokens
    engine.checks.hold("r0", path, 10, 0, has_branches=False)
    if engine.checks.held:
        engine.checks.compare("r0", [*path[1:], 8] if differs else path, 10, 0)


def test_where_ties_are_to_be_expected_it_is_their_rate_that_counts() -> None:
    engine = Engine(1, 4, seed=0)
    for _ in range(3):  # a few in each window, for ever
        for i in range(WINDOW):
            compare(engine, 1, differs=i < MOST_DIFFERING)
    assert not engine.stopped and engine.checks.differing == 3 * MOST_DIFFERING
    for _ in range(MOST_DIFFERING):
        compare(engine, 1, differs=True)
        assert not engine.stopped, "the oldest have left the window"
    compare(engine, 1, differs=True)
    assert engine.stopped


@pytest.mark.parametrize(("every", "is_fault"), [(2 * TOKENS_PER_TIE, False), (TOKENS_PER_TIE, False), (10, True)])
def test_longer_paths_may_hold_more_ties(every: int, is_fault: bool) -> None:
    engine, tokens = Engine(1, 4, seed=0), 0
    for _ in range(WINDOW):
        tokens += 10
        compare(engine, 10, differs=tokens % every < 10)
    assert engine.stopped is is_fault


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_fault_is_noticed_within_2000_steps(seed: int) -> None:
    engine = Engine(8, 6, seed, wrong=0.5)
    engine.checks.is_exact = True
    steps = 0
    while not engine.stopped:
        engine.step(has_branches=engine.checks.may_branch)
        steps += 1
    assert steps <= 2000 and engine.guard.failures == {SELF_CHECK: 2}


def test_who_is_held_gets_no_draft_and_after_a_fault_nobody_a_branch() -> None:
    batch = RequestBatch.of([RequestView(str(i), np.zeros(3, np.int32), 1, 50, max_draft_tokens=8) for i in range(3)])
    checks = Withheld(Guard(), lambda: None, lambda checked, differing: None)
    checks.hold("1", [4], 10, 0, has_branches=True)
    checks.narrow(batch)
    assert batch.max_nodes.tolist() == [8, 0, 8] and not batch.is_chain.any()
    checks.may_branch = False
    checks.narrow(batch)
    assert batch.is_chain.all()


def test_whoever_has_a_draft_may_be_chosen_wherever_it_stands() -> None:
    checks = Withheld(Guard(), lambda: None, lambda checked, differing: None)
    trees = batch_of([EMPTY_TREE, chain([1]), EMPTY_TREE, chain([2])])
    checks.choose(trees)
    checks.drafted = 1 << 20
    assert {checks.choose(trees) for _ in range(4)} == {"1", "3"}
