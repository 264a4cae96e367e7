"""Calls by name (`collective_rpc`) that a worker answers between steps: on drafters, history, counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from vllm_specrollout.cluster.child import WarmDrafter
from vllm_specrollout.cluster.mail import reach
from vllm_specrollout.cluster.prefills import Prefills
from vllm_specrollout.cluster.profiles import Learning, kept, of_engine
from vllm_specrollout.config import DECOUPLED_SOURCES, MODEL_SOURCES
from vllm_specrollout.drafters.keeping import KeepsHistory
from vllm_specrollout.errors import ForbiddenError, SpecRolloutError
from vllm_specrollout.history.answers import RewardOutcome
from vllm_specrollout.history.epochs import EpochError
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Gain
from vllm_specrollout.worker import hidden
from vllm_specrollout.worker.common import Stats, is_first_rank
from vllm_specrollout.worker.models import decoupled
from vllm_specrollout.worker.models.swapping import Swapper
from vllm_specrollout.worker.profiling import key_of
from vllm_specrollout.worker.weights_version import WeightsMixin

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base

    from vllm_specrollout.drafters.decoupled import DecoupledDrafter
    from vllm_specrollout.worker.v1.runner import SpecRolloutV1
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2
else:
    _Base = object

_Listening = TypeVar("_Listening", bound=Listener)


class DrafterMixin(_Base):
    """Mixed into vLLM's workers."""

    model_runner: SpecRolloutV1 | SpecRolloutV2
    _has_lost_weights = False
    # for other engines to attach; None: there is none. While this engine sleeps it may not wake up
    _warm: WarmDrafter | None = None
    _is_asleep = False

    def spec_rollout_load_drafter(self, name: str, path: str, below: str | None = None) -> dict[str, Any]:
        """Begin to make other weights ready for the model that drafts; see `Swapper.begin`. No step waits for it.

        An error comes back as its cause and hint, and whether it `is_forbidden`: it has to pass between processes.
        """
        return self._swapped(lambda swapper: swapper.begin(name, Path(path), None if below is None else Path(below)))

    def spec_rollout_drafter_ready(self, name: str) -> dict[str, Any]:
        """Whether they are there ("is_ready")."""
        return self._swapped(lambda swapper: {"is_ready": swapper.is_ready(name)})

    def spec_rollout_end_drafter(self, name: str, is_taken: bool) -> dict[str, Any]:
        """Have them from the next step on, on all ranks, or drop them; see `Swapper.end`."""
        return self._swapped(lambda swapper: swapper.end(name, is_taken=is_taken))

    def _swapped(self, what: Callable[[Swapper], dict[str, Any] | None]) -> dict[str, Any]:
        runner = self.model_runner
        if runner.swapper is None:
            runner.swapper = Swapper(runner)
        try:
            return what(runner.swapper) or {}
        except SpecRolloutError as error:
            return {"cause": error.cause, "hint": error.hint, "is_forbidden": isinstance(error, ForbiddenError)}

    def spec_rollout_head(self, told: Mapping[str, int]) -> dict[str, Any]:
        """How the head does that drafts here; ranks that do not draft, and engines without a head, say nothing.

        Args:
            told: what its trainer does; it is shown with this engine's metrics.
        """
        runner, warm = self.model_runner, self._warm
        if not is_first_rank() or runner.model_drafter is None:
            return {}
        runner.metrics.told(told)
        positions, met = runner.metrics.met_of(MODEL_SOURCES[:1])
        return {
            "positions": positions,
            "met": met,
            "is_trained": not runner.model_drafter.is_resting,
            "went_back": runner.model_drafter.heads.went_back,
            "is_asleep": self._is_asleep,
            "is_lent": warm is not None and bool(warm.address),
        }

    def sleep(self, level: int = 1) -> None:
        # level 2 throws all weights away, and a trainer brings the target's alone
        self._has_lost_weights = self._has_lost_weights or level >= 2
        self.model_runner.settle()  # steps in flight may hold memory of the device
        if self.model_runner.swapper is not None:
            self.model_runner.swapper.rest()
        self._is_asleep = True
        self._rest_drafter()
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        self._is_asleep = self._is_asleep and tags is not None and "kv_cache" not in tags
        if self._has_lost_weights and (tags is None or "weights" in tags):
            self._has_lost_weights = False
            self._load_again()

    def _rest_drafter(self) -> None:
        """The drafter beside this engine gives its memory back."""
        if self._warm is not None:
            self._warm.sleep()

    def _load_again(self) -> None:
        """The drafter has its weights again, from where they came, or is off: the engine wakes up either way."""
        runner, drafter = self.model_runner, self.model_runner.model_drafter
        if drafter is None:
            return
        try:
            (runner.swapper or Swapper(runner)).again()
        except SpecRolloutError as error:
            if runner.model_drafter is not None:
                runner.model_drafter = None
                runner.spec_rollout.drop(drafter, error)

    # --- drafters elsewhere: an error comes back as its cause and hint, and ranks that do not draft answer {} ---------

    def attach_drafter(
        self,
        name: str,
        address: str,
        window: int | None = None,
        fan_out: int | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Have a drafter that serves at an address draft as well, from the step on after it has answered.

        Args, and what comes back: as `DecoupledDrafter.attach`.
        """
        return self._elsewhere(lambda own: own.attach(name, address, window, fan_out, request_ids))

    def detach_drafter(self, name: str) -> dict[str, Any]:
        """Let go of a drafter; what it did comes back, as of `DecoupledDrafter.detach`."""
        return self._elsewhere(lambda own: own.detach(name))

    def assign_drafter(self, name: str, request_ids: Sequence[str] | None = None) -> dict[str, Any]:
        """Have a drafter draft for these requests alone; None: for all. As `DecoupledDrafter.assign`."""
        return self._elsewhere(lambda own: own.assign(name, request_ids))

    def drafters_state(self) -> dict[str, Any]:
        """All drafters that are attached, as `DecoupledDrafter.state`."""
        return self._elsewhere(lambda own: own.state())

    def spec_rollout_warm(
        self, model: str, devices: Sequence[str] = (), engine_args: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Begin a drafter beside this engine, for others to attach while this one is idle. It sleeps while this engine
        works, and ends with it.

        Args:
            devices: such as `cpu:2` or `cuda:1`, as this process counts them; empty: the engine's own.
            engine_args: of the drafter's engine, where they are others than this one's.
        """

        def begin(own: DecoupledDrafter) -> dict[str, Any]:
            if self._warm is None:
                self._warm = decoupled.warm(self.model_runner, model, devices, engine_args or {})
                self.model_runner.before_step = self._warm.sleep
            return {"model": self._warm.process.command.model}

        return self._elsewhere(begin)

    def spec_rollout_standing(self) -> dict[str, Any]:
        """How this engine stands among others, for `cluster.lending`: what runs, and which drafters it has and borrows.

        Returns:
            "running": request -> tokens of its prompt, and of its answer. "steps" and "verified", "accepted" nodes of
            drafters elsewhere, since it began. "attached": drafter -> the only requests that it drafts for.
        """
        return self._elsewhere(self._standing)

    def _standing(self, own: DecoupledDrafter) -> dict[str, Any]:
        runner, warm = self.model_runner, self._warm
        running = runner.standing()
        if warm is not None and not running and not self._is_asleep:
            warm.wake()
        verified, accepted = runner.metrics.nodes_of(DECOUPLED_SOURCES)
        return {
            "running": running,
            "steps": runner.step.number,
            "places": runner.vllm_config.scheduler_config.max_num_seqs,
            "host": reach(),
            "drafter": "" if warm is None else warm.address,
            "model": "" if warm is None else warm.process.command.model,
            "attached": {name: sorted(link.only) for name, link in own.links.items() if link.only is not None},
            "verified": verified,
            "accepted": accepted,
        }

    def shutdown(self) -> None:
        if self._warm is not None:
            self._warm.stop()
        super().shutdown()

    def _elsewhere(self, what: Callable[[DecoupledDrafter], dict[str, Any]]) -> dict[str, Any]:
        if not is_first_rank():
            return {}
        try:
            return what(decoupled.attached(self.model_runner))
        except SpecRolloutError as error:
            return {"cause": error.cause, "hint": error.hint}


_COUNTED_AS = {RewardOutcome.REPEATED: "repeated", RewardOutcome.UNKNOWN: "unknown"}


class TrainerMixin(WeightsMixin):
    """Mixed into vLLM's workers, whose model runner has a `spec_rollout`. Ranks that do not draft keep no history."""

    def _history(self) -> KeepsHistory | None:
        # one on probation drafts nothing for a while, and goes on keeping what it is told
        drafters = self.model_runner.spec_rollout.all_drafters()
        return next((drafter for drafter in drafters if isinstance(drafter, KeepsHistory)), None)

    def _refusal(self) -> dict[str, str] | None:
        """Cause and hint, since errors have to pass between processes; None: the history has not been given up."""
        given_up = self.model_runner.spec_rollout.probation.given_up.get(KeepsHistory.name)
        if given_up is None:
            return None
        cause = f"the history drafter failed {given_up[0]} times and is given up; the last time: {given_up[1]}"
        return {"cause": cause, "hint": "see the engine's log, and start the engine anew"}

    def spec_rollout_health(self) -> dict[str, Any]:
        """`Speculator.health` of the rank that drafts, and its trainer's gauges; empty on the others."""
        runner = self.model_runner
        return {**runner.spec_rollout.health(), "learning": runner.metrics.trainer} if is_first_rank() else {}

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

    def spec_rollout_prefills(self) -> dict[str, Any]:
        """What prompts cost, by `cluster.prefills.Prefills`: "tokens" and "seconds" since this was asked first."""
        if not is_first_rank():
            return {}
        own = self._listening(Prefills)
        if own is None:
            self.model_runner.spec_rollout.listeners.append(own := Prefills())
        return {"tokens": own.tokens, "seconds": own.seconds}

    def _listening(self, kind: type[_Listening]) -> _Listening | None:
        """The listener of this kind."""
        return next((one for one in self.model_runner.spec_rollout.listeners if isinstance(one, kind)), None)

    def spec_rollout_profiles(self) -> list[dict[str, Any]]:
        """What is known of drafters beside this engine's model on its devices, whoever measured it; and of what this
        engine drafts by itself, as it has gone here.

        Returns:
            [k] `cluster.profiles.DrafterProfile`s, in plain JSON types.
        """
        learning, known = self._listening(Learning), of_engine(kept(), key_of(self.vllm_config))
        own = None if learning is None else learning.own
        found = [one if own is None else msgspec.structs.replace(one, own=own) for one in known]
        return [msgspec.to_builtins(one, str_keys=True) for one in found]

    def spec_rollout_answers(self, address: str, most_tokens: int) -> dict[str, Any]:
        """What this engine shall compute once more for a trainer; see `hidden.answers_for`. From the first call on,
        answers are kept. Ranks that do not draft say nothing; an error comes back as its cause and hint.
        """
        if not is_first_rank():
            return {}
        try:
            return hidden.answers_for(self.model_runner, address, most_tokens)
        except SpecRolloutError as error:
            return {"cause": error.cause, "hint": error.hint}

    def spec_rollout_ends(self, address: str, have: int) -> int:
        """Output head and embedding for a trainer; see `hidden.send_ends`."""
        return hidden.send_ends(self.model_runner, address, have)

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


class StatsMixin(_Base):
    """Mixed into vLLM's workers."""

    model_runner: SpecRolloutV1 | SpecRolloutV2

    def spec_rollout_stats(self, reset: bool = False) -> dict[str, Any]:
        """Totals of this worker since the last reset; see `Stats`.

        "decode_s" is what decode steps took, and "plain_s" what plain ones would have, by the budget's estimate (it
        counts steps of which it has none as plain); "speedup" is their quotient; None: there is no estimate.
        "tokens_per_step" is of one request, over all its decode steps.
        """
        runner = self.model_runner
        stats = dataclasses.asdict(runner.stats)
        stats["shape"], stats["shape_reason"] = runner.shape[0].value, runner.shape[1]
        rows = getattr(runner, "rows", None)
        stats["rows"] = None if rows is None else {**dataclasses.asdict(rows), "are_alike": rows.are_alike}
        stats["self_check"] = getattr(runner, "self_check", None)
        withheld = runner.drafting.withheld
        stats["withheld_checked"], stats["withheld_differing"] = withheld.checked, withheld.differing
        stats["request_reasons"] = runner.admissions.reasons()
        stats["failures"] = dict(runner.spec_rollout.guard.failures)
        gain = runner.metrics.total
        stats["decode_s"], stats["plain_s"] = gain.spent_ms / 1e3, gain.plain_ms / 1e3
        stats["speedup"], stats["tokens_per_step"] = gain.speedup if gain.is_known else None, gain.tokens_per_step
        if reset:
            runner.stats, runner.metrics.total = Stats(), Gain()
            withheld.checked = withheld.differing = 0
        return stats
