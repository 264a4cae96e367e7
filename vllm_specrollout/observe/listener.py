"""Listener: the Protocol of those who watch the speculator.

What belongs here: the events, and their order. A listener reads what it is given and changes nothing. If it fails, the
speculator contains that.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    RequestBatch,
    RequestView,
    StepPlan,
    StepRecord,
    TreeBatch,
)

NOTHING_TO_DRAFT = "nothing to draft"
"""Reason of a plan for requests none of which may have a draft: nobody decided anything."""


class Listener:
    """Watches the steps of one engine; what a listener does not override, it does not care for.

    Steps may overlap: `planned` of step k + 1 may come before `stepped` of step k, and a request's `finished` before
    the `stepped` of its last step. `planned` and `paused` come in the order of the steps, and so does `stepped`. A
    record carries its own plan, the very object that `planned` got, so nothing need be matched up by order.
    """

    def admitted(self, view: RequestView) -> None:
        """A request can be drafted for from now on; also told while drafting is paused.

        Args:
            view: its arrays are valid during the call only.
        """

    def planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        draft_ms: float,
    ) -> None:
        """Drafters were asked for the coming step.

        Args:
            batch: [R] the requests that were looked at; its views' arrays are valid during the call only.
            limits: [R] what drafters were asked for.
            proposals: [P] one per drafter that was asked, each over all requests of the batch.
            plan: what the budget chose of them; its trees are over all requests of the batch.
            draft_ms: milliseconds that asking and choosing took.
        """

    def paused(self, num_requests: int, reason: str) -> None:
        """The coming step goes without drafts, and no drafter was asked.

        Args:
            num_requests: running requests.
            reason: a few words out of a small set, fit to be a metric's label: `off`, `drafts do not pay`, ...
        """

    def stepped(self, record: StepRecord) -> None:
        """A step is over; its verdict is in the record, and its time if that is known.

        Args:
            record: `plan` is None for a step that nothing was planned for.
        """

    def compared(self, checked: int, differing: int) -> None:
        """Tokens of withheld verdicts were compared with those of plain decoding."""

    def finished(self, ending: Answer) -> None:
        """A request is over; without a token, if it ended before its client got the first one."""

    def failed(self, part: str) -> None:
        """A part of ours failed and was contained.

        Args:
            part: what failed: a drafter's name, or a word of the code's own. There are few of them.
        """

    def drafters_alive(self, count: int) -> None:
        """So many drafters are asked from now on; those that failed and are not tried again yet are not among them."""

    def closed(self) -> None:
        """The engine stops, or nobody listens any more: nothing follows."""
