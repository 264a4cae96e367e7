"""Examples laid behind one another, several to a batch, with the masks that keep them apart.

What belongs here: which tokens share a batch, and which of them a head is asked about. A batch is one long row, so
none of it is padding; `document_ids` say what may attend to what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .buffer import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """T places. At each, a head sees a token and what the target made of those before it, and drafts the next one."""

    # [1, T] int64: the token that is drafted from
    input_ids: torch.Tensor
    # [1, T, layers * hidden]: the target's, of the token before it
    hidden_states: torch.Tensor
    # [1, T, hidden]: the target's last one, of the token before it
    last_before: torch.Tensor
    # [1, T, hidden]: the target's last one, of the very token: its output head says what the draft should have been
    last_hidden: torch.Tensor
    # [1, T] bool: whether the draft counts
    loss_mask: torch.Tensor
    # [1, T] int64 which example a place belongs to
    document_ids: torch.Tensor
    # [1, T] int64 position in the request, from the example's first place on
    position_ids: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The columns by name, on the device; hidden states in this dtype."""
        columns = {name: getattr(self, name).to(device) for name in self.__dataclass_fields__}
        return {name: one.to(dtype) if one.is_floating_point() else one for name, one in columns.items()}


def packed(lengths: Sequence[int], most_tokens: int, generator: torch.Generator | None) -> Iterator[list[int]]:
    """Which examples share a batch: in a random order, as many as fit, one at least.

    Args:
        lengths: [examples] tokens of each.
        generator: None: in the order given.
    """
    count = len(lengths)
    order = range(count) if generator is None else torch.randperm(count, generator=generator).tolist()
    batch: list[int] = []
    taken = 0
    for i in order:
        if batch and taken + lengths[i] - 1 > most_tokens:
            yield batch
            batch, taken = [], 0
        batch.append(i)
        taken += lengths[i] - 1
    if batch:
        yield batch


def batch_of(examples: Sequence[Example], num_levels: int, most_tokens: int) -> Batch:
    """The examples behind one another.

    Args:
        num_levels: how many tokens ahead a head is asked. Level k looks k places on, so the first of an example must
            not count: the end of the one before it would be asked about them.
        most_tokens: an example that is longer is cut.
    """
    columns: list[tuple[torch.Tensor, ...]] = []
    for document, example in enumerate(examples):
        end = min(len(example), most_tokens + 1)
        places = torch.arange(1, end)
        columns.append(
            (
                example.token_ids[1:end].long(),
                example.hidden[: end - 1],
                example.last_hidden[: end - 1],
                example.last_hidden[1:end],
                # the first draft is from the answer's first token: a prompt is never drafted
                (places >= example.num_prompt) & (places >= num_levels),
                torch.full((end - 1,), document),
                places,
            )
        )
    return Batch(*(torch.cat(column)[None] for column in zip(*columns, strict=True)))
