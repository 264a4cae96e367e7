"""Worth of an expensive drafter: the requests that it is asked for.

What belongs here: what each drafter takes and brings, learned from the steps that it was asked in, and the choice of
requests that follows from both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_specrollout.budgets.base import FIRST_PAUSE, PATIENCE, SHARE
from vllm_specrollout.budgets.step_cost import PRICE_MEMORY, Price
from vllm_specrollout.types import TENTHS, BoolArray, DraftLimits, FloatArray, StepPlan

_MOST_KNOWN = 30  # doubled so often, a wait is longer than any engine runs


class Merit:
    """What one expensive drafter takes and brings."""

    def __init__(self) -> None:
        self.verify_ms = 0.0
        """What verifying its drafts adds to a step, for each request that it was asked for."""
        self.num_learned = 0
        # by the tenth of how sure the next token is without it: tokens that it adds to a request, and times seen
        self._tokens, self._seen = np.zeros(TENTHS), np.zeros(TENTHS, np.int64)
        self.asked_in = 0
        """The last step that it was asked in."""

    def may_try(self, step: int, step_ms: float, ms: float) -> bool:
        """Whether steps that take so long each have earned a try of so many milliseconds since it was asked.

        Or little is known of it, its price included, which first times raise: tries then wait twice as long each time.
        """
        waited, known = step - self.asked_in, self.num_learned - PATIENCE
        return known < 0 or waited > FIRST_PAUSE << min(known, _MOST_KNOWN) or ms <= SHARE * step_ms * waited

    def added(self, sure: FloatArray) -> npt.NDArray[np.float64]:
        """[R] tokens that it adds to each request; of a tenth never seen, as in the nearest one that was."""
        seen = np.flatnonzero(self._seen)
        nearest = seen[np.abs(np.arange(TENTHS)[:, None] - seen).argmin(axis=1)]
        return np.maximum(self._tokens[nearest], 0.0)[_tenths(sure)]

    def renew(self) -> None:
        """It is another one, and begins with what was known of the one before: as if that was seen once."""
        self.num_learned, self._seen = min(self.num_learned, 1), np.minimum(self._seen, 1)

    def learn(self, sure: FloatArray, tokens: FloatArray, verify_ms: float) -> None:
        """It added so many tokens [K] to the requests that it was asked for, and so much time to each."""
        self.num_learned += 1
        self.verify_ms += max(1.0 / self.num_learned, 1.0 - PRICE_MEMORY) * (verify_ms - self.verify_ms)
        tenths = _tenths(sure)
        counts = np.bincount(tenths, minlength=TENTHS)
        of = counts > 0
        means = np.bincount(tenths, tokens, TENTHS)[of] / counts[of]
        self._seen[of] += 1
        self._tokens[of] += np.maximum(1.0 / self._seen[of], 1.0 - PRICE_MEMORY) * (means - self._tokens[of])


class Worth:
    """Whom expensive drafters are asked for: for those requests where that brings most tokens per millisecond.

    A drafter that takes next to nothing is asked for all, and first. Then an expensive one adds few tokens to a
    request whose next token is known already, and more to the others: how many is learned by how sure the next token
    is. As with nodes, one cumulative sum over the requests, those that gain most first, finds the best set. Where it is
    empty the drafter is tried all the same now and then, since what is never tried is never learned: as often as loses
    a hundredth of the time, and at first more often.
    """

    def __init__(self) -> None:
        self._merits: dict[str, Merit] = {}
        # of the step at hand, by drafter, in the order of asking: its price, the requests [R] it is asked for, the plan
        # without it; and if that is a try, the requests that it may be asked for
        self.asked: dict[str, tuple[Price, BoolArray, StepPlan, BoolArray | None]] = {}

    def narrowed(
        self, limits: DraftLimits, source: int, name: str, price: Price, without: StepPlan, step: int
    ) -> DraftLimits:
        """The limits, with an expensive drafter wanted for those requests alone that it is asked for in this step.

        Args:
            source: the drafter's.
            price: of asking it.
            without: what is planned without it.
        """
        wanted = self.wanted(name, price, without, step, limits.wanted(source) > 0)
        others = np.full(len(wanted), 0xFFFFFFFF, np.uint32) if limits.drafters is None else limits.drafters
        # a try is to show what all levels bring, whatever they are worth for one request
        token_ms = 0.0 if name in self.asked and self.asked[name][3] is not None else limits.token_ms
        return replace(limits, drafters=np.where(wanted, others, others & ~np.uint32(1 << source)), token_ms=token_ms)

    def wanted(self, name: str, price: Price, without: StepPlan, step: int, may: BoolArray) -> BoolArray:
        """[R] the requests that it is asked for, out of those that `may` [R] have drafts of it."""
        merit = self._merits.setdefault(name, Merit())
        wanted = _best(merit, price, without, may)
        is_try = not wanted.any() and merit.may_try(step, without.expected_ms, price.of(1))
        if is_try and merit.num_learned < PATIENCE:
            # at first for all, to know what that takes; later for one: that says as much of its drafts, and takes less
            wanted = may
        elif is_try and may.any():
            sure = np.where(may, _sure(without), np.inf)
            least = np.flatnonzero(sure == sure.min())
            wanted = np.arange(len(may)) == least[step % len(least)]
        if wanted.any():
            merit.asked_in = step
            self.asked[name] = price, wanted, without, may if is_try else None
        return wanted

    def learn(self, plan: StepPlan) -> bool:
        """The step is planned: what expensive drafters have added to it is known.

        Returns:
            whether a drafter that was tried is worth more than it takes.
        """
        asked, self.asked = self.asked, {}
        if not asked or plan.reach is None:
            return False
        found = False
        plans = [without for _, _, without, _ in asked.values()][1:] + [plan]
        for (name, (price, wanted, without, tried)), with_it in zip(asked.items(), plans, strict=True):
            merit, count = self._merits[name], int(wanted.sum())
            verify_ms = 0.0
            if with_it.expected_ms > 0.0:
                verify_ms = (with_it.expected_ms - without.expected_ms - price.of(count)) / count
            merit.learn(_sure(without)[wanted], (_tokens(with_it) - _tokens(without))[wanted], verify_ms)
            found |= tried is not None and bool(_best(merit, price, without, tried).any())
        return found

    def renew(self, name: str) -> None:
        """The drafter has other weights."""
        if (merit := self._merits.get(name)) is not None:
            merit.renew()

    def drop(self, name: str) -> None:
        """The drafter is switched off."""
        self._merits.pop(name, None)
        self.asked.pop(name, None)


def _best(merit: Merit, price: Price, without: StepPlan, may: BoolArray) -> BoolArray:
    """[R] the requests for which asking yields most tokens per millisecond; perhaps none."""
    num_requests = without.trees.num_requests
    wanted = np.zeros(num_requests, np.bool_)
    if merit.num_learned:
        added = np.where(may, merit.added(_sure(without)), 0.0)
        order = np.argsort(-added, kind="stable")
        tokens = num_requests + without.expected_tokens + np.concatenate([[0.0], np.cumsum(added[order])])
        ms = price.up_to(num_requests) + max(merit.verify_ms, 0.0) * np.arange(num_requests + 1)
        wanted[order[: int((tokens / (without.expected_ms + ms)).argmax())]] = True
    return wanted


def _tokens(plan: StepPlan, depth: int = 0) -> FloatArray:
    """[R] tokens that the plan's drafts are expected to add to each request; with a depth, at that one alone."""
    reach = np.zeros(0, np.float32) if plan.reach is None else plan.reach
    trees = plan.trees
    owner = np.repeat(np.arange(trees.num_requests), trees.sizes)
    weights = np.where(trees.depth == depth, reach, 0.0) if depth else reach
    return np.bincount(owner, weights, trees.num_requests).astype(np.float32)


def _sure(plan: StepPlan) -> FloatArray:
    """[R] probability that each request's next token is among its drafts."""
    return _tokens(plan, depth=1)


def _tenths(probabilities: FloatArray) -> npt.NDArray[np.int64]:
    return np.minimum((probabilities * TENTHS).astype(np.int64), TENTHS - 1)
