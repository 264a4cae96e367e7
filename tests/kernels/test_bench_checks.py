"""The kernel measurements' checks pass the kernels, and would not pass wrong ones."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from bench.kernels import attention, flash, inputs, shapes, verdict
from bench.kernels.timing import HostTimer

SMALL = shapes.MODELS["0.5B"]


@pytest.fixture(scope="module")
def kernels():
    return attention.load(), verdict.load_verify(), verdict.load_commit()


def test_the_kernels_pass(kernels, device):
    for context, batch, nodes, kind in shapes.ATTENTION_CHECKS[:3]:
        found = attention.checked(shapes.Attention(SMALL, context, batch, nodes, kind), device.type)
        assert found["passed"], (nodes, kind)
    for batch, nodes in shapes.VERIFY_CHECKS:
        assert verdict.checked_verify(batch, nodes, device.type)["passed"]
    for batch, nodes in shapes.COMMIT_CHECKS:
        assert verdict.checked_commit(batch, nodes, device.type)["passed"]


def test_attention_that_ignores_the_tree_is_found_out(kernels, device):
    def causal(*arguments, **options):
        kernels[0](*arguments[:-1], torch.full_like(arguments[-1], -1), **options)

    assert not attention.checked(shapes.Attention(SMALL, 53, 2, 7, "tree"), device.type, causal)["passed"]


def test_a_commit_that_moves_nothing_is_found_out(kernels, device):
    class Idle:
        CacheTable = kernels[2].CacheTable

        @staticmethod
        def kv_commit(*_):
            """Moves nothing."""

    found = verdict.checked_commit(1, 7, device.type, Idle)
    assert not found["passed"] and "differ" in found["checked"]


CASE = shapes.Attention(SMALL, 40, 2, 7, "tree")


@pytest.fixture
def real(monkeypatch):
    """FlashAttention 3 in PyTorch where a GPU has the real one, held to what vLLM's takes; the schedules made."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("its interface is compared with vLLM's, which is not installed")
    known = signatures(Path(spec.origin).parent / "vllm_flash_attn" / "flash_attn_interface.py")
    schedules = []

    def schedule(_, **sizes):
        assert set(sizes) <= known["get_scheduler_metadata"]
        schedules.append({name: sizes[name] for name in ("causal", "num_splits", "max_seqlen_q", "max_seqlen_k")})
        return schedules[-1]

    def attend(**options):
        assert set(options) <= known["flash_attn_varlen_func"] and options["fa_version"] == 3
        # a schedule made for another call has made kernels read out of bounds
        schedule = options.get("scheduler_metadata", {})
        assert all(schedule[name] == options[name] for name in schedule)
        return flash.plain(**options)

    monkeypatch.setattr(flash, "attend", lambda device: attend)
    monkeypatch.setattr(flash, "_schedule", schedule)
    return schedules


def signatures(path):
    """Function -> names of its arguments; by reading, for importing needs the CUDA extensions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_flash_attention_over_the_context_and_our_kernel_over_the_nodes_are_tree_attention(real, device):
    made = inputs.make_attention(CASE, "cpu")
    out = attention.ours(made, attention.load())()
    # two roundings to bf16 instead of one
    assert attention.excess(out.double(), attention.specified(made)) <= attention.TOLERANCE
    # as our layers call it
    assert real == []


def test_flash_attention_is_called_as_vllm_calls_it_and_sees_a_chain(real):
    chain = shapes.Attention(SMALL, 40, 2, 7, "chain")
    made = inputs.make_attention(chain, "cpu")
    found = flash.causal(made)()
    assert attention.excess(found.double(), attention.specified(made)) <= attention.TOLERANCE
    assert [one["num_splits"] for one in real] == [flash.graph_splits()] and flash.graph_splits() > 1


def test_the_hosts_clock_stands_in_for_the_device_in_a_dry_walk():
    time = HostTimer().time([lambda: None, lambda: None])
    assert time.low_us <= time.median_us <= time.high_us
