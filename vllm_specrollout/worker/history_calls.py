"""What trainers tell a worker of its history, and what it tells them. Called by name, through `collective_rpc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.history.epochs import EpochError
from vllm_specrollout.history.stats import Outcome
from vllm_specrollout.worker.common import is_first_rank
from vllm_specrollout.worker.weights_version import WeightsMixin

_COUNTED_AS = {Outcome.REPEATED: "repeated", Outcome.UNKNOWN: "unknown"}


class TrainerMixin(WeightsMixin):
    """Mixed into vLLM's workers, whose model runner has a `spec_rollout`. Ranks that do not draft keep no history."""

    def _history(self) -> HistoryDrafter | None:
        # one on probation drafts nothing for a while, and goes on keeping what it is told
        drafters = self.model_runner.spec_rollout.all_drafters()
        return next((drafter for drafter in drafters if isinstance(drafter, HistoryDrafter)), None)

    def _refusal(self) -> dict[str, str] | None:
        """Cause and hint, since errors have to pass between processes; None: the history has not been given up."""
        given_up = self.model_runner.spec_rollout.probation.given_up.get(HistoryDrafter.name)
        if given_up is None:
            return None
        cause = f"the history drafter failed {given_up[0]} times and is given up; the last time: {given_up[1]}"
        return {"cause": cause, "hint": "see the engine's log, and start the engine anew"}

    def spec_rollout_health(self) -> dict[str, Any]:
        """`Speculator.health` of the rank that drafts; empty on the others."""
        return self.model_runner.spec_rollout.health() if is_first_rank() else {}

    def spec_rollout_report_rewards(self, rewards: Sequence[tuple[Sequence[str], float]]) -> dict[str, Any]:
        """Rewards of requests: for each, the names it may have (likeliest first) and a finite number.

        Returns:
            How many were "matched", "repeated" (the reward was replaced) and "unknown"; "cause" and "hint" where the
            history is given up.
        """
        if (refusal := self._refusal()) is not None:
            return refusal
        history, counts = self._history(), {"matched": 0, "repeated": 0, "unknown": 0}
        for names, reward in rewards if history is not None else ():
            counts[_COUNTED_AS.get(history.report_reward(names, reward), "matched")] += 1
        return counts

    def spec_rollout_begin_epoch(self, epoch: int | None = None) -> int | dict[str, str]:
        """All problems will be asked again; returns the epoch begun; "cause" and "hint" where the history is given up.

        One that cannot begin leaves all as it is, and the present one is the answer.
        """
        if (refusal := self._refusal()) is not None:
            return refusal
        history = self._history()
        if history is None:
            return epoch or 0
        try:
            return history.begin_epoch(epoch)
        except EpochError:
            # an exception would cross the engine as mere text; another client was faster, and the number says so
            return history.store.epoch

    def spec_rollout_history(self) -> dict[str, Any]:
        """What is kept and how often it drafted; empty where there is no `history` drafter; "cause" and "hint" where it
        is given up."""
        if (refusal := self._refusal()) is not None:
            return refusal
        history = self._history()
        return {} if history is None else history.as_dict()

    def shutdown(self) -> None:
        runner = getattr(self, "model_runner", None)
        if runner is not None:
            # a request that ended in the very last step is among them: no further step came to say so
            for ending in runner.unfinished():
                runner.spec_rollout.finish(ending)
            for part in (self._history(), getattr(runner, "remote", None)):
                if part is not None:
                    with runner.spec_rollout.guard.over("closing", "what it had still to write may be lost"):
                        part.close()
            runner.spec_rollout.close()
        super().shutdown()
