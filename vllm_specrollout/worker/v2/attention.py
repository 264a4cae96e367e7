"""Tree attention inside vLLM's attention layers: every layer's implementation is wrapped, none is replaced in vLLM.

With branches in the step, rows attend by their ancestors instead of by order; in all other steps vLLM's own attention
runs, chains included, and so it does in the graphs captured for each kind.
The KV cache is vLLM's own, in the layout that its backends share: [blocks, heads, block size, 2 * head size], keys
before values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.kernels.tree_attention.kernel import tree_attention
from vllm_specrollout.kernels.tree_attention.launch import Tile
from vllm_specrollout.kernels.tree_attention.warm_up import warm_up
from vllm_specrollout.worker.v2.inputs import TreeInputs


def install_tree_attention(runner: Any) -> None:
    """Wrap the implementation of every layer; all of them were found to be the kernel's to compute (layers.py)."""
    kind = HostTreeAttention if runner.device.type == "cpu" else TreeAttention
    for layer in attention_layers(runner):
        layer.impl = kind(layer.impl, runner.inputs)


@contextmanager
def attending_by_trees(runner: Any) -> Iterator[None]:
    """Meanwhile they are wrapped."""
    layers = list(attention_layers(runner))
    stock = [layer.impl for layer in layers]
    install_tree_attention(runner)
    try:
        yield
    finally:
        for layer, impl in zip(layers, stock, strict=True):
            layer.impl = impl


def attention_layers(runner: Any) -> Iterator[Any]:
    """vLLM's attention layers, those that share another one's KV cache included."""
    for group in itertools.chain.from_iterable(runner.attn_groups):
        for name in group.layer_names:
            yield runner.compilation_config.static_forward_context[name]


class TreeAttention:
    """One layer's attention: vLLM's own unless rows go by their ancestors."""

    # launch parameters; None: the kernel's own
    tile: Tile | None = None

    def __init__(self, inner: Any, inputs: TreeInputs) -> None:
        self.inner = inner
        self.inputs = inputs
        self.scale = float(inner.scale)
        self.window = _window(inner.sliding_window)
        self.softcap = float(inner.logits_soft_cap or 0.0)
        self._options = {"scale": self.scale, "sliding_window": self.window, "softcap": self.softcap}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None or not self.inputs.by_ancestors:
            return self.inner.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        _refuse_scales(output_scale, output_block_scale)
        return self._attend(query, kv_cache, attn_metadata, output)

    def warm_up(self, layer: Any, dtype: torch.dtype, block_table: torch.Tensor) -> None:
        """Compile what the steps of this layer will launch; `block_table` [1, most blocks] is one of a step's."""
        kv_cache, head_size = layer.kv_cache, self.inner.head_size
        row = torch.zeros(1, self.inner.num_heads, head_size, dtype=dtype, device=kv_cache.device)
        keys, values = kv_cache[..., :head_size], kv_cache[..., head_size:]
        warm_up(row, keys, values, torch.empty_like(row), block_table, tile=self.tile, **self._options)

    def plainly(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The layer's own attention, causal, whatever the step holds."""
        return self.inner.forward(layer, query, key, value, kv_cache, attn_metadata, output)

    def attend_to(
        self, query: torch.Tensor, kv_cache: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor,
        block_table: torch.Tensor, num_nodes: torch.Tensor, ancestors: torch.Tensor, most_rows: int, longest: int,
        num_programs: int,
    ) -> torch.Tensor:  # fmt: skip
        """[T, Hq, D] what our kernel computes of these rows, outside of any step; arguments as of `tree_attention`."""
        out, head_size = torch.empty_like(query), query.shape[-1]
        tree_attention(
            query, kv_cache[..., :head_size], kv_cache[..., head_size:], out, starts, lengths, block_table, num_nodes,
            ancestors, max_query_len=most_rows, max_seq_len=longest, num_programs=num_programs, tile=self.tile,
            **self._options,
        )  # fmt: skip
        return out

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor) -> torch.Tensor:
        rows, num_reqs = metadata.num_actual_tokens, metadata.seq_lens.shape[0]
        head_size = query.shape[-1]
        tree_attention(
            query[:rows],
            kv_cache[..., :head_size],
            kv_cache[..., head_size:],
            output[:rows].view(query[:rows].shape),
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            self.inputs.num_nodes[:num_reqs],
            self.inputs.ancestors[:rows],
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            tile=self.tile,
            **self._options,
        )
        return output


def off_by(dtype: torch.dtype) -> float:
    """How far apart two ways to attend may be, as a share of the largest value attended to."""
    return 2e-3 if dtype == torch.float32 else 2e-2


class ShadowedAttention:
    """A layer that attends its own way and ours, for the self-check: chains come out alike."""

    def __init__(self, tree: TreeAttention, found: list[tuple[float, float]]) -> None:
        self.tree = tree
        self.found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, **scales: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        arguments = (layer, query, key, value, kv_cache, attn_metadata)
        if attn_metadata is None or not self.tree.inputs.by_ancestors:
            return self.tree.forward(*arguments, output, **scales)
        real = slice(attn_metadata.num_actual_tokens)
        ours = self.tree.forward(*arguments, torch.empty_like(output))[real].float()
        theirs = self.tree.plainly(*arguments, output)
        largest = max(float(value[real].abs().max()), float(theirs[real].abs().max()))
        off = float((ours - theirs[real].float()).abs().nan_to_num(nan=torch.inf).max())
        self.found.append((off, off_by(output.dtype) * largest))
        return theirs


class HostTreeAttention(TreeAttention):
    """For the V2 runner on CPU, where kernels are interpreted and vLLM's own cache layout is packed for its own kernel.

    So this layer owns its cache altogether: it writes keys and values plainly, and attends to every row itself.
    Steps with drafts go through the GPU's kernel, which is the whole point; prompts and steps without, which it would
    interpret for minutes, through PyTorch.
    """

    # an interpreter's time goes by the number of tiles, not by their size
    tile = Tile(block_n=256, block_m=(128,), rows_per_warp=32, num_stages=1)

    def warm_up(self, layer: Any, dtype: torch.dtype, block_table: torch.Tensor) -> None:
        super().warm_up(layer, torch.float32, block_table)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        block_size, head_size = kv_cache.shape[2], key.shape[-1]
        is_real = slot_mapping >= 0
        slots = slot_mapping[is_real]
        rows = is_real.nonzero().flatten()
        blocks, offsets = slots // block_size, slots % block_size
        kv_cache[blocks, :, offsets, :head_size] = key[rows].to(kv_cache.dtype)
        kv_cache[blocks, :, offsets, head_size:] = value[rows].to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        _refuse_scales(output_scale, output_block_scale)
        starts, nodes = attn_metadata.query_start_loc, self.inputs.num_nodes
        if self.inputs.by_ancestors:
            # in float32, as the plain way below is: weights rounded to bfloat16 would move logits by up to 0.08
            found = torch.empty_like(query, dtype=torch.float32)
            self._attend(query.float(), kv_cache, attn_metadata, found)
            real = slice(attn_metadata.num_actual_tokens)
            output[real] = found[real].view_as(output[real])
        for r, rows in enumerate(starts.diff().tolist()):
            if not self.inputs.by_ancestors or (rows > 1 and not int(nodes[r])):
                self._attend_causally(query, kv_cache, attn_metadata, output, r)
        return output

    def plainly(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        for r in range(len(attn_metadata.query_start_loc) - 1):
            self._attend_causally(query, kv_cache, attn_metadata, output, r)
        return output

    def _attend_causally(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor, request: int
    ) -> None:
        """Causal attention of one request's rows, the plain way."""
        begin, end = metadata.query_start_loc[request : request + 2].tolist()
        length, head_size = int(metadata.seq_lens[request]), query.shape[-1]
        blocks = metadata.block_table[request, : -(-length // kv_cache.shape[2])].long()
        cached = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
        cached = cached.repeat_interleave(query.shape[1] // cached.shape[0], 0)
        scores = query[begin:end].transpose(0, 1).float() @ cached[..., :head_size].transpose(1, 2) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        at, keys = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)[None]
        hidden = (keys > at) | ((keys <= at - self.window) if self.window else torch.zeros_like(keys > at))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[begin:end] = (
            (weights @ cached[..., head_size:]).transpose(0, 1).to(output.dtype).view_as(output[begin:end])
        )


def _refuse_scales(*scales: torch.Tensor | None) -> None:
    if any(scale is not None for scale in scales):
        raise UnsupportedError(
            "the compiler quantises what attention writes, which draft trees cannot",
            'set `--compilation-config \'{"pass_config": {"fuse_attn_quant": false}}\'`, or {"shape": "chain"}',
        )


def _window(sliding_window: Any) -> int:
    """vLLM says (left, right) with (-1, -1) for none, or -1; the kernel counts the keys a row sees, 0 for all."""
    if isinstance(sliding_window, tuple):
        return 0 if sliding_window[0] < 0 else int(sliding_window[0]) + 1
    return 0 if sliding_window is None or sliding_window < 0 else int(sliding_window)
