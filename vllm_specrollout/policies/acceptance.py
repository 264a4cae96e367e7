"""How likely a drafted node is accepted, learned from what was.

What belongs here: from a drafter's own word to a probability. A node's estimate is that word, times what experience
says of it, from the general to the particular:

    p = q * bucket[source, q] * depth[source, depth] * request[request]

`bucket` corrects a drafter that boasts or is modest, `depth` one whose drafts fade faster than it says, `request` an
answer that is easier or harder to draft for than its batch; a new answer starts from its problem's factor. Each is the
posterior mean of a rate, (accepted + k) / (expected + k), where what is expected already holds the factors before it,
so that together they count each surprise once. All counts fade, with observations and with time: a drafter that was
written off is believed a little more every step, until it is tried again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_specrollout.policies.pick import BUCKETS, CERTAIN, DEPTHS, SOURCES, Reached, reached
from vllm_specrollout.types import Feedback, RequestView

Array = npt.NDArray[np.float64]

_BUCKET_PRIOR, _DEPTH_PRIOR = 20.0, 60.0  # observations that the word before it counts for
_LEAST_PRIOR, _MOST_PRIOR = 5.0, 200.0  # the same of a request: the less its kind differ, the more
_USUAL_SPREAD, _SPREAD_PRIOR = 1 / 40, 400.0  # variance of requests' factors before any are known, and its weight
_SPREAD_MEMORY = 0.9995  # weight left to what a request tells of that spread after each further draft
_PER_OBSERVATION = 0.9995  # weight left to an observation after each further one of the same cell
_PER_STEP = 0.9995  # and after each step, whatever it observed
_REQUEST_MEMORY = 0.95  # weight left to a request's observations after each further draft of it
_NEW_WEIGHTS = 0.5  # weight left to everything when the policy's weights change
_LOWEST, _HIGHEST = 0.05, 2.0  # of a request's factor
_PROBLEMS = 65_536  # problems remembered; those seen least recently go first


class _Rates:
    """Observed over expected, per cell, both starting at `prior`."""

    def __init__(self, shape: tuple[int, int], prior: float) -> None:
        self.accepted = np.zeros(shape)
        self.expected = np.zeros(shape)
        self.prior = prior
        # what they come to: 1 where nothing has been seen
        self.factor = np.ones(shape)

    def observe(self, cells: npt.NDArray[np.int64], accepted: Array, expected: Array) -> None:
        """cells [N] flat indices, accepted [N] 0 or 1, expected [N] probabilities."""
        size, shape = self.accepted.size, self.accepted.shape
        fade = (_PER_STEP * _PER_OBSERVATION ** np.bincount(cells, minlength=size)).reshape(shape)
        self.accepted = self.accepted * fade + np.bincount(cells, accepted, size).reshape(shape)
        self.expected = self.expected * fade + np.bincount(cells, expected, size).reshape(shape)
        self.factor = (self.accepted + self.prior) / (self.expected + self.prior)

    def scale(self, share: float) -> None:
        """Every observation counts for `share` of what it did."""
        self.accepted *= share
        self.expected *= share
        self.factor = (self.accepted + self.prior) / (self.expected + self.prior)


class Acceptance:
    """The factors, and how they are learned."""

    def __init__(self, reached: Callable[[Sequence[Feedback]], Reached] = reached) -> None:
        self._reached = reached
        self._buckets = _Rates((SOURCES, BUCKETS), _BUCKET_PRIOR)
        self._depths = _Rates((SOURCES, len(DEPTHS)), _DEPTH_PRIOR)
        # request -> [accepted, expected]; problem -> the same, left by its answers
        self._requests: dict[str, list[float]] = {}
        self._problems: OrderedDict[str, list[float]] = OrderedDict()
        # how far requests were off the same way twice, and how far they would be if their factors had variance 1
        self._repeated, self._possible = _USUAL_SPREAD * _SPREAD_PRIOR, _SPREAD_PRIOR
        self._version = 0

    def tables(self) -> tuple[Array, Array]:
        """Factors [SOURCES, BUCKETS] by source and probability, [SOURCES, len(DEPTHS)] by source and depth."""
        return self._buckets.factor, self._depths.factor

    def factor(self, request_id: str) -> float:
        """How much easier than its batch the request is to draft for; 1.0: just as easy, or not known."""
        counts = self._requests.get(request_id)
        if counts is None:
            return 1.0
        prior = self.request_prior
        return min(max((counts[0] + prior) / (counts[1] + prior), _LOWEST), _HIGHEST)

    @property
    def request_prior(self) -> float:
        """Observations that a request's batch counts for against its own: 1 / the variance of requests' factors.

        A request that differs from its batch is off the same way again and again; luck is not. So with A - E what it
        has been off by and a - e what its next draft is, the mean of (A - E)(a - e) is that variance times E e.
        """
        spread = self._repeated / self._possible
        return 1.0 / min(max(spread, 1.0 / _MOST_PRIOR), 1.0 / _LEAST_PRIOR)

    def meet(self, view: RequestView) -> None:
        """A running request: at first sight it takes over what its problem's answers left."""
        if view.request_id not in self._requests:
            left = self._problems.get(view.problem_id, (0.0, 0.0))
            self._requests[view.request_id] = [left[0], left[1]]

    def weights_are(self, version: int) -> None:
        """The policy's version; what was learned of another one counts half."""
        if version != self._version:
            self._version = version
            self.forget_half()

    def finish(self, request_id: str, problem_id: str) -> None:
        """A request is over; half of what it taught is left to the next answer to its problem."""
        counts = self._requests.pop(request_id, None)
        if counts is None or not counts[1]:
            return
        self._problems[problem_id] = [0.5 * counts[0], 0.5 * counts[1]]
        self._problems.move_to_end(problem_id)
        if len(self._problems) > _PROBLEMS:
            self._problems.popitem(last=False)

    def forget_half(self) -> None:
        """The policy's weights have changed: what was learned is still the best guess, but a weaker one."""
        self._buckets.scale(_NEW_WEIGHTS)
        self._depths.scale(_NEW_WEIGHTS)
        for counts in (*self._requests.values(), *self._problems.values()):
            counts[0] *= _NEW_WEIGHTS
            counts[1] *= _NEW_WEIGHTS

    def observe(self, feedback: Sequence[Feedback]) -> None:
        """Count the nodes the target reached: those whose parent was accepted (or is the root)."""
        if not feedback:
            return
        nodes = self._reached(feedback)
        self._buckets.observe(nodes.bucket, nodes.accepted, nodes.q)
        # what a table explains already is no news to the next one
        by_bucket = np.minimum(nodes.q * self._buckets.factor.ravel()[nodes.bucket], CERTAIN)
        self._depths.observe(nodes.depth, nodes.accepted, by_bucket)
        by_depth = np.minimum(by_bucket * self._depths.factor.ravel()[nodes.depth], CERTAIN)
        count = len(feedback)
        sums = (
            np.bincount(nodes.owner, nodes.accepted, count).tolist(),
            np.bincount(nodes.owner, by_depth, count).tolist(),
        )
        for item, taken, expected in zip(feedback, *sums, strict=True):
            counts = self._requests.get(item.request_id)
            if counts is None:
                continue  # over since
            self._repeated = _SPREAD_MEMORY * self._repeated + (counts[0] - counts[1]) * (taken - expected)
            self._possible = _SPREAD_MEMORY * self._possible + counts[1] * expected
            counts[0] = _REQUEST_MEMORY * counts[0] + taken
            counts[1] = _REQUEST_MEMORY * counts[1] + expected
