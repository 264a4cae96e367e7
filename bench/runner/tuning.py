"""Worker calls that change budget, oracle and drafters of a running engine, so that one engine serves many settings.

What belongs here: calls that nobody needs in training. vLLM mixes them into a benchmark's workers (its
`worker_extension_cls`), where they are made by name, through `collective_rpc`, between steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.replay.recorder import Recorder
from vllm_specrollout.worker.common import config_of
from vllm_specrollout.worker.models.decoupled import attached
from vllm_specrollout.worker.profiling import seed_from_profile
from vllm_specrollout.worker.speculate import recorder_of

from .matching import MatchingMixin
from .oracle import ORACLE, OracleDrafter
from .switches import SwitchCounter


class Tuning(MatchingMixin):
    """Mixed into vLLM's workers, whose model runner has a `spec_rollout`."""

    vllm_config: Any

    def spec_rollout_draft_as(self, weights: tuple[float, float] | None, is_comb: bool) -> None:
        """How a model drafts from now on: with these weights of its log probabilities and the noise (None: what it
        learns), with alternatives or without."""
        drafter = self.model_runner.model_drafter
        if drafter is not None:
            if weights is not None:
                drafter.coupling.pin(*weights)
            else:
                drafter.coupling.unpin()
            drafter.is_comb = is_comb

    def spec_rollout_set_budget(
        self,
        name: str,
        max_draft_tokens: int | None = None,
        max_depth: int | None = None,
        is_profiled: bool = True,
        is_fresh: bool = True,
        record: str | None = None,
    ) -> None:
        """A fresh budget in the place of the present one: nothing that was learned is carried over.

        Args:
            name: one of `config.BUDGETS`.
            max_draft_tokens, max_depth: its limits; default, and most: the engine's.
            is_profiled: it starts from the saved profile of such an engine, if there is one and the engine uses it.
            is_fresh: False: take the budget back that was last made with these arguments, and what it has learned.
            record: file that steps are recorded into, until a budget is set again.

        Raises:
            ConfigError: an unknown name, or more than the engine allows.
            TraceError: the file cannot be made.
        """
        speculator = self.model_runner.spec_rollout
        kept = self.__dict__.setdefault("_spec_rollout_budgets", {})
        key = (name, max_draft_tokens, max_depth, is_profiled)
        speculator.backoff = type(speculator.backoff)()
        if not is_fresh and key in kept:
            speculator.budget = kept[key]
            return
        config = config_of(self.vllm_config)
        if max_draft_tokens is not None and max_draft_tokens > config.max_draft_tokens:
            raise ConfigError(
                f"`max_draft_tokens` is {max_draft_tokens}, and the engine was started with {config.max_draft_tokens}",
                f"start it with at least {max_draft_tokens}",
            )
        wanted = dataclasses.replace(
            config,
            budget=name,
            max_draft_tokens=config.max_draft_tokens if max_draft_tokens is None else max_draft_tokens,
            max_depth=config.max_depth if max_depth is None else max_depth,
        )
        budget = make_budget(wanted)
        if is_profiled:
            seed_from_profile(budget, self.vllm_config)
        for recorder in [one for one in speculator.listeners if isinstance(one, Recorder)]:
            speculator.listeners.remove(recorder)
            recorder.closed()
        if record is not None:
            runner = "v2" if self.vllm_config.use_v2_model_runner else "v1"
            recorder = recorder_of(dataclasses.replace(wanted, record=record), self.vllm_config, runner)
            if recorder is not None:
                speculator.listeners.append(recorder)
        speculator.budget = kept[key] = budget
        self._switches().start_over()

    def spec_rollout_switches(self) -> dict[str, int]:
        """What `SwitchCounter` counted since the budget was set, or since the last call."""
        return self._switches().start_over()

    def spec_rollout_set_window(self, window: int) -> None:
        """Another draft window for decoupled drafters, from the next step on.

        Raises:
            UnsupportedError: no drafter runs elsewhere.
        """
        for link in attached(self.model_runner).links.values():
            link.window = window

    def _switches(self) -> SwitchCounter:
        listeners = self.model_runner.spec_rollout.listeners
        for listener in listeners:
            if isinstance(listener, SwitchCounter):
                return listener
        listeners.append(SwitchCounter())
        return listeners[-1]

    def spec_rollout_set_oracle(self, path: str, accuracy: Sequence[float], position: int | None = None) -> None:
        """Other answers and another accuracy for the oracle, as `OracleDrafter.replay`.

        Raises:
            ConfigError: the engine has no oracle.
        """
        drafters = self.model_runner.spec_rollout.all_drafters()
        oracle = next((drafter for drafter in drafters if isinstance(drafter, OracleDrafter)), None)
        if oracle is None:
            raise ConfigError("the engine has no oracle", f'start it with {{"drafters": ["{ORACLE}"]}}')
        oracle.replay(path, accuracy, position)
