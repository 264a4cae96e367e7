import numpy as np
import pytest

from tests.unit.budgets.builders import timing
from tests.unit.budgets.papers.builders import Line, planned, requests, star_of_chains, step
from vllm_specrollout.budgets.papers.fastgrpo import K_MAX, FastGrpoBudget
from vllm_specrollout.budgets.papers.plans import Strategy
from vllm_specrollout.config.budgets import FastGrpoOptions
from vllm_specrollout.types import StepTiming


def _fastgrpo(max_nodes: int = 64, cost: Line | None = None, **options: float) -> FastGrpoBudget:
    given = FastGrpoOptions(**options)  # type: ignore[arg-type]
    return FastGrpoBudget(max_nodes, 16, given, cost=cost or Line(10.0, 0.0))


def _ms(rows: int, knee: float) -> float:
    return 10.0 + 0.3 * max(rows - knee, 0.0)


def _timings(knee: float) -> list[StepTiming]:
    rng, result = np.random.default_rng(0), []
    for _ in range(640):
        batch = int(rng.integers(1, 9))
        rows = int(rng.integers(batch, 257))
        result.append(timing(batch, rows - batch, _ms(rows, knee) * float(rng.normal(1.0, 0.02))))
    return result


def _live(budget: FastGrpoBudget, batches: list[int], knee: float) -> list[float]:
    """C_peak after each step of an engine that drafts all it may."""
    rng, peaks = np.random.default_rng(0), []
    for batch in batches:
        strategy = None if budget.steps_off(batch) else budget.strategy(batch)
        nodes = 0 if strategy is None else batch * strategy.nodes
        cost = timing(batch, nodes, _ms(batch + nodes, knee) * float(rng.normal(1.0, 0.01)))
        budget.observe(step([0] * batch, [0] * batch, timing=cost))
        peaks.append(budget.c_peak)
    return peaks


@pytest.mark.parametrize(
    ("c_peak", "batch", "expected"),
    [
        (64, 1, Strategy(63, 6, 8)),
        (64, 4, Strategy(15, 4, 8)),
        (64, 16, Strategy(3, 2, 3)),
        (64, 32, Strategy(1, 1, 1)),
        (64, 33, None),
        (512, 1, Strategy(64, 9, 8)),
    ],
)
def test_size_depth_and_beam_follow_the_equations(c_peak: int, batch: int, expected: Strategy | None) -> None:
    assert _fastgrpo(c_peak=c_peak).strategy(batch) == expected


def test_a_c_peak_that_was_set_is_not_measured() -> None:
    budget = _fastgrpo(c_peak=64)
    budget.seed(_timings(200))
    _live(budget, [4] * 200, knee=20.0)
    assert budget.c_peak == 64.0 and budget.knee is None


@pytest.mark.parametrize("knee", [24, 48, 96])
@pytest.mark.parametrize("is_profile", [False, True])
def test_the_knee_is_learned_from_the_steps_that_are_run_or_from_a_profile_before_the_first(
    knee: int, is_profile: bool
) -> None:
    budget = _fastgrpo()
    if is_profile:
        budget.seed(_timings(knee))
    else:
        for cost in _timings(knee):
            budget.observe(step([], [], timing=cost))
    assert budget.knee is not None and budget.c_peak == pytest.approx(knee, rel=0.3)


@pytest.mark.parametrize("batch", [1, 16, 17, 64, 128])
@pytest.mark.parametrize("is_level", [True, False])
def test_it_starts_drafting_at_any_constant_batch(batch: int, is_level: bool) -> None:
    """A batch that never changes has one row count until something is drafted."""
    budget = _fastgrpo()
    batches = [batch] * 300 if is_level else [batch - i % max(batch // 16, 1) for i in range(300)]
    _live(budget, batches, knee=300.0)
    strategy = budget.strategy(batch)
    assert strategy is not None and strategy.nodes == pytest.approx(min(300 / batch - 1, 64), rel=0.6, abs=1.0)


def test_the_sweep_doubles_its_rows_until_time_grows() -> None:
    budget = _fastgrpo()
    peaks = _live(budget, [64] * 400, knee=200.0)
    # 128 and 256 rows are tried, one after the other; the last that was level is within a doubling of the knee
    assert max(peaks) == 256.0
    assert 100.0 <= peaks[-1] <= 200.0


def test_an_engine_bound_by_arithmetic_soon_stops_drafting() -> None:
    budget = _fastgrpo()
    rng = np.random.default_rng(0)
    drafted = []
    for _ in range(200):
        nodes = 0 if budget.steps_off(64) else 64 * budget.limits(requests(64)).max_nodes[0]
        drafted.append(int(nodes))
        cost = timing(64, int(nodes), 0.2 * (64 + nodes) * float(rng.normal(1.0, 0.01)))
        budget.observe(step([0], [0], timing=cost))
    assert any(drafted[:32]) and not any(drafted[32:])


def test_before_anything_is_measured_nothing_is_drafted() -> None:
    budget = _fastgrpo(24)
    assert budget.steps_off(1) == 1 and budget.knee is None
    budget.observe(step([0], [0], timing=timing(1, 0, 10.0)))
    assert budget.steps_off(1) == 0


def test_a_batch_at_the_knee_is_left_alone() -> None:
    budget = _fastgrpo(24, c_peak=32)
    assert [budget.steps_off(n) for n in (16, 17)] == [0, 1]
    plan = planned(budget, requests(17), star_of_chains(2, 2))
    assert (plan.is_on, plan.reason) == (False, "batch at the knee")


def test_trees_keep_the_bounds_of_the_equations() -> None:
    budget = _fastgrpo(c_peak=12)
    trees = planned(budget, requests(1), star_of_chains(16, 6)).trees
    assert trees.num_nodes == 11
    assert int(trees.depth.max()) == 4 and np.bincount(trees.depth).max() <= K_MAX


def test_branches_and_drafting_are_not_taken_for_the_forward_pass() -> None:
    plain, loaded = _fastgrpo(), _fastgrpo(cost=Line(10.0, 0.0, branch=0.5))
    for rows in (4, 8, 16, 32, 64, 128):
        ms = _ms(rows, 32.0)
        plain.observe(step([], [], timing=timing(1, rows - 1, ms)))
        loaded.observe(step([], [], timing=timing(1, rows - 1, ms + 2.0 + 1.5, ask_ms=2.0, branches=3)))
    assert loaded._ms.keys() == plain._ms.keys()
    assert [ms[0] for ms in loaded._ms.values()] == pytest.approx([ms[0] for ms in plain._ms.values()])


def test_steps_with_prompts_say_nothing_of_the_knee() -> None:
    budget = _fastgrpo(24)
    for _ in range(200):
        budget.observe(step([], [], timing=StepTiming(1, 200, 0, 0, 1, 90.0, is_decode_only=False)))
    assert budget.c_peak == 0.0
