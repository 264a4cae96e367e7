"""What asking a drafter takes, learned as it is asked. Pure.

What belongs here: one price per size of the batch. A model's pass takes most of its time whatever the number of
requests, so neither its time per request nor its time alone holds for another batch.
"""

from __future__ import annotations

PRICE_MEMORY = 0.9
"""Weight left to what was known, after each further time; before that, the mean of all times."""


class Price:
    """Milliseconds that something takes, by the octave of how many requests it is done for."""

    def __init__(self) -> None:
        # octave -> milliseconds, and how often it was seen
        self._known: dict[int, tuple[float, int]] = {}

    def spent(self, num_requests: int, ms: float) -> None:
        octave = num_requests.bit_length()
        known, times = self._known.get(octave, (0.0, 0))
        weight = max(1.0 / (times + 1), 1.0 - PRICE_MEMORY)
        self._known[octave] = (known + weight * (ms - known), times + 1)

    def of(self, num_requests: int) -> float:
        """What it takes for so many requests; where that is not known, as for the nearest number that is. 0.0: nothing
        is known."""
        if not self._known:
            return 0.0
        octave = num_requests.bit_length()
        return self._known[min(self._known, key=lambda known: (abs(known - octave), known))][0]
