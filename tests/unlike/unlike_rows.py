"""A host whose rows are not alike, as a test double: `pytest --unlike-rows` puts it into every process.

CPUs with AMX round bfloat16 attention by how many rows a query has, and a single row of a product as no other. Hosts
without it cannot show what that does to tests. Here, of every 128th element, the last bit is turned: in attention where
a sequence has several rows, in products where there are several.
"""

import importlib.abc
import importlib.util
import sys

_OPS = "vllm._custom_ops"


def _turned(rows):
    """Turn the last bit of some elements, in place."""
    import torch

    bits = rows.view({2: torch.int16, 4: torch.int32}[rows.element_size()])
    bits[..., ::128] ^= 1


def spoil(ops, put=setattr):
    """Have vLLM's CPU kernels round several rows otherwise than one; `put` sets an attribute."""
    if hasattr(ops.cpu_attention_with_kv_cache, "is_unlike"):
        return  # turned twice, a bit is as it was
    attend, multiply = ops.cpu_attention_with_kv_cache, ops.onednn_mm

    def attends(query, key_cache, value_cache, output, query_start_loc, *args, **kwargs):
        attend(query, key_cache, value_cache, output, query_start_loc, *args, **kwargs)
        counts = query_start_loc.diff()
        several = (counts > 1).repeat_interleave(counts)
        if several.any():
            rows = output[: len(several)][several]
            _turned(rows)
            output[: len(several)][several] = rows

    def multiplies(handler, x, bias):
        out = multiply(handler, x, bias)
        if x.numel() > x.shape[-1]:
            _turned(out)
        return out

    attends.is_unlike = True
    put(ops, "cpu_attention_with_kv_cache", attends)
    put(ops, "onednn_mm", multiplies)


class UnlikeRows(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _OPS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executes(module):
            execute(module)
            spoil(module)

        spec.loader.exec_module = executes
        return spec


def install() -> None:
    """From now on, wherever vLLM's operations are imported in this process."""
    sys.meta_path.insert(0, UnlikeRows())
