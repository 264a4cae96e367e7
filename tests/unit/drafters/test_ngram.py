import numpy as np

from vllm_specrollout._core import HistoryIndex
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.config.drafters import NgramConfig
from vllm_specrollout.drafters import ngram
from vllm_specrollout.drafters.ngram import MOST_TOKENS, NgramDrafter
from vllm_specrollout.types import RequestBatch, RequestView

REPEATED = np.tile(np.arange(10, dtype=np.int32), 30)


def drafted(drafter: NgramDrafter, *names: str) -> list[bool]:
    """Whether each of these requests has a draft."""
    batch = RequestBatch.of([RequestView(name, REPEATED, 100, 1000) for name in names])
    return (drafter.propose(batch, FixedBudget(4, 4).limits(batch)).sizes > 0).tolist()


def test_who_comes_when_there_is_no_room_is_not_drafted_for_until_another_one_has_ended(monkeypatch) -> None:
    # two of them fit, and a third does not
    monkeypatch.setattr(ngram, "MOST_TOKENS", 2 * len(REPEATED) + 50)
    drafter = NgramDrafter(NgramConfig())
    assert drafted(drafter, "a", "b", "c") == [True, True, False]
    assert drafted(drafter, "c", "b") == [False, True]
    drafter.forget("a")
    assert drafted(drafter, "c", "b", "d") == [True, True, False]
    for name in ("b", "c", "d"):
        drafter.forget(name)
    assert not drafter._indices and not drafter._left_out


def test_two_gibibytes_hold_the_tokens_that_indices_of_random_ones_take() -> None:
    index, share = HistoryIndex(min_match=8, max_match=64, max_matches=32), 2048
    index.sync(index.open(0), np.random.default_rng(0).integers(0, 150_000, MOST_TOKENS // share, dtype=np.int32))
    assert 0.5 < index.nbytes / ((2 << 30) // share) < 1.05
