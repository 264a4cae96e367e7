"""Two arrangements that are tried in turns: the faster one wins, and the other one takes few steps."""

from __future__ import annotations

import random

import pytest

from vllm_specrollout.cluster.duel import LOSERS_SHARE, Duel


def run(duel: Duel, rng: random.Random, ms: tuple[float, float], steps: int, *, noise: float = 0.2, batch: int = 4):
    """Steps of each arrangement."""
    taken = [0, 0]
    for _ in range(steps):
        choice = duel.choice
        taken[choice] += 1
        duel.step(batch, batch, ms[choice] * rng.lognormvariate(0.0, noise))
    return taken


@pytest.mark.parametrize("ms", [(1.0, 0.9), (0.9, 1.0), (1.0, 0.5), (1.0, 3.0)])
def test_the_faster_arrangement_wins(ms: tuple[float, float]) -> None:
    right = 0
    for seed in range(100):
        duel = Duel()
        run(duel, random.Random(seed), ms, 500)
        right += duel.winner(4) == int(ms[1] < ms[0])
    assert right >= 95


def test_of_two_alike_the_first_one_wins_mostly() -> None:
    won = 0
    for seed in range(100):
        duel = Duel()
        run(duel, random.Random(seed), (1.0, 1.0), 500, noise=0.05)
        won += duel.winner(4) == 0
    assert won >= 80


@pytest.mark.parametrize("ms", [(1.0, 0.8), (0.8, 1.0), (1.0, 5.0)])
def test_the_slower_arrangement_takes_few_steps(ms: tuple[float, float]) -> None:
    duel = Duel()
    taken = run(duel, random.Random(1), ms, 20_000)
    assert taken[int(ms[0] < ms[1])] <= 1.6 * LOSERS_SHARE * 20_000


def test_what_changes_later_is_noticed() -> None:
    duel, rng = Duel(), random.Random(2)
    run(duel, rng, (1.0, 0.7), 500)
    assert duel.winner(4) == 1
    run(duel, rng, (0.7, 1.0), 12_000)
    assert duel.winner(4) == 0


def test_batches_of_other_sizes_are_another_contest() -> None:
    duel, rng = Duel(), random.Random(3)
    run(duel, rng, (1.0, 0.7), 500, batch=1)
    run(duel, rng, (0.7, 1.0), 500, batch=32)
    assert duel.winner(1) == 1 and duel.winner(32) == 0 and duel.winner(8) is None


def test_a_stalled_step_decides_nothing() -> None:
    duel, rng = Duel(), random.Random(4)
    for step in range(500):
        stall = 100.0 if duel.choice == 1 and step % 40 == 30 else 1.0
        duel.step(4, 4, stall * (1.0, 0.7)[duel.choice] * rng.lognormvariate(0.0, 0.1))
    assert duel.winner(4) == 1


def test_steps_with_other_requests_than_before_do_not_count() -> None:
    duel = Duel()
    for step in range(2000):
        duel.step(4 + step % 2, 4, 1.0)
    assert duel.winner(4) is None


def test_it_begins_with_the_first_arrangement() -> None:
    assert Duel().choice == 0
