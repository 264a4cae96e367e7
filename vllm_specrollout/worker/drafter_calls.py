"""What a worker is asked about models that draft: other weights, how one drafts, and which ones elsewhere take part.
Called by name, through `collective_rpc`, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specrollout.errors import ForbiddenError, SpecRolloutError
from vllm_specrollout.worker import decoupling
from vllm_specrollout.worker.common import is_first_rank
from vllm_specrollout.worker.swapping import swap

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base

    from vllm_specrollout.drafters.decoupled import DecoupledDrafter
    from vllm_specrollout.worker.v1.runner import SpecRolloutV1
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2
else:
    _Base = object


class DrafterMixin(_Base):
    """Mixed into vLLM's workers."""

    model_runner: SpecRolloutV1 | SpecRolloutV2
    # where the drafter's weights came from last, and out of which folder they may not; None: as the engine was started
    _drafter_place: tuple[Path, Path | None] | None = None
    _has_lost_weights = False

    def spec_rollout_load_drafter(self, path: str, below: str | None = None) -> dict[str, Any]:
        """Other weights for the model that drafts; see `swap`. An error comes back as its cause and hint, and whether
        it `is_forbidden`, since it has to pass between processes.
        """
        place = Path(path), None if below is None else Path(below)
        try:
            found = swap(self.model_runner, *place)
        except SpecRolloutError as error:
            return {"cause": error.cause, "hint": error.hint, "is_forbidden": isinstance(error, ForbiddenError)}
        self._drafter_place = place
        return found

    def sleep(self, level: int = 1) -> None:
        # level 2 throws all weights away, and a trainer brings the target's alone
        self._has_lost_weights = self._has_lost_weights or level >= 2
        self.model_runner.settle()  # steps in flight may hold memory of the device
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if self._has_lost_weights and (tags is None or "weights" in tags):
            self._has_lost_weights = False
            self._load_again()

    def _load_again(self) -> None:
        """The drafter has its weights again, from where they came, or is off: the engine wakes up either way."""
        runner, drafter = self.model_runner, self.model_runner.model_drafter
        if drafter is None:
            return
        try:
            swap(runner, *(self._drafter_place or (drafter.proposer.path, None)), is_new=False)
        except SpecRolloutError as error:
            if runner.model_drafter is not None:
                runner.model_drafter = None
                runner.spec_rollout.drop(drafter, error)

    def spec_rollout_draft_as(self, sharpness: float | None, is_comb: bool) -> None:
        """How a model drafts from now on: at this sharpness (None: what it learns), with alternatives or without."""
        drafter = self.model_runner.model_drafter
        if drafter is not None:
            drafter.sharpness.pinned = drafter.second_sharpness.pinned = sharpness
            drafter.is_comb = is_comb

    # --- drafters elsewhere: an error comes back as its cause and hint, and ranks that do not draft answer {} ---------

    def attach_drafter(
        self,
        name: str,
        address: str,
        keys: str | None = None,
        window: int | None = None,
        fan_out: int | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Have a drafter that serves at an address draft as well, from the step on after it has answered.

        Args, and what comes back: as `DecoupledDrafter.attach`.
        """
        return self._elsewhere(lambda own: own.attach(name, address, keys, window, fan_out, request_ids))

    def detach_drafter(self, name: str) -> dict[str, Any]:
        """Let go of a drafter; what it did comes back, as of `DecoupledDrafter.detach`."""
        return self._elsewhere(lambda own: own.detach(name))

    def assign_drafter(self, name: str, request_ids: Sequence[str] | None = None) -> dict[str, Any]:
        """Have a drafter draft for these requests alone; None: for all. As `DecoupledDrafter.assign`."""
        return self._elsewhere(lambda own: own.assign(name, request_ids))

    def drafters_state(self) -> dict[str, Any]:
        """All drafters that are attached, as `DecoupledDrafter.state`."""
        return self._elsewhere(lambda own: own.state())

    def _elsewhere(self, what: Callable[[DecoupledDrafter], dict[str, Any]]) -> dict[str, Any]:
        if not is_first_rank():
            return {}
        try:
            return what(decoupling.attached(self.model_runner))
        except SpecRolloutError as error:
            return {"cause": error.cause, "hint": error.hint}
