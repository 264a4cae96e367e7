"""Tree attention against FlashAttention 3, FlexAttention and the copy bandwidth."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .inputs import AttentionInputs, make_attention, make_cache
from .shapes import BLOCK_SIZE, MODELS, Attention, Cache, attentions, caches
from .timing import Time, Timer

Call = Callable[[], Any]
_FLEX_CELLS, _FLEX_NODES = ((8, 4 << 10), (32, 1 << 10)), (15, 63)
"""(batch, context) and nodes of the trees at which FlexAttention is measured: each new shape compiles for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape. Times are None with a reason in `notes`: not there, not applicable, or wrong."""

    model: str
    batch: int
    context: int
    nodes: int
    kind: str
    ours: Time | None
    fa3: Time | None
    flex: Time | None
    # the least time that copying the needed bytes would take
    roof_us: float
    notes: tuple[str, ...] = ()

    @property
    def of_roof(self) -> float | None:
        """1 would be the roof itself."""
        return None if self.ours is None else self.roof_us / self.ours.median_us

    @property
    def over_fa3(self) -> float | None:
        """How many times FlashAttention 3's time ours takes."""
        return None if self.ours is None or self.fa3 is None else self.ours.median_us / self.fa3.median_us


def load() -> tuple[Any, str | None]:
    """(our kernel or None, why not)."""
    try:
        return importlib.import_module("vllm_specrollout.kernels.tree_attention.kernel").tree_attention, None
    except (ImportError, AttributeError) as error:
        return None, f"tree_attention cannot be imported: {error}"


def check(kernel: Any, device: str = "cuda") -> str | None:
    """Compare with the specification on small trees and chains of both models; the reason if it fails."""
    from . import reference  # it needs the kernels' folders, which may be missing

    for model in MODELS:
        for nodes, kind in ((0, "chain"), (7, "tree"), (63, "tree"), (31, "chain")):
            cache = Cache(model, 3 * BLOCK_SIZE + 5, 2)
            inputs = make_attention(Attention(cache, nodes, kind), make_cache(cache, device))
            found, wanted = inputs.call(kernel).double(), reference.attention(inputs)
            worst = reference.excess(found, wanted)
            if not worst <= reference.TOLERANCE:
                return f"{model.name}, {kind} of {nodes}: off by {worst:.3g}, more than {reference.TOLERANCE:g}"
    return None


def measure(
    timer: Timer, bandwidth: float, is_quick: bool, report: Callable[[str], None], device: str = "cuda"
) -> Iterator[Row]:
    """A row per shape, in order; `report` is told of each. A kernel that fails its check is not timed."""
    kernel, reason = load()
    if kernel is not None and (wrong := check(kernel, device)) is not None:
        kernel, reason = None, f"tree_attention is wrong, so it is not timed: {wrong}"
    for cache in caches(is_quick):
        paged = make_cache(cache, device)
        for case in attentions(cache, is_quick):
            report(case.title)
            inputs = make_attention(case, paged)
            calls: dict[str, Call | None] = {
                "ours": None if kernel is None else functools.partial(inputs.call, kernel),
                "fa3": flash_call(inputs) if case.kind == "chain" else None,
                "flex": flex_call(inputs) if _has_flex(case) else None,
            }
            times, notes = _time_all(timer, calls)
            yield Row(
                model=cache.model.name,
                batch=cache.batch,
                context=cache.context,
                nodes=case.nodes,
                kind=case.kind,
                roof_us=case.least_bytes / bandwidth * 1e6,
                notes=(*((reason,) if reason else ()), *notes),
                **times,
            )
        del paged
        torch.cuda.empty_cache()


def _has_flex(case: Attention) -> bool:
    cell = (case.cache.batch, case.cache.context)
    return case.kind == "tree" and cell in _FLEX_CELLS and case.nodes in _FLEX_NODES


def _time_all(timer: Timer, calls: dict[str, Call | None]) -> tuple[dict[str, Time | None], list[str]]:
    times: dict[str, Time | None] = {}
    notes = []
    for name, call in calls.items():
        try:
            times[name] = None if call is None else timer.time(call)
        except Exception as error:  # a rival that cannot run here must not end the others' measurement
            first = str(error).splitlines() or [""]
            times[name] = None
            notes.append(f"{name}: {type(error).__name__}: {first[0][:200]}")
    return times, notes


def flash_call(inputs: AttentionInputs) -> Call:
    """FlashAttention 3 over the same pages, as vLLM's backend calls it: causal, its schedule made outside of the call.

    The schedule's kernel is left out because vLLM runs it once a step, not once a layer.
    """

    def prepare() -> Call:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

        keys, values = inputs.cache.kv.transpose(1, 2).split(inputs.query.shape[-1], dim=-1)
        schedule = get_scheduler_metadata(
            batch_size=len(inputs.seq_lens),
            max_seqlen_q=inputs.max_query_len,
            max_seqlen_k=inputs.max_seq_len,
            num_heads_q=inputs.query.shape[1],
            num_heads_kv=keys.shape[2],
            headdim=inputs.query.shape[2],
            cache_seqlens=inputs.seq_lens,
            qkv_dtype=inputs.query.dtype,
            cu_seqlens_q=inputs.query_start_loc,
            page_size=BLOCK_SIZE,
            causal=True,
            num_splits=0,
        )
        out = torch.empty_like(inputs.query)
        return lambda: flash_attn_varlen_func(
            q=inputs.query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_q=inputs.max_query_len,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=inputs.max_seq_len,
            softmax_scale=inputs.scale,
            causal=True,
            block_table=inputs.cache.block_table,
            scheduler_metadata=schedule,
            num_splits=0,
            fa_version=3,
        )

    return _once(prepare)


def flex_call(inputs: AttentionInputs) -> Call:
    """torch's FlexAttention with the same mask over gathered, contiguous keys and values: no paging to pay for."""

    def prepare() -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch, size = len(inputs.seq_lens), inputs.query.shape[-1]
        length, nodes = inputs.max_seq_len, inputs.max_query_len - 1
        # [batch, kv heads, tokens, 2 * head size]
        kv = inputs.cache.kv[inputs.cache.block_table.long()].transpose(1, 2).flatten(2, 3)[:, :, :length]
        keys, values = kv[..., :size].contiguous(), kv[..., size:].contiguous()
        query = inputs.query.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()
        words = inputs.ancestors[: inputs.max_query_len]

        def mask(b: Any, h: Any, row: Any, token: Any) -> Any:
            node = (token - (length - nodes)).clamp(min=0)
            return (token < length - nodes) | ((words[row] >> node) & 1).bool()

        blocks = create_block_mask(mask, None, None, inputs.max_query_len, length, device="cuda")
        # else the shapes before count towards the limit of recompilations, behind which it runs uncompiled
        torch.compiler.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(query, keys, values, block_mask=blocks, scale=inputs.scale, enable_gqa=True)

    return _once(prepare)


def _once(prepare: Callable[[], Call]) -> Call:
    """A call that prepares itself at its first use, so that preparing may fail where calls may fail."""
    ready: list[Call] = []

    def call() -> Any:
        if not ready:
            ready.append(prepare())
        return ready[0]()

    return call
