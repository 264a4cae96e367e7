"""Workers with the V2 runner: vLLM's own, handed our runner where they make theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.kernels.tree_rows.kernel import lay_out
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.observe.self_check import ATTENTION, COMMIT, VERIFY, in_words
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.calls import DrafterMixin, StatsMixin, TrainerMixin
from vllm_specrollout.worker.common import config_of, drafting_model, with_lane
from vllm_specrollout.worker.models import decoupled
from vllm_specrollout.worker.models.decoupled import sampling_on_v2
from vllm_specrollout.worker.v2.attention import attention_layers
from vllm_specrollout.worker.v2.self_check import SelfCheck, set_aside

if TYPE_CHECKING:
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2

    _Base = WorkerBase
else:
    _Base = object


@torch.inference_mode()
def warm_up(runner: SpecRolloutV2) -> dict[str, str]:
    """After the KV cache is set up, and before graphs are captured.

    Returns:
        Part of the self-check -> why its kernels do not run here.
    """
    failed: dict[str, str] = {}
    if runner.shape[0] is DraftMode.OFF:
        return failed

    def run(part: str, what: Callable[[], None]) -> None:
        try:
            what()
        except CONTAINED as error:
            failed[part] = in_words(error)

    run(VERIFY, lambda: _warm_up_update(runner))
    run(VERIFY, lambda: _warm_up_rows(runner))
    if runner.verifier.has_kernel:
        run(VERIFY, lambda: runner.verifier.warm_up(runner.vocab_size, runner.dtype, runner.device))
    if runner.mover is None or runner.shape[0] is not DraftMode.TREE:
        return failed
    width = 1 + runner.max_draft_tokens
    run(COMMIT, lambda: runner.mover.warm_up(width))
    if runner.experts is not None:
        run(COMMIT, lambda: runner.experts.warm_up(width))
    for layer in attention_layers(runner):
        run(ATTENTION, lambda layer=layer: layer.impl.warm_up(layer, runner.dtype))
    return failed


def _warm_up_rows(runner: SpecRolloutV2) -> None:
    """Compile what lays drafts out, both ways, and what looks them up."""
    runner.drafts.warm_up()
    none = torch.zeros(1, dtype=torch.int32, device=runner.device)
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=runner.device)
    for has_branches in (False, True):
        lay_out(
            runner.drafts.drafted, none.long(), bounds, bounds, none, none.clone(), none.clone(), none.clone(),
            none.long(), none.clone(), has_branches=has_branches,
        )  # fmt: skip


def _warm_up_update(runner: SpecRolloutV2) -> None:
    """Compile vLLM's kernel that takes in what was sampled, for as many tokens of a request as drafts bring.

    It is compiled anew for them: plain steps bring one. A request of number -1 is passed over.
    """
    none = torch.zeros(2, dtype=torch.int32, device=runner.device)
    given = {
        "idx_mapping": none[:1].long() - 1,
        "sampled_tokens": torch.zeros(1, 1 + runner.max_draft_tokens, dtype=torch.int64, device=runner.device),
        "num_sampled": none[:1],
        "num_rejected": none[:1],
        "query_start_loc": none,
    }
    # a version that asks for more compiles it in the first step with drafts
    if set(inspect.signature(runner.postprocess_sampled).parameters) <= set(given):
        runner.postprocess_sampled(**given)


class SpeculatingWorker(StatsMixin, DrafterMixin, TrainerMixin, _Base):
    """What both workers add."""

    model_runner: SpecRolloutV2
    runner_class: tuple[str, str]

    def init_device(self) -> None:
        if not self.use_v2_model_runner:
            raise UnsupportedError(
                "this worker is for vLLM's V2 model runner, and the configuration asks for V1",
                "unset `VLLM_USE_V2_MODEL_RUNNER`",
            )
        config = config_of(self.vllm_config)
        decoupled.keep_off(config)
        self.vllm_config = with_lane(self.vllm_config)
        self.speculative_config = self.vllm_config.speculative_config
        from vllm_specrollout.worker.v2.lane import Lane, no_model, rebound

        with ExitStack() as during:
            # vLLM names the runner's class in the body of this method, and to make it twice would allocate twice
            module, name = self.runner_class
            during.enter_context(rebound(module, name, lambda stock: type("SpecRolloutRunner", (Lane, stock), {})))
            if drafting_model(config) is None:
                during.enter_context(rebound("vllm.v1.worker.gpu.model_runner", "init_speculator", no_model))
            super().init_device()
        # vLLM loads the target next; they get ready meanwhile
        self.model_runner.remote = decoupled.begin(self.model_runner, sampling_on_v2(self.model_runner))

    def compile_or_warm_up_model(self) -> CompilationTimes:

        runner = self.model_runner
        check = SelfCheck.of(runner)
        # before vLLM's own, after which it looks out for kernels that are compiled late; with or without graphs
        check.add(warm_up(runner))
        with set_aside(runner):  # vLLM warms up with requests of its own
            times = super().compile_or_warm_up_model()
        check.add(runner.draft_graphs.failed)
        check.run()
        runner.self_check = check.as_dict()
        # last of all, since it may wait: other ranks have nothing left to do with this one
        decoupled.join(runner)
        return times

    def spec_rollout_stats(self, reset: bool = False) -> dict[str, Any]:
        self.model_runner.settle()
        return super().spec_rollout_stats(reset)
