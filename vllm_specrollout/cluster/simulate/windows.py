"""Which window is worth most: closed formulas of tokens per millisecond, and Algorithm 2 with them.

Source: SpecActor, section 4.1. The formulas are those of the simulated groups, where a decoupled request decodes
plainly while its window is not complete; the paper's own formulas have it wait. A decoupled request is either ready
(its window is complete) or not:

- ready, it yields (1 - p**w) / (1 - p) tokens, and stays ready if all of them were guessed;
- not ready, it yields one token, and gets ready if the drafter guessed that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from vllm_specrollout.cluster.simulate.guesses import coupled_tokens
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.workload import Ints

MAX_WINDOW = 16
_SIGMAS = 2.0  # below the average by more than chance


def coupled_tgs(p: float, window: int, batch: int, verifier: StepLine, drafter: StepLine) -> float:
    """Tokens per ms and request: draft, then verify."""
    ms = window * drafter.step_ms(batch) + verifier.step_ms(batch, batch * window)
    return coupled_tokens(p, window) / ms


def decoupled_tgs(p: float, window: int, batch: int, verifier: StepLine, drafter: StepLine) -> float:
    """Tokens per ms and request: draft while the window before, or others, are verified; nobody waits."""
    draft_ms = window * drafter.step_ms(batch)
    # the target's own token takes the place of a window's first draft, so one less is left to verify
    size = max(window - 1, 1)
    ready = 1.0
    for _ in range(3):  # the share of ready requests and the length of a step depend on each other
        verify_ms = verifier.step_ms(batch, batch * size * ready)
        steps = math.ceil(draft_ms / verify_ms)
        stays = p**window if window > 1 and steps == 1 else 0.0
        # so many guesses of the drafter in a row have to be right
        comes = p**steps * (1.0 - p) / (1.0 - p**steps)
        ready = comes / (1.0 - stays + comes)
    return (ready * coupled_tokens(p, size) + 1.0 - ready) / verify_ms


def plain_tgs(batch: int, verifier: StepLine) -> float:
    """Tokens per ms and request without drafts."""
    return 1.0 / verifier.step_ms(batch)


Tgs = Callable[[float, int, int, StepLine, StepLine], float]


def best_window(tgs: Tgs, p: float, batch: int, verifier: StepLine, drafter: StepLine) -> int:
    """The window with most tokens per ms, the shortest of several."""
    return max(range(1, MAX_WINDOW + 1), key=lambda window: tgs(p, window, batch, verifier, drafter))


class Reconfiguration:
    """Algorithm 2 at the present batch: one window for the group, own ones for requests well below its average.

    The paper prints batch 1 for those requests. In a batch that still shares its verifier that is wrong: it lets those
    draft most that are accepted least.
    """

    def __init__(self, verifier: StepLine, drafter: StepLine) -> None:
        self._verifier, self._drafter = verifier, drafter

    def __call__(self, hits: Ints, trials: Ints) -> tuple[Ints, np.ndarray]:
        """Args: [R] draft tokens found right, and judged. Returns: [R] windows; [R] true, all stay decoupled."""
        batch = len(hits)
        average = (float(hits.sum()) + 1.0) / (float(trials.sum()) + 2.0)
        windows = np.full(batch, self._best(average, batch), dtype=np.int64)
        own = (hits + 1.0) / (trials + 2.0)
        low = own < average - _SIGMAS * np.sqrt(average * (1.0 - average) / np.maximum(trials, 1))
        # 20 levels of acceptance are enough for windows, and save the search for each request
        for level in np.unique(np.round(own[low] * 20.0)):
            mine = low & (np.round(own * 20.0) == level)
            windows[mine] = self._best(float(level) / 20.0, batch)
        return windows, np.ones(batch, dtype=bool)

    def _best(self, p: float, batch: int) -> int:
        return best_window(decoupled_tgs, min(p, 0.999), batch, self._verifier, self._drafter)
