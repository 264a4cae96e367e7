"""How a benchmark changes budget and oracle of a running engine, so that one engine serves many settings.

What belongs here: worker calls that nobody needs in training. They are made by name, through `collective_rpc`, between
steps. Also the watch over a budget that they put in, which counts how often drafting was switched off and on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm_specrollout.drafter_config import OracleConfig
from vllm_specrollout.drafters.oracle import OracleDrafter, load_continuations
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.policies.budget import Policy, may_draft, rests
from vllm_specrollout.policies.presets import make_policy
from vllm_specrollout.policies.switch import PLAIN_PROBE
from vllm_specrollout.types import Choice, Decision, DraftTree, Ending, Feedback, RequestView, StepTiming
from vllm_specrollout.worker.common import config_of
from vllm_specrollout.worker.picking import CORE
from vllm_specrollout.worker.profiling import profiled
from vllm_specrollout.worker.recording import end_recording, recorded


class WatchedPolicy:
    """A policy, and how often it changed its mind. Steps in which nothing could be drafted count for nothing."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.counts = {"steps_on": 0, "steps_off": 0, "switches": 0, "mind_changes": 0}
        self._was_drafting: bool | None = None
        self._was_on: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def rests(self, batch: int) -> bool:
        is_resting = rests(self.policy, batch)
        if is_resting:  # also where none could have been drafted for: nobody has looked
            self._count(0)
        return is_resting

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        decisions = self.policy.decide(views)
        could = any(may_draft(view, 1, 1).max_nodes for view in views)
        if could and not any(decision.max_nodes for decision in decisions):
            self._count(0)
        return decisions

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        chosen = self.policy.choose(trees, decisions)
        if any(tree.size for tree in trees):
            self._count(sum(tree.size for tree in chosen))
        return chosen

    def _count(self, nodes: int) -> None:
        choice = self.policy.explain()
        if choice is not None and choice.reason == PLAIN_PROBE:
            return
        is_on = choice is None or choice.is_on
        is_drafting = is_on and nodes > 0
        self.counts["steps_on" if is_drafting else "steps_off"] += 1
        self.counts["switches"] += self._was_drafting not in (None, is_drafting)
        self.counts["mind_changes"] += self._was_on not in (None, is_on)
        self._was_drafting, self._was_on = is_drafting, is_on

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        self.policy.observe(feedback, timing)

    def finish(self, ending: Ending) -> None:
        self.policy.finish(ending)

    def explain(self) -> Choice | None:
        return self.policy.explain()

    def start_over(self) -> dict[str, int]:
        """The counts so far; they begin anew, and the policy keeps what it has learned."""
        counts = self.counts
        self.counts = dict.fromkeys(counts, 0)
        self._was_drafting = self._was_on = None
        return counts


class ChangingOracle:
    """Drafts as one oracle up to an output position of each request, and as another from there on."""

    name = "oracle"

    def __init__(self, before: OracleDrafter, after: OracleDrafter, position: int) -> None:
        self._before, self._after, self._position = before, after, position

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        trees: list[DraftTree] = []
        for view, decision in zip(views, decisions, strict=True):
            is_after = len(view.token_ids) - view.num_prompt_tokens >= self._position
            trees += (self._after if is_after else self._before).propose([view], [decision])
        return trees

    def observe(self, feedback: Sequence[Feedback]) -> None:
        """Nothing to learn: both know the answers."""

    def finish(self, ending: Ending) -> None:
        """Nothing outlives a request."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""


class Tunable:
    """Mixed into vLLM's workers, whose model runner has a `speculation`."""

    model_runner: Any
    vllm_config: Any

    def spec_rollout_set_budget(
        self,
        name: str,
        max_draft_tokens: int | None = None,
        max_depth: int | None = None,
        length_weight: bool = True,
        is_profiled: bool = True,
        is_fresh: bool = True,
        record: str | None = None,
    ) -> None:
        """A fresh policy in the place of the present one: nothing that was learned is carried over.

        Args:
            name: one of `config.BUDGETS`.
            max_draft_tokens, max_depth: its limits; default, and most: the engine's.
            length_weight: False: `auto` without the weight of an answer's expected length.
            is_profiled: it starts from the saved profile of such an engine, if there is one and the engine uses it.
            is_fresh: False: take the policy back that was last made with these arguments, and what it has learned.
            record: file that the policy's steps are recorded into, until there is another policy.

        Raises:
            ConfigError: an unknown name, or more than the engine allows.
            TraceError: the file cannot be made.
        """
        kept = self.__dict__.setdefault("_spec_rollout_policies", {})
        key = (name, max_draft_tokens, max_depth, length_weight, is_profiled)
        if not is_fresh and key in kept:
            self.model_runner.speculation.policy = kept[key]
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
        policy: Any = make_policy(wanted, kernels=CORE)
        if is_profiled:
            policy = profiled(policy, self.vllm_config)
        if not length_weight:
            policy.length_weight = False
        end_recording(self.model_runner.speculation.policy)
        if record is not None:
            runner = "v2" if self.vllm_config.use_v2_model_runner else "v1"
            policy = recorded(policy, dataclasses.replace(wanted, record=record), self.vllm_config, runner)
        self.model_runner.speculation.policy = kept[key] = WatchedPolicy(policy)

    def spec_rollout_switches(self) -> dict[str, int]:
        """Of the policy set last, since the last call: steps_on, steps_off, switches, mind_changes.

        A step is off when nothing was drafted although something was proposed, or drafters were not asked although
        requests could have been drafted for; single steps to try drafts, or their absence, do not count. `switches`
        counts changes between such steps, `mind_changes` those of the policy's own `explain().is_on`.
        """
        policy = self.model_runner.speculation.policy
        return policy.start_over() if isinstance(policy, WatchedPolicy) else {}

    def spec_rollout_set_oracle(
        self, path: str, accuracy: Sequence[float], position: int | None = None, then: Sequence[float] = (0.0,)
    ) -> None:
        """Other answers and another accuracy for the `oracle` drafter.

        Args:
            path: JSON file of the answers, as `oracle.path`.
            accuracy: as `oracle.accuracy`.
            position: output tokens of each request after which `then` holds instead; None: never.

        Raises:
            ConfigError: the engine has no `oracle`, or the file or the accuracy cannot be used.
        """
        drafters = self.model_runner.speculation.drafters
        at = next((i for i, drafter in enumerate(drafters) if drafter.name == "oracle"), None)
        if at is None:
            raise ConfigError("the engine has no `oracle` drafter", 'start it with {"drafters": ["oracle"]}')
        answers = load_continuations(path, self.vllm_config.model_config.get_vocab_size())
        first = OracleDrafter(OracleConfig(path=path, accuracy=tuple(accuracy)), answers, at)
        if position is None:
            drafters[at] = first
        else:
            second = OracleDrafter(OracleConfig(path=path, accuracy=tuple(then)), answers, at)
            drafters[at] = ChangingOracle(first, second, position)
