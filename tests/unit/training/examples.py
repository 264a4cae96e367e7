"""Examples of made-up hidden states whose values say where they belong."""

import torch

from vllm_specrollout.training.buffer import Example, Source

SOURCE = Source("target", (1, 3), 4)


def example(length: int, num_prompt: int, *, number: int = 0, weights_version: int = 0) -> Example:
    """Row i holds 1000 * number + i, in every layer."""
    rows = 1000.0 * number + torch.arange(length, dtype=torch.float32)
    hidden = SOURCE.hidden_size * len(SOURCE.layers)
    return Example(
        torch.arange(length) + 10 * number,
        rows[:, None].expand(length, hidden).contiguous(),
        rows[:, None].expand(length, SOURCE.hidden_size).contiguous() + 0.5,
        num_prompt,
        weights_version,
    )
