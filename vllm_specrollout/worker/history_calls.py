"""What trainers tell a worker of its history, and what it tells them. Called by name, through `collective_rpc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.history.epochs import EpochError
from vllm_specrollout.history.stats import Outcome
from vllm_specrollout.worker.weights_version import WeightsMixin

_COUNTED_AS = {Outcome.REPEATED: "repeated", Outcome.UNKNOWN: "unknown"}


class TrainerMixin(WeightsMixin):
    """Mixed into vLLM's workers, whose model runner has a `spec_rollout`. Ranks that do not draft keep no history."""

    def _history(self) -> HistoryDrafter | None:
        drafters = self.model_runner.spec_rollout.drafters
        return next((drafter for drafter in drafters if isinstance(drafter, HistoryDrafter)), None)

    def spec_rollout_report_rewards(self, rewards: Sequence[tuple[Sequence[str], float]]) -> dict[str, int]:
        """Rewards of requests: for each, the names it may have (likeliest first) and a finite number.

        Returns:
            How many were "matched", "repeated" (the reward was replaced) and "unknown".
        """
        history, counts = self._history(), {"matched": 0, "repeated": 0, "unknown": 0}
        for names, reward in rewards if history is not None else ():
            counts[_COUNTED_AS.get(history.report_reward(names, reward), "matched")] += 1
        return counts

    def spec_rollout_begin_epoch(self, epoch: int | None = None) -> int:
        """All problems will be asked again; returns the epoch begun.

        One that cannot begin leaves all as it is, and the present one is the answer.
        """
        history = self._history()
        if history is None:
            return epoch or 0
        try:
            return history.begin_epoch(epoch)
        except EpochError:
            # an exception would cross the engine as mere text; another client was faster, and the number says so
            return history.store.epoch

    def spec_rollout_history(self) -> dict[str, Any]:
        """What is kept and how often it drafted; empty where there is no `history` drafter."""
        history = self._history()
        return {} if history is None else history.as_dict()

    def shutdown(self) -> None:
        runner = getattr(self, "model_runner", None)
        if runner is not None:
            # a request that ended in the very last step is among them: no further step came to say so
            for ending in runner.unfinished():
                runner.spec_rollout.finish(ending)
            if (history := self._history()) is not None:
                history.close()
            if (remote := getattr(runner, "remote", None)) is not None:
                remote.close()
            runner.spec_rollout.close()
        super().shutdown()
