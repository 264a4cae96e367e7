"""Tree attention inside vLLM's attention layers: every layer's implementation is wrapped, none is replaced in vLLM.

With branches in the step, FlashAttention attends to each request's context, and one kernel of ours to the nodes. In all
other steps vLLM's own attention runs, chains included, and so it does in the graphs captured for each kind.
The KV cache is vLLM's own, in the layout that its backends share: [blocks, heads, block size, 2 * head size], keys
before values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends import fa_utils

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.kernels.tree_attention.kernel import attend_to_nodes
from vllm_specrollout.kernels.tree_attention.naive import naive_tree_attention
from vllm_specrollout.worker.v2.inputs import TreeInputs


def install_tree_attention(runner: Any) -> None:
    """Wrap the implementation of every layer; all of them were found to be ours to compute (shape.py)."""
    kind = HostTreeAttention if runner.device.type == "cpu" else TreeAttention
    for layer in attention_layers(runner):
        layer.impl = kind(layer.impl, runner.inputs, runner.max_draft_tokens)


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
    """vLLM's attention layers."""
    for group in itertools.chain.from_iterable(runner.attn_groups):
        for name in group.layer_names:
            yield runner.compilation_config.static_forward_context[name]


class TreeAttention:
    """One layer's attention: vLLM's own unless rows go by their ancestors."""

    # of the rows that a step's kernel is given; None: the model's own
    dtype: torch.dtype | None = None

    def __init__(self, inner: Any, inputs: TreeInputs, most_nodes: int) -> None:
        self.inner = inner
        self.inputs = inputs
        self.softcap = float(inner.logits_soft_cap or 0.0)
        self._options = {"scale": float(inner.scale), "softcap": self.softcap, "most_nodes": most_nodes}

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
            return self.plainly(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                "the compiler quantises what attention writes, which draft trees cannot",
                'set `--compilation-config \'{"pass_config": {"fuse_attn_quant": false}}\'`, or {"shape": "chain"}',
            )
        rows = attn_metadata.num_actual_tokens
        query = query[:rows].to(self.dtype or query.dtype)
        # a view of the output itself, unless rows are of a type of their own
        found = output[:rows].view(query.shape).to(query.dtype)
        lse = self._attend_to_context(query, kv_cache, attn_metadata, found)
        key, value, inputs = key.to(query.dtype), value.to(query.dtype), self.inputs
        nodes = inputs.num_nodes[: len(attn_metadata.seq_lens)]
        starts = attn_metadata.query_start_loc
        attend_to_nodes(query, key, value, found, lse, starts, nodes, inputs.ancestors, **self._options)
        if self.dtype is not None:
            output[:rows] = found.view(output[:rows].shape)
        return output

    def warm_up(self, layer: Any, dtype: torch.dtype) -> None:
        """Compile what the steps of this layer will launch."""
        inner, device = self.inner, layer.kv_cache.device
        sizes = (inner.num_heads, inner.num_kv_heads, inner.num_kv_heads, inner.num_heads)
        # as in a step, all but the last are parts of one projection's result
        row = torch.zeros(1, sum(sizes[:3]), inner.head_size, dtype=self.dtype or dtype, device=device)
        query, key, value = (part for part in row.split(sizes[:3], 1))
        none = torch.zeros(2, dtype=torch.int32, device=device)
        lse = torch.zeros(inner.num_heads, 1, device=device)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        attend_to_nodes(query, key, value, out, lse, none, none[:1], none.long(), **self._options)

    def plainly(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *scales: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """The layer's own attention, causal, whatever the step holds."""
        return self.inner.forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)

    def _attend_to_context(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, out: torch.Tensor
    ) -> torch.Tensor:
        """Write each row's attention to its request's context, and return the logarithms of its sums, [Hq, T].

        vLLM's schedule of the step is for causal rows; without one FlashAttention makes its own, in the same launch.
        """
        keys, values = (
            canonicalize_singleton_dim_strides(part)
            for part in kv_cache.transpose(1, 2).split(self.inner.head_size, dim=-1)
        )
        _, lse = fa_utils.flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=self.inputs.context_lens[: len(metadata.seq_lens)],
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.inner.scale,
            causal=False,
            block_table=metadata.block_table,
            softcap=self.softcap,
            return_softmax_lse=True,
            fa_version=self.inner.vllm_flash_attn_version,
            num_splits=metadata.max_num_splits,
        )
        return lse


class ShadowedAttention:
    """A layer that attends its own way and by our specification as well, for the self-check.

    The root and the first node attend causally, so they show what the layer itself computes of its cache.
    """

    def __init__(self, tree: TreeAttention, found: list[tuple[float, float]]) -> None:
        self.tree = tree
        self.found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tree, name)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, **scales: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        tree, inputs = self.tree, self.tree.inputs
        if attn_metadata is None or not inputs.by_ancestors:
            return tree.forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        rows, starts = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        theirs = torch.empty_like(output)
        tree.plainly(layer, query, key, value, kv_cache, attn_metadata, theirs)
        tree.forward(layer, query, key, value, kv_cache, attn_metadata, output)
        nodes, size = inputs.num_nodes[: len(attn_metadata.seq_lens)], query.shape[-1]
        wanted = naive_tree_attention(
            query[:rows], kv_cache[..., :size], kv_cache[..., size:], starts, attn_metadata.seq_lens,
            attn_metadata.block_table, nodes, inputs.ancestors[:rows],
            scale=tree.inner.scale, softcap=tree.softcap,
        )  # fmt: skip
        roots = starts[1 : 1 + len(nodes)] - 1 - nodes
        for causal in (roots, roots + (nodes > 0)):
            wanted[causal.long()] = theirs[:rows].view(query[:rows].shape)[causal.long()].double()
        off = (output[:rows].view(query[:rows].shape) - wanted).abs().nan_to_num(nan=torch.inf).max()
        # two ways to attend are so far apart at most, as a share of the largest value attended to
        share = 2e-3 if output.dtype == torch.float32 else 2e-2
        self.found.append((float(off), share * max(float(value[:rows].abs().max()), float(wanted.abs().max()))))
        return output


class HostTreeAttention(TreeAttention):
    """For the V2 runner on CPU, where kernels are interpreted and vLLM's own cache layout is packed for its own kernel.

    So this layer owns its cache altogether: it writes keys and values plainly, and attends to them through PyTorch.
    Nodes go through the GPU's kernel, which is the whole point.
    """

    # weights rounded to bfloat16 would move logits by up to 0.08
    dtype = torch.float32

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        rows = (slot_mapping >= 0).nonzero().flatten()
        slots, size = slot_mapping[rows], kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = torch.cat([key[rows], value[rows]], dim=-1).to(kv_cache.dtype)

    def plainly(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *scales: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if attn_metadata is not None:
            self._attend(query, kv_cache, attn_metadata, attn_metadata.seq_lens, output, is_causal=True)
        return output

    def _attend_to_context(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, out: torch.Tensor
    ) -> torch.Tensor:
        return self._attend(query, kv_cache, metadata, self.inputs.context_lens, out, is_causal=False)

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, lengths: torch.Tensor, out: torch.Tensor,
        *, is_causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        """What FlashAttention does: attend to the first keys of each request, and return the logarithms of the sums."""
        lse, size = torch.zeros(query.shape[1], len(query)), query.shape[-1]
        for r, (begin, end) in enumerate(itertools.pairwise(metadata.query_start_loc.tolist())):
            length = int(lengths[r])
            blocks = metadata.block_table[r, : -(-length // kv_cache.shape[2])].long()
            cached = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
            cached = cached.repeat_interleave(query.shape[1] // cached.shape[0], 0)
            scores = query[begin:end].transpose(0, 1).float() @ cached[..., :size].transpose(1, 2) * self.inner.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if is_causal:
                at, keys = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)[None]
                scores = scores.masked_fill(keys > at, float("-inf"))
            lse[:, begin:end] = scores.logsumexp(-1)
            attended = scores.softmax(-1) @ cached[..., size:]
            out[begin:end] = attended.transpose(0, 1).to(out.dtype).view_as(out[begin:end])
        return lse
