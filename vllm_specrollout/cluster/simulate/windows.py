"""Which window is worth most to a simulated group, and Algorithm 2 for one.

Source: SpecActor, section 4.1. What a window yields is said by `decoupled/rates.py` and `decoupled/timetable.py`, for
engines and for simulated groups alike; so is who matches less than the batch by more than chance. What differs from
`decoupled/reconfigure.py`, and why:

- The group's own window is planned anew as well. A simulated batch shrinks from hundreds of requests to one, and the
  paper's plan is of the batch at the beginning. An engine leaves its window to its user.
- A request that is below gets the window that would be best if all matched as it does, which needs no search of its
  own for each batch and mode.
- All stay decoupled. A simulated request that waits would save drafter time only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.workload import Ints
from vllm_specrollout.decoupled.rates import decoupled_rate
from vllm_specrollout.decoupled.reconfigure import MAX_WINDOW, surely_below

Rate = Callable[[StepLine, StepLine, int, int, float], float]
"""draft, verify, batch, window, match rate -> tokens per millisecond of a request."""


def best_window(rate: Rate, p: float, batch: int, verifier: StepLine, drafter: StepLine) -> int:
    """The window with most tokens per ms, the shortest of several."""
    return max(range(1, MAX_WINDOW + 1), key=lambda window: rate(drafter, verifier, batch, window, p))


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
        low = surely_below(trials, hits)
        # 20 levels of acceptance are enough for windows, and save the search for each request
        for level in np.unique(np.round(own[low] * 20.0)):
            mine = low & (np.round(own * 20.0) == level)
            windows[mine] = self._best(float(level) / 20.0, batch)
        return windows, np.ones(batch, dtype=bool)

    def _best(self, p: float, batch: int) -> int:
        return best_window(decoupled_rate, min(p, 0.999), batch, self._verifier, self._drafter)
