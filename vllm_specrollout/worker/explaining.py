"""How a benchmark has a running engine explain itself. Called by name, through `collective_rpc`, between steps."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from vllm_specrollout.journal import Journal, JournaledPolicy


class Explains:
    """Mixed into vLLM's workers, whose model runner has a `speculation`. Until it is asked, nothing is written down."""

    model_runner: Any

    def spec_rollout_explain(self, keep: int) -> None:
        """Write down what is decided for each request from now on.

        Of requests that ended, the last `keep` are told of; 0 ends the writing. A budget set later is not written down.
        """
        speculation = self.model_runner.speculation
        if isinstance(speculation.policy, JournaledPolicy):
            speculation.policy = speculation.policy.inner
        if keep > 0:
            speculation.policy = JournaledPolicy(speculation.policy, Journal(keep), time.perf_counter)

    def spec_rollout_explained(self) -> list[dict[str, Any]]:
        """What was written down since: per request its name, and `journal.Stretch`es as plain values, in order."""
        policy = self.model_runner.speculation.policy
        if not isinstance(policy, JournaledPolicy):
            return []
        return [{"name": name, "stretches": [asdict(one) for one in own]} for name, own in policy.told()]
