"""Matrix products of all sizes that drafts may make, compiled before the first request comes.

On CPU, oneDNN compiles a product when it first meets its shape, which takes as long as half a step of a small model.
Plain decoding meets a new shape when a request comes or goes; with drafts nearly every step has another number of rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

logger = logging.getLogger("vllm.specrollout")

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


def products_of(model: torch.nn.Module) -> Iterator[tuple[int, Product]]:
    """Width of the input, and the product, of one layer of each kind: layers of one shape share their kernels."""
    seen = set()
    for module in model.modules():
        if isinstance(module, LinearBase):
            width, height = module.input_size_per_partition, module.output_size_per_partition
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
