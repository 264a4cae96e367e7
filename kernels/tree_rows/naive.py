"""The specification of `kernel.py`: one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TOKENS, PARENTS = 0, 1


def chain_length(tokens: Sequence[int], parents: Sequence[int]) -> int:
    """Drafts from the first on each of which hangs on the one before it."""
    return next((j for j, parent in enumerate(parents) if tokens[j] < 0 or parent != j - 1), len(tokens))


def lay_out(
    drafted: torch.Tensor, rows: torch.Tensor, cu_logits: torch.Tensor, starts: torch.Tensor, input_ids: torch.Tensor,
    parents: torch.Tensor, draft_ids: torch.Tensor, num_nodes: torch.Tensor, ancestors: torch.Tensor,
    shift: torch.Tensor, *, has_branches: bool,
) -> None:  # fmt: skip
    """As `kernel.lay_out`."""
    for request, row in enumerate(rows.tolist()):
        first, end = cu_logits[request : request + 2].tolist()
        size, root = end - first - 1, int(starts[request + 1]) - (end - first)
        tokens, above = drafted[row, TOKENS, :size].tolist(), drafted[row, PARENTS, :size].tolist()
        there = size if has_branches else chain_length(tokens, above)
        parents[first], draft_ids[first] = -1, input_ids[root]
        seen, depths = [], []
        for node, (token, parent) in enumerate(zip(tokens, above, strict=True)):
            is_there = node < there and token >= 0
            parents[first + 1 + node] = parent + 1 if is_there else 0
            draft_ids[first + 1 + node] = token if is_there else -1
            input_ids[root + 1 + node] = max(token, 0)
            parent = parent if is_there else -1
            seen.append((1 << node) | (seen[parent] if parent >= 0 else 0))
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            if has_branches:
                ancestors[root + 1 + node] = seen[node] - (1 << 64 if seen[node] >> 63 else 0)
                shift[root + 1 + node] = depths[node] - (node + 1)
        if has_branches:
            num_nodes[request], ancestors[root], shift[root] = size, 0, 0
