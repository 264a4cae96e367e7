"""The CPU worker: stock vLLM's, with our model runner and room for scratch blocks."""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.mixed_workers import check_runner
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.common import config_of, with_model
from vllm_specrollout.worker.decoupling import keep_off
from vllm_specrollout.worker.drafter_calls import DrafterMixin
from vllm_specrollout.worker.explaining import ExplainsMixin
from vllm_specrollout.worker.history_calls import TrainerMixin
from vllm_specrollout.worker.rows import HeadShape, RowsAlike, attention_alike, linear_alike_from
from vllm_specrollout.worker.tuning import TunableMixin
from vllm_specrollout.worker.v1.collecting import runner_for
from vllm_specrollout.worker.v1.cpu_runner import SpecRolloutCPURunner
from vllm_specrollout.worker.v1.kv import scratch_blocks
from vllm_specrollout.worker.v1.matching import MatchingMixin
from vllm_specrollout.worker.v1.reporting import StatsMixin
from vllm_specrollout.worker.v1.warm_up import products_of, warm_up

logger = logging.getLogger("vllm.specrollout")


class SpecRolloutCPUWorker(
    StatsMixin, MatchingMixin, DrafterMixin, TunableMixin, ExplainsMixin, TrainerMixin, CPUWorker
):
    """Chosen by `worker_cls`."""

    model_runner: SpecRolloutCPURunner

    def init_device(self) -> None:
        self.vllm_config = with_model(self.vllm_config)
        keep_off(config_of(self.vllm_config))
        super().init_device()
        if self.use_v2_model_runner:
            raise UnsupportedError(
                "the V2 model runner is in use, and spec rollout runs on the V1 runner only",
                "unset `VLLM_USE_V2_MODEL_RUNNER`, or set it to 0",
            )
        # vLLM names its runner's class in the body of init_device; what it made holds no weights yet.
        check_runner(self, CPUModelRunner)
        runner = runner_for(config_of(self.vllm_config).collect, SpecRolloutCPURunner)
        self.model_runner = runner(self.vllm_config, torch.device("cpu"))

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        wanted = config_of(self.vllm_config).scratch_blocks
        host = psutil.virtual_memory().available
        count, taken = scratch_blocks(self.model_runner.get_kv_cache_spec(), available, host, wanted)
        if taken > min(available // 2, max(host - available, 0)):
            raise UnsupportedError(
                f"`scratch_blocks` is {count}, which takes {taken >> 20} MiB beside {available >> 20} MiB of KV cache;"
                f" the host has {max(host - available, 0) >> 20} MiB left, and half of the KV cache's size is the most",
                "lower `scratch_blocks`, or give the KV cache less memory (`VLLM_CPU_KVCACHE_SPACE`, in GiB)",
            )
        self.model_runner.num_scratch = _least_of_all_ranks(count)
        return available

    def compile_or_warm_up_model(self) -> Any:
        scheduler, runner = self.vllm_config.scheduler_config, self.model_runner
        if runner.shape[0] is not DraftMode.OFF:
            self.model_runner.rows = ask_rows(runner)
            most = scheduler.max_num_seqs * (1 + config_of(self.vllm_config).max_draft_tokens)
            warm_up(runner.get_model(), self.model_config.dtype, min(most, scheduler.max_num_batched_tokens))
        return super().compile_or_warm_up_model()


def ask_rows(runner: SpecRolloutCPURunner) -> RowsAlike | None:
    """How this host rounds the rows of this model; None where it cannot be asked."""
    dtype, builder = runner.model_config.dtype, runner.attn_groups[0][0].get_metadata_builder(0)
    try:
        shape = HeadShape(
            num_heads=builder.num_heads,
            num_kv_heads=builder.num_kv_heads,
            head_size=builder.head_dim,
            block_size=builder.block_size,
            isa=builder.isa,
        )
        rows = RowsAlike(
            attention=attention_alike(shape, dtype),
            linear_from=linear_alike_from(products_of(runner.get_model()), dtype),
        )
    except Exception as error:  # a layer that wants more than its input, or a cache of another kind
        logger.info("Spec rollout: this host was not asked how it rounds rows: %s", error)
        return None
    if not rows.are_alike:
        logger.info("Spec rollout: rows round here as follows: %s (docs/concepts/exactness.md)", rows)
    return rows


def _least_of_all_ranks(count: int) -> int:
    """The first rank's trees are every rank's, so none may have less scratch than it counts on."""
    group = get_tp_group()
    if group.world_size == 1:
        return count
    least = torch.tensor(count)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)
