"""The CPU worker: stock vLLM's, with our model runner and room for scratch blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import vllm.envs
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specrollout.errors import UnsupportedError, logger
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.calls import DrafterMixin, StatsMixin, TrainerMixin
from vllm_specrollout.worker.common import config_of, with_model
from vllm_specrollout.worker.models.decoupled import keep_off
from vllm_specrollout.worker.rows import HeadShape, RowsAlike, attention_alike, linear_alike_from
from vllm_specrollout.worker.v1.cpu_runner import SpecRolloutCPURunner
from vllm_specrollout.worker.v1.kv import scratch_blocks

MOST_ROWS = 160
"""oneDNN keeps 1,024 products, and a model has four to six kinds of them."""
MOST_S = 2.0
"""Seconds that starting may take longer. A model that is too large for that hardly notices a compilation."""

Product = Callable[[torch.Tensor], torch.Tensor]


def warm_up(
    model: torch.nn.Module, dtype: torch.dtype, most_rows: int, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Run each kind of product once for 1, 2, 3, ... rows; returns the most rows that there was time for.

    Args:
        dtype: of the hidden states.
        most_rows: that a step can have.
    """
    end = clock() + MOST_S
    products = list(products_of(model))
    with torch.inference_mode():
        for rows in range(1, min(most_rows, MOST_ROWS) + 1):
            if clock() >= end:
                return rows - 1
            try:
                for width, product in products:
                    product(torch.zeros(rows, width, dtype=dtype))
            except Exception as error:  # of a layer that wants more than its input: it is compiled in its first step
                logger.info("Spec rollout: products are not compiled in advance: %s", error)
                return rows - 1
    return min(most_rows, MOST_ROWS)


def text_model(runner: SpecRolloutCPURunner) -> torch.nn.Module:
    """What decodes: of a multimodal model the part behind its encoders."""
    model = runner.get_model()
    return model.get_language_model() if supports_multimodal(model) else model


def products_of(model: torch.nn.Module) -> Iterator[tuple[int, Product]]:
    """Width of the input, and the product, of one layer of each kind: layers of one shape share their kernels."""
    seen = set()
    for module in model.modules():
        if isinstance(module, LinearBase):
            # one that each rank has whole knows of no parts
            width = getattr(module, "input_size_per_partition", module.input_size)
            height = getattr(module, "output_size_per_partition", module.output_size)
        elif isinstance(module, ParallelLMHead):
            width, height = module.embedding_dim, module.num_embeddings_per_partition
        else:
            continue
        method = module.quant_method
        bias = getattr(module, "bias", None)
        kind = (type(method), width, height, bias is None)
        if method is not None and kind not in seen:
            seen.add(kind)
            yield width, _product(module, bias)


def _product(module: torch.nn.Module, bias: torch.Tensor | None) -> Product:
    return lambda x: module.quant_method.apply(module, x, bias)


class SpecRolloutCPUWorker(StatsMixin, DrafterMixin, TrainerMixin, CPUWorker):
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
        self.model_runner = SpecRolloutCPURunner(self.vllm_config, torch.device("cpu"))

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        host = psutil.virtual_memory().available
        count = scratch_blocks(self.model_runner.get_kv_cache_spec(), available, host)
        self.model_runner.num_scratch = _least_of_all_ranks(count)
        return available

    def compile_or_warm_up_model(self) -> Any:
        scheduler, runner = self.vllm_config.scheduler_config, self.model_runner
        if runner.shape[0] is not DraftMode.OFF:
            self.model_runner.rows = ask_rows(runner)
            runner.drafting.withheld.is_exact = is_exact(runner)
            most = scheduler.max_num_seqs * (1 + config_of(self.vllm_config).max_draft_tokens)
            warm_up(text_model(runner), self.model_config.dtype, min(most, scheduler.max_num_batched_tokens))
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
            linear_from=linear_alike_from(products_of(text_model(runner)), dtype),
        )
    except Exception as error:  # a layer that wants more than its input, or a cache of another kind
        logger.info("Spec rollout: this host was not asked how it rounds rows: %s", error)
        return None
    if not rows.are_alike:
        logger.info("Spec rollout: rows round here as follows: %s (docs/concepts/exactness.md)", rows)
    return rows


def is_exact(runner: SpecRolloutCPURunner) -> bool:
    """Whether it is known that a drafted row has the bits of plain decoding, or in float32 all but."""
    rows = runner.rows
    if rows is None or vllm.envs.VLLM_CPU_ATTN_SPLIT_KV:  # at 1, keys are split by how many requests there are
        return False
    asked = (LinearBase, VocabParallelEmbedding)
    others = (module for module in text_model(runner).modules() if not isinstance(module, asked))
    # a mixture of experts, for one, has products that were not asked
    if any(parameter.dim() > 1 for module in others for parameter in module.parameters(recurse=False)):
        return False
    return rows.are_alike or (rows.attention and runner.model_config.dtype is torch.float32)


def _least_of_all_ranks(count: int) -> int:
    """The first rank's trees are every rank's, so none may have less scratch than it counts on."""
    group = get_tp_group()
    if group.world_size == 1:
        return count
    least = torch.tensor(count)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)
